// What the key kernel (sm80/bwd.cu) does with a tile: the block's place, the products; and dK and dV of one block on their way to memory, over very
// many rows in parts, from blocks that share their keys, and at the end.
#pragma once
#include "ptx/global.cuh"
#include "sm80/bwd_scores.cuh"

constexpr bool same_slices = cfg::head_dim == cfg::head_dim_v;  // of dV and dK
constexpr int k_columns = slice_columns(cfg::head_dim), v_columns = slice_columns(cfg::head_dim_v), slice_tiles = slice_columns(widest) / 8;
constexpr bool all_work = slices / 2 * k_columns == cfg::head_dim && slices / 2 * v_columns == cfg::head_dim_v;  // no warp is without columns
constexpr bool whole_slices = cfg::whole_columns && same_slices && all_work;
using KeyGradients = Acc[team_keys / 16][slice_tiles][4];

// The part of dV or dK that this warp owns: the first k_columns or v_columns of its sums.
struct Slice {
    i32 team, column;
    bool is_k;

    __device__ __forceinline__ Slice() {
        const i32 warp = threadIdx.x / 32, part = warp % slices;
        team = warp / slices;
        is_k = part >= slices / 2;
        column = part % (slices / 2) * (same_slices || is_k ? k_columns : v_columns);
    }
    // Of an array's columns.
    __device__ __forceinline__ i32 end(i32 columns) const { return same_slices ? columns : min(columns, column + (is_k ? k_columns : v_columns)); }
    __device__ __forceinline__ bool exists() const { return all_work || column < (is_k ? cfg::head_dim : cfg::head_dim_v); }
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

// Algorithm 4 lines 16 and 22: dV += P^T dO or dK += dS^T Q, for the columns that this warp owns.  float64: ready() before the first of the weights
// is read, loaded() when the last of weights and rows are in registers.
template <class Ready = Nothing, class Loaded = Nothing>
__device__ __forceinline__ void add_keys(KeyGradients& acc, KeySpace space, const Slice& slice, int stage, const Ready& ready = {},
                                         const Loaded& loaded = {}) {
    if (!slice.exists()) {
        ready(), loaded();
        return;
    }
    const TileAt weights = part_of_weights(slice.is_k ? space.ds(stage) : space.p(), 0, slice.team * team_keys);
    const TileAt q = part_of_rows<qk_stride>(space.q(stage), 0, slice.column), dout = part_of_rows<v_stride>(space.dout(stage), 0, slice.column);
    const auto between = [&](int step) {
        if (step == cfg::block_m / 8 - 1) loaded();
    };
    if (same_slices || slice.is_k)
        product<cfg::block_m, Along::rows, p_stride, Along::rows, qk_stride, k_columns / 8>(acc, weights, slice.is_k ? q : dout, ready, between);
    else product<cfg::block_m, Along::rows, p_stride, Along::rows, v_stride, v_columns / 8>(acc, weights, dout, ready, between);
}

// The rows of dK or dV of the block's head.
template <class Out>
__device__ __forceinline__ GradientRows<Out> gradient_of(const Params& p, i32 flat, const BatchIndex& index, bool is_k, bool summed) {
    return gradient_rows<Out>(is_k ? p.dk : p.dv, index, flat % p.kv_heads, is_k ? p.head_dim : p.head_dim_v, summed, is_k ? p.dk_acc : p.dv_acc,
                              i64(flat) * p.n_keys);
}

// The same, of which this warp has columns up to the end of its slice.
template <class Out>
__device__ __forceinline__ GradientRows<Out> slice_of_gradient(const Params& p, i32 flat, const BatchIndex& index, const Slice& slice, bool summed) {
    GradientRows<Out> rows = gradient_of<Out>(p, flat, index, slice.is_k, summed);
    rows.columns = slice.end(rows.columns);
    return rows;
}

// Over very many rows sums lose digits: after every cfg::flush_every row tiles (0: never) a warp adds its part of dV or dK to the result in
// memory, where nobody else adds, and starts anew.  This calls use(memory, sum) for all sums of a lane.
template <class Use>
__device__ __forceinline__ void visit_memory(KeyGradients& acc, const Params& p, const Slice& slice, const Use& use) {
    const i32 flat = flat_kv_head(p), own = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32, first_column = slice.column + own % 4 * 2;
    const GradientRows<Acc> to = slice_of_gradient<Acc>(p, flat, batch_index(p, flat / p.kv_heads), slice, slice.is_k ? cfg::sum_dk : cfg::sum_dv);
    unroll<team_keys / 16, 2>([&](int m, int half) {
        const i32 key = key_tile(p) * cfg::block_n + slice.team * team_keys + 16 * m + 8 * half + own / 4;
        __syncwarp();  // loads are not moved ahead of this, and their registers with them
        if (key >= p.n_keys) return;  // its sums are never looked at
        Acc* const row = to.data + key * to.stride + first_column;
        unroll<2 * slice_tiles>([&](int i) {
            const i32 column = i / 2 * 8 + i % 2;
            if (whole_slices || first_column + column < to.columns) use(row + column, acc[m][i / 2][2 * half + i % 2]);
        });
    });
}

__device__ __forceinline__ void start_flushes(KeyGradients& acc, const Params& p, const Slice& slice) {
    if (cfg::flush_every > 0 && !shares(p)) visit_memory(acc, p, slice, [](Acc* at, Acc) { *at = 0; });
}

// Before row tile number `tile` of the block is added; group: of cfg::flush_every tiles, the one added to last, or -1.  Groups are the same for
// all masks.
__device__ __forceinline__ void flush(KeyGradients& acc, const Params& p, const Slice& slice, i32& group, i32 tile) {
    if constexpr (cfg::flush_every > 0) {
        const i32 next = tile / cfg::flush_every;
        if (group >= 0 && group != next) {
            visit_memory(acc, p, slice, [](Acc* at, Acc& sum) {
                ptx::red_add(at, sum);
                ptx::set_zero(sum);
            });
        }
        group = shares(p) ? -1 : next;  // a block that shares its keys has few rows
    }
}

// Algorithm 4 line 24.  A block that shares its keys adds to memory.  A sum over axes that k or v was broadcast along is still to come: then
// unrounded, to the workspace.
__device__ __forceinline__ void store_keys(const unsigned char* memory, KeySpace space, const Params& p, const Slice& slice, KeyGradients& acc) {
    const Acc factor = Acc(slice.is_k ? p.scale * p.dropout_scale : p.dropout_scale);  // the scale of dropout, and of dK
    if (shares(p)) {
        scale_by(acc, factor);
        visit_memory(acc, p, slice, [](Acc* at, Acc sum) { ptx::red_add(at, sum); });
        return;
    }
    if constexpr (cfg::flush_every > 0) visit_memory(acc, p, slice, [](const Acc* at, Acc& sum) { sum += __ldcg(at); });
    const bool summed = slice.is_k ? cfg::sum_dk : cfg::sum_dv;
    const i32 flat = flat_kv_head(p), first_key = key_tile(p) * cfg::block_n, key = slice.team * team_keys;
    const BatchIndex index = batch_index(p, flat / p.kv_heads);
    if (summed) slice_of_gradient<Acc>(p, flat, index, slice, true).store(acc, first_key + key, p.n_keys, slice.column, factor);
    if constexpr (!gradients_in_elements) {
        if (!summed) slice_of_gradient<cfg::grad>(p, flat, index, slice, false).store(acc, first_key + key, p.n_keys, slice.column, factor);
        return;
    }
    if (cfg::sum_dk && cfg::sum_dv) return;
    // This warp's columns of dV or dK, over the tile of v or k.
    scale_by(acc, factor);
    const u32 column = slice.column * int(sizeof(Elem));
    if (slice.is_k) store_rounded<qk_stride, false>(space.k().tile + key * qk_stride + column, acc, slice.end(cfg::head_dim) - slice.column);
    else store_rounded<v_stride, false>(space.v().tile + key * v_stride + column, acc, slice.end(cfg::head_dim_v) - slice.column);
    __syncthreads();  // dK and dV are complete
    if (!cfg::sum_dk) save_rows<cfg::block_n, cfg::head_dim>(memory, gradient_of<Elem>(p, flat, index, true, false), first_key, p.n_keys);
    if (!cfg::sum_dv) save_rows<cfg::block_n, cfg::head_dim_v>(memory + KeySpace::v_at, gradient_of<Elem>(p, flat, index, false, false), first_key, p.n_keys);
}
