// Gradients of attention for one tile of keys at a time: FlashAttention's Algorithm 4, with FlashMask's tile skipping (Algorithm 2).
//
//   P = exp(S - m) / l,   dV = P^T dO,   dP = dO V^T,   dS = P (dP - D),   dQ = scale dS K,   dK = scale dS^T Q
//
// One block owns the keys of one tile of one key/value head.  It walks over the query heads of its group and over the row tiles that see
// its keys; dK and dV stay in registers throughout, dQ is added to a float32 accumulator in global memory (cfg::atomic_dq).
// Warps share the work three ways (sm80/bwd_layout.cuh); P and dS pass between them through shared memory, rounded to the input type.
//
// Shared memory   k [block_n][d]   v [block_n][dv]   q [stages][block_m][d]   do [stages][block_m][dv]   p, ds [block_m][block_n]
//                 stat, delta [stages][block_m]   units (float32: sm80/bwd_tiles.cuh)
// Grid            key tiles * key/value heads * batch, tiles fastest
// Workspace       stat, delta, counters (attn/bwd_workspace.cuh); dq_acc (sm80/bwd_queries.cuh)
#include "sm80/bwd_keys.cuh"
#include "sm80/bwd_queries.cuh"

// Algorithm 4 line 10.
__device__ __forceinline__ void load_queries(KeySpace space, const Params& p, const Head& head, i32 tile, int stage) {
    load_row_tile(space.q(stage), space.dout(stage), space.numbers(stage), p, head, tile);
}

// Waits for the rows of `tile` and starts loading those of `next` (-1: none); meanwhile, line 21 for the tile before.
__device__ __forceinline__ void next_queries(KeySpace space, const Params& p, const Head& head, i32 tile, i32 next, i32 before, int stage) {
    constexpr bool two = cfg::stages == 2;
    if constexpr (two) finish_row_tile(space.q(stage), space.dout(stage));
    __syncthreads();  // of two stages, this one has arrived; the other one, or the only one, and P are free; dS of the tile before is complete
    if (!two || next >= 0) load_queries(space, p, head, two ? next : tile, two ? stage ^ 1 : 0);
    ptx::cp_async_commit();
    if (cfg::atomic_dq && before >= 0) add_queries(space.ds(two ? stage ^ 1 : 0), space.k(), head.dq_acc, before);
    if constexpr (!two) {
        finish_row_tile(space.q(), space.dout());
        __syncthreads();  // q and do have arrived; dS is free
    }
}

// Algorithm 4 lines 9-23 for one query head, from row tile walk.tile on; first_tile: number of its first row tile among those of the block.
__device__ __forceinline__ void walk_together(KeyGradients& acc, i32& group, KeySpace space, const Params& p, const Head& head, RowWalk& walk,
                                              const Slice& slice, i32 first_tile) {
    i32 before = -1;  // row tile whose dS is still to be multiplied with K
    int stage = 0;
    for (i32 tile = walk.tile, next; tile >= 0; tile = next) {
        const bool partial = walk.partial(p);
        next = walk.next(p) ? walk.tile : -1;
        flush(acc, p, slice, group, first_tile + tile);
        next_queries(space, p, head, tile, next, before, stage);
        const WholeTiles tiles = {space.q(stage), space.k(), space.dout(stage), space.v(), space.exchange()};
        scores_to_shared<true>(tiles, {space.numbers(stage), tile * cfg::block_m, head.walk.first_key, partial}, p, head, space.p(), space.ds(stage));
        if constexpr (team_local) ptx::barrier_sync(1 + slice.team, 32 * slices);  // the team's P and dS are complete
        else __syncthreads();  // P and dS are complete
        add_keys(acc, space, slice, stage);
        before = tile;
        stage = (stage + 1) % cfg::stages;
    }
    __syncthreads();  // all of dS is complete
    if constexpr (cfg::atomic_dq) add_queries(space.ds((stage + 1) % cfg::stages), space.k(), head.dq_acc, before);
}

