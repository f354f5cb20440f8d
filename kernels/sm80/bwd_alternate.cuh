// The key kernel's walk over row tiles in float64, where half of the warps suffice for the scores: the halves alternate.
//
//   A row tile      S | dP    P, dS | dQ of the tile before    dV, dK
#pragma once
#include "ptx/barrier.cuh"
#include "sm80/bwd_gradients.cuh"
#include "sm80/bwd_queries.cuh"

namespace sm80 {

__device__ __forceinline__ bool send_queries(u32 shared, const Params& p, const Head& head, i32 tile, int stage, u32 arrived) {
    return send_row_tile(tile_q(shared, stage).tile, tile_do(shared, stage).tile, shared + stat_at + stage * row_numbers, p, head, tile, arrived);
}

// What the two halves of the warps tell each other in walk_alternating.  All but the first two barriers complete a phase with every row tile.
struct Signals {
    static constexpr int rows = 0, gradients = 2, weights = 3, keys = 4, count = 5;  // mbarriers: rows in a stage, dP, P and dS; all are used
    static constexpr u32 half = 32 * scores_warps;
    u32 barriers;  // shared address
    u32 tile;      // the row tile's number, odd or even
    u32 loads;     // of each stage, odd or even

    __device__ __forceinline__ void init() const {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < count; ++i) ptx::mbarrier_init(at(i), i == keys ? threads : half);
        ptx::mbarrier_init_fence();
    }
    __device__ __forceinline__ u32 at(int signal) const { return barriers + 8 * signal; }
    __device__ __forceinline__ void give(int signal) const { ptx::mbarrier_arrive(at(signal)); }
    __device__ __forceinline__ void wait(int signal, u32 before = 0) const { ptx::mbarrier_wait(at(signal), (tile ^ before) & 1); }
    __device__ __forceinline__ void wait_rows(int stage) {
        ptx::mbarrier_wait(at(rows + stage), loads >> stage & 1);
        loads ^= 1u << stage;
    }
};

struct AlternatingHandover {
    const Signals& signals;
    bool first;  // row tile of a head

    __device__ __forceinline__ void before() const {
        if (!first) signals.wait(Signals::keys, 1);  // all are done with P and the row tile of before
    }
    __device__ __forceinline__ void done() const { signals.give(Signals::gradients); }
    __device__ __forceinline__ void wait() const { signals.wait(Signals::gradients); }
};

// The same by two halves of the warps.  Of one row tile a half computes S, and from it P and dS, while the other one computes dP, sends for
// the next row tile and adds dQ of the tile before.  Then each adds its part of dV and dK and goes on to the next tile, where they have
// changed places.  They wait for each other only where dP, P and dS change hands, so that there are nearly always products of two warps for
// each of the tensor cores: one warp's loads and exponentials leave gaps.
__device__ __forceinline__ void walk_alternating(KeyGradients& acc, i32& group, Signals& signals, u32 shared, const Params& p, const Head& head,
                                              RowWalk& walk, const Slice& slice, i32 first_tile) {
    bool scores = threadIdx.x < Signals::half;
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();  // the copy engine is next to write there
    __syncthreads();  // k, v and the first row tile have arrived
    i32 before = -1;
    int stage = 0;
    for (i32 tile = walk.tile, next; tile >= 0 || before >= 0; tile = next) {
        const bool more = tile >= 0;  // once more for dQ of the last tile
        const bool partial = more && walk.partial(p);
        next = more && walk.next(p) ? walk.tile : -1;
        if (more) flush(acc, p, slice, group, first_tile + tile);
        if (more && before >= 0) signals.wait_rows(stage);
        const TilesInShared<AlternatingHandover> tiles = {tile_q(shared, stage), tile_k(shared), tile_do(shared, stage), tile_v(shared), shared + exchange_at,
                                                   {signals, before < 0}};
        if (!scores) {
            if (more) tiles.help();
            const bool sent = next < 0 || send_queries(shared, p, head, next, stage ^ 1, signals.at(Signals::rows + (stage ^ 1)));
            if (before >= 0) add_queries(shared, head.dq_acc, before, stage ^ 1);
            if (!sent) {
                finish_row_tile(tile_q(shared, stage ^ 1), tile_do(shared, stage ^ 1));
                ptx::async_proxy_fence();  // the copy engine may be next to write there
                signals.give(Signals::rows + (stage ^ 1));
            }
        } else if (more) {
            const TilePlace at = {shared + stat_at + stage * row_numbers, tile * cfg::block_m, head.walk.first_key, partial};
            score<true>(tiles, at, p, head, tile_p(shared), tile_ds(shared, stage));
            signals.give(Signals::weights);
        }
        before = tile;
        if (!more) break;
        const auto ready = [&] { signals.wait(Signals::weights); };
        const auto loaded = [&] {  // a condition found here keeps the signal from sinking behind the products
            if (ptx::opaque(tile) >= 0) signals.give(Signals::keys);
        };
        add_keys(acc, shared, slice, stage, ready, loaded);
        stage ^= 1;
        scores = !scores;
        ++signals.tile;
    }
    // Each half passes its own barrier as often as the other: racecheck counts the barriers that a thread has passed, and else takes what
    // __syncthreads parts for a race.
    if (scores && threadIdx.x >= Signals::half) ptx::barrier_sync(read_barrier, Signals::half);
}
}  // namespace sm80
