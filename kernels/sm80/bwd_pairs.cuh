// S and dP of one pair of tiles after another, for kernels that sum what follows from dS over many of them, a tile of sums in registers.
//
// Shared memory   q [block_m][d]   do [block_m][dv]   k [block_n][d]   v [block_n][dv]   stat, delta [block_m];
//                 or, of tiles too wide, two stages of their stream (sm80/bwd_stream.cuh) and the statistics;
//                 at the end sums [block_m][block_n] of cfg::acc over all of it
#pragma once
#include "sm80/bwd_stream.cuh"

using PairSpace = Space<1, 1, false, 0>;
constexpr int sums_stride = cfg::block_n + 1;

// Where the statistics of a pair's rows lie.
__device__ __forceinline__ u32 pair_numbers(PairSpace space) { return streams ? space.base + 2 * stage_bytes : space.numbers(); }

// Loads a pair of tiles, of which the keys may be there already, and calls work(products, at) in the warps with scores.
template <class Work>
__device__ __forceinline__ void visit_pair(PairSpace space, const Params& p, const Head& head, const TilePlace& at, bool new_keys, const Work& work) {
    if constexpr (streams) {
        Stream<false> stream(p, head, space.base, at, true, {}, 0);
        work(stream, at);
    } else {
        const WholeTiles tiles = {space.q(), space.k(), space.dout(), space.v(), space.exchange()};
        __syncthreads();  // all tiles are done with
        if (new_keys) {
            load_key_tile(tiles.k, tiles.v, p, head, at.first_key, true);
            finish_key_tile(tiles.k, tiles.v);
        }
        load_row_tile(tiles.q, tiles.dout, at.numbers, p, head, at.first_row / cfg::block_m);
        finish_row_tile(tiles.q, tiles.dout);
        __syncthreads();  // everything has arrived
        if (threadIdx.x / 32 < scores_warps) work(tiles, at);
        else tiles.help();
    }
}

// The same for the row tiles from `begin` to `end` that see one key tile; thread 0 describes the head's walk.
template <class Work>
__device__ __forceinline__ void visit_key_tile(PairSpace space, const Params& p, Head& head, i32 key_tile, i32 begin, i32 end, const Work& work) {
    __syncthreads();  // the last head, key tile and walk are done with
    if (threadIdx.x == 0) describe_walk(head, p, key_tile);
    __syncthreads();  // head and walk are complete
    RowWalk walk(p, head.walk);
    walk.tile = max(walk.tile, begin - 1);
    for (bool first = true; walk.next(p) && walk.tile < end; first = false)
        visit_pair(space, p, head, {pair_numbers(space), walk.tile * cfg::block_m, head.walk.first_key, walk.partial(p)}, first, work);
}

// The warp's sums to the tile in shared memory.
__device__ __forceinline__ void save_sums(Acc* tile, const Scores& sums) {
    const i32 lane = threadIdx.x % 32;
    Acc* to = tile + warp_score_row() * sums_stride + warp_score_key();
    for_scores([&](int m, int n, int i) {
        to[(16 * m + i / 2 * 8 + lane / 4) * sums_stride + 8 * n + lane % 4 * 2 + i % 2] = sums[m][n][i];
    });
}