// What the two halves of the warps tell each other in walk_alternating.  All but the first two barriers complete a phase with every row tile.
struct Signals {
    static constexpr int rows = 0, gradients = 2, weights = 3, keys = 4, count = 5;  // mbarriers: rows in a stage, dP, P and dS; all are used
    static constexpr u32 half = 32 * scores_warps, read_barrier = 14;  // of the half that has read dP
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
    __device__ __forceinline__ void read() const { ptx::barrier_sync(Signals::read_barrier, Signals::half); }
};

// The same in float64, where half of the warps suffice for the scores:
//
//   A row tile      S | dP    P, dS | dQ of the tile before    dV, dK
//
// Of one row tile a half computes S, and from it P and dS, while the other one computes dP, sends for
// the next row tile and adds dQ of the tile before.  Then each adds its part of dV and dK and goes on to the next tile, where they have
// changed places.  They wait for each other only where dP, P and dS change hands, so that there are nearly always products of two warps for
// each of the tensor cores: one warp's loads and exponentials leave gaps.
__device__ __forceinline__ void walk_alternating(KeyGradients& acc, i32& group, Signals& signals, KeySpace space, const Params& p, const Head& head,
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
        const TilesInShared<AlternatingHandover> tiles = {space.q(stage), space.k(), space.dout(stage), space.v(), space.exchange(), {signals, before < 0}};
        const TileAt next_q = space.q(stage ^ 1), next_do = space.dout(stage ^ 1);
        const int next_rows = Signals::rows + (stage ^ 1);
        if (!scores) {
            if (more) tiles.help();
            const bool sent = next < 0 || send_row_tile(next_q, next_do, space.numbers(stage ^ 1), p, head, next, signals.at(next_rows));
            if (before >= 0) add_queries(space.ds(stage ^ 1), space.k(), head.dq_acc, before);
            if (!sent) {
                finish_row_tile(next_q, next_do);
                ptx::async_proxy_fence();  // the copy engine may be next to write there
                signals.give(next_rows);
            }
        } else if (more) {
            score<true>(tiles, {space.numbers(stage), tile * cfg::block_m, head.walk.first_key, partial}, p, head, space.p(), space.ds(stage));
            signals.give(Signals::weights);
        }
        before = tile;
        if (!more) break;
        const auto ready = [&] { signals.wait(Signals::weights); };
        const auto loaded = [&] {  // a condition found here keeps the signal from sinking behind the products
            if (ptx::opaque(tile) >= 0) signals.give(Signals::keys);
        };
        add_keys(acc, space, slice, stage, ready, loaded);
        stage ^= 1;
        scores = !scores;
        ++signals.tile;
    }
    // Each half passes its own barrier as often as the other: racecheck counts the barriers that a thread has passed, and else takes what
    // __syncthreads parts for a race.
    if (scores && threadIdx.x >= Signals::half) ptx::barrier_sync(Signals::read_barrier, Signals::half);
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) attention_backward(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    __shared__ u64 barriers[Signals::count];
    const KeySpace space = {ptx::shared_address(memory)};
    const Slice slice;
    KeyGradients acc = {};  // line 8
    start_flushes(acc, p, slice);
    i32 group = -1;
    Signals signals = {ptx::shared_address(barriers), 0, 0};
    if constexpr (alternating) signals.init();

    for (i32 member = 0; member < p.group; ++member) {
        describe_group_member(head, p, member);
        __syncthreads();  // head is complete
        RowWalk walk(p, head.walk);
        if (shares(p)) walk.tile = max(walk.tile, first_shared(p) - 1);
        if (!walk.next(p)) continue;
        if (!alternating || threadIdx.x < number_loaders) {
            load_key_tile(space.k(), space.v(), p, head, walk.first_key(), true);  // line 7
            if constexpr (is_split) finish_key_tile(space.k(), space.v());
            if constexpr (cfg::stages == 2) load_queries(space, p, head, walk.tile, 0);
        }
        ptx::cp_async_commit();
        if constexpr (alternating) walk_alternating(acc, group, signals, space, p, head, walk, slice, member * p.row_tiles);
        else walk_together(acc, group, space, p, head, walk, slice, member * p.row_tiles);
        __syncthreads();  // nothing of this head is read again
    }
    store_keys(memory, space, p, slice, acc);  // line 24
}
