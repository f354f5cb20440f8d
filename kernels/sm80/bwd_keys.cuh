// What the key kernel's walks (sm80/bwd.cu, sm80/bwd_alternate.cuh) do with a tile: the block's place, its tiles in shared memory, the products.
#pragma once
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_scores.cuh"

namespace sm80 {

constexpr bool split_slices = cfg::head_dim == cfg::head_dim_v;
constexpr bool whole_slices = cfg::whole_columns && split_slices && slices / 2 * slice_columns == cfg::head_dim;  // no warp's columns end early
constexpr int slice_tiles = slice_columns / 8;
using KeyGradients = Acc[team_keys / 16][slice_tiles][4];

// The part of dV or dK that this warp owns.
struct Slice {
    i32 team, column;
    bool is_k;

    __device__ __forceinline__ Slice() {
        const i32 warp = threadIdx.x / 32, part = warp % slices;
        team = warp / slices;
        is_k = part >= slices / 2;
        column = part % (slices / 2) * slice_columns;
    }
};

// Number of the block's tile.  From number p.shared_tile on, p.splits blocks share a tile: each takes p.split_tiles of the row tiles, and adds
// its dK and dV to zeros in memory.  Not kept in registers from one use to the next.
__device__ __forceinline__ i32 tile_number(const Params& p) {
    const i32 block = ptx::opaque(static_cast<i32>(blockIdx.x));
    return may_share && block > p.shared_tile ? p.shared_tile + (block - p.shared_tile) / p.splits : block;
}
__device__ __forceinline__ bool shares(const Params& p) { return may_share && static_cast<i32>(blockIdx.x) >= p.shared_tile; }
__device__ __forceinline__ i32 first_shared(const Params& p) { return (static_cast<i32>(blockIdx.x) - p.shared_tile) % p.splits * p.split_tiles; }
__device__ __forceinline__ i32 key_tile(const Params& p) { return tile_number(p) % p.key_tiles; }
__device__ __forceinline__ i32 flat_kv_head(const Params& p) { return tile_number(p) / p.key_tiles; }

// Describes query head number `member` of the block's group.
__device__ __forceinline__ void describe_group_member(Head& head, const Params& p, i32 member) {
    const i32 flat = flat_kv_head(p);
    describe_head(head, p, flat / p.kv_heads, flat % p.kv_heads * p.group + member);
    if (threadIdx.x != 0) return;
    describe_walk(head, p, key_tile(p));
    if (shares(p)) head.walk.end = min(head.walk.end, first_shared(p) + p.split_tiles);
}

__device__ __forceinline__ TileAt tile_k(u32 shared) { return {shared + k_at, shared + k_units_at}; }
__device__ __forceinline__ TileAt tile_v(u32 shared) { return {shared + v_at, shared + v_units_at}; }
__device__ __forceinline__ TileAt tile_q(u32 shared, int stage) {
    return {shared + q_at + stage * cfg::block_m * qk_stride, shared + q_units_at + stage * row_units};
}
__device__ __forceinline__ TileAt tile_do(u32 shared, int stage) {
    return {shared + do_at + stage * cfg::block_m * v_stride, shared + do_units_at + stage * row_units};
}
__device__ __forceinline__ TileAt tile_p(u32 shared) { return {shared + p_at, shared + p_units_at}; }
__device__ __forceinline__ TileAt tile_ds(u32 shared, int stage) {
    return {shared + ds_at + stage * cfg::block_m * p_stride, shared + ds_units_at + stage * weight_units};
}

// Algorithm 4 lines 11-15, 17-20 for the rows of one tile; P and dS go to shared memory.
__device__ __forceinline__ void rows_to_shared(u32 shared, const Params& p, const Head& head, i32 tile, bool partial, int stage) {
    const WholeTiles tiles = {tile_q(shared, stage), tile_k(shared), tile_do(shared, stage), tile_v(shared), shared + exchange_at};
    const TilePlace at = {shared + stat_at + stage * row_numbers, tile * cfg::block_m, head.walk.first_key, partial};
    scores_to_shared<true>(tiles, at, p, head, tile_p(shared), tile_ds(shared, stage));
}

// acc += A^T B for a tile of weights and one of rows.  float64: ready() before the first of the weights is read, loaded() when the last of
// both are in registers.
template <int stride, class Ready, class Loaded>
__device__ __forceinline__ void add_rows(KeyGradients& acc, TileAt weights, TileAt rows, const Ready& ready, const Loaded& loaded) {
    if constexpr (sizeof(Elem) == 8) {
        constexpr int last = cfg::block_m / 8 - 1;
        const auto between = [&](int step) {
            if (step == last) loaded();
        };
        Product<Elem>::template run<cfg::block_m, Along::rows, p_stride, Along::rows, stride>(acc, weights, rows, ready, between);
    } else {
        product<cfg::block_m, Along::rows, p_stride, Along::rows, stride>(acc, weights, rows);
    }
}

// Algorithm 4 lines 16 and 22: dV += P^T dO or dK += dS^T Q, for the columns that this warp owns.
template <class Ready = Nothing, class Loaded = Nothing>
__device__ __forceinline__ void add_keys(KeyGradients& acc, u32 shared, const Slice& slice, int stage, const Ready& ready = {},
                                         const Loaded& loaded = {}) {
    const TileAt weights = part_of_weights(slice.is_k ? tile_ds(shared, stage) : tile_p(shared), 0, slice.team * team_keys);
    const TileAt q = part_of_rows<qk_stride>(tile_q(shared, stage), 0, slice.column);
    const TileAt dout = part_of_rows<v_stride>(tile_do(shared, stage), 0, slice.column);
    if constexpr (split_slices) add_rows<qk_stride>(acc, weights, slice.is_k ? q : dout, ready, loaded);
    else if (slice.is_k) add_rows<qk_stride>(acc, weights, q, ready, loaded);
    else add_rows<v_stride>(acc, weights, dout, ready, loaded);
}
}  // namespace sm80
