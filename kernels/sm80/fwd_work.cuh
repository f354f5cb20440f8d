// What a team of the portable forward works on: its rows, its part of the keys, where both lie.
#pragma once
#include "attn/mask.cuh"
#include "attn/philox.cuh"
#include "attn/score.cuh"
#include "sm80/fwd_tiles.cuh"
#include "sm80/softmax.cuh"

using Acc = cfg::acc;

constexpr int cols_bytes = column_masks > 0 ? cfg::block_n * 16 : 0;  // intervals of the tile's keys in the first column mask
constexpr int stage_bytes = k_bytes + v_bytes + cols_bytes;

using Stored = typename Either<cfg::split, Acc, cfg::out>::type;  // of o as a block leaves it

constexpr u32 ring_bytes = cfg::stages * stage_bytes;  // of a team
constexpr int older_tiles = cfg::stages > 1 ? cfg::stages - 2 : 0;  // copies that may be under way when the oldest must have arrived
using Softmax = SoftmaxRows<Acc, m_tiles, sizeof(Elem) == 2>;
static_assert(cfg::teams == 1 || cfg::warps == 1, "a team is a warp");

__device__ __forceinline__ u32 team() { return cfg::teams == 1 ? 0 : threadIdx.x / threads; }
__device__ __forceinline__ u32 thread() { return cfg::teams == 1 ? threadIdx.x : threadIdx.x % threads; }  // of the team
__device__ __forceinline__ u32 warp() { return cfg::teams == 1 ? threadIdx.x / 32 : 0; }
__device__ __forceinline__ void sync_team() {
    if constexpr (cfg::teams == 1) __syncthreads();
    else __syncwarp();
}

// What one team works on; kept in shared memory, since registers are short and most of it is needed rarely.
struct Work : TracedHead {  // the first of the packed heads
    MaskPlace mask;
    i64 bias_offset;
    const Elem *q, *k, *v;   // row 0 of the head
    i32 ib, head;            // head: the first of the packed ones
    i32 row0;                // first (packed) row of the tile
    i32 tile_begin, tile_end; // of the block
    RandomStream stream;
    Log2Factor<Acc> to_log2; // from scores as they are held to exponents of 2
};

__device__ __forceinline__ void locate(const Params& p, Work& w) {
    // Sections of heads whose k and v fit in the L2 cache; inside one, the same row tile of all heads, last rows first.
    const i32 heads = p.heads / cfg::pack, total = p.batch * heads;
    const i32 per_section = p.section * p.row_tiles;  // at most gridDim.x
    const i32 section = quotient(blockIdx.x, per_section), rest = static_cast<i32>(blockIdx.x) - section * per_section;
    const i32 width = min(p.section, total - section * p.section);
    const i32 rank = quotient(rest, width), flat = section * p.section + rest - rank * width;
    w.ib = quotient(flat, heads);
    w.head = (flat - w.ib * heads) * cfg::pack;
    static_cast<TracedHead&>(w) = TracedHead::of(p, w.ib, w.head);
    const BatchIndex index = batch_index(p, w.ib);
    w.q = static_cast<const Elem*>(p.q.data) + slice_offset(p.q, index, w.head);
    const i32 kv_head = quotient(w.head, p.group);
    w.k = static_cast<const Elem*>(p.k.data) + slice_offset(p.k, index, kv_head);
    w.v = static_cast<const Elem*>(p.v.data) + slice_offset(p.v, index, kv_head) + blockIdx.z * cfg::head_dim_v;
    w.mask.set(MaskSlices::of(p, index, w.head));
    if constexpr (cfg::bias) w.bias_offset = slice_offset(p.bias, index, w.head);
    OrderedTile item{p.row_tiles - 1 - rank, 0, p.key_tiles - 1};
    if constexpr (column_masks > 0 || stated_mask) {
        if (p.table.order != nullptr) item = p.table.order[static_cast<i64>(w.mask.instance) * p.row_tiles + rank];
    }
    w.row0 = item.tile * cfg::block_m;
    w.mask.rows = {w.row0 / cfg::pack, min((w.row0 + cfg::block_m - 1) / cfg::pack + 1, p.n_queries), item.tile};
    w.to_log2 = Log2Factor<Acc>::of_scale(cfg::prescaled ? 1.0 : p.scale);
    constexpr bool divided = cfg::split || cfg::teams > 1;
    const i32 tiles = p.split_tiles * cfg::teams;  // of the block; a team takes every cfg::teams-th
    w.tile_begin = divided ? static_cast<i32>(blockIdx.y) * tiles : 0;
    w.tile_end = divided ? min(w.tile_begin + tiles, p.key_tiles) : p.key_tiles;
    w.mask.lowest = max(w.tile_begin, band_first(p, w.mask.rows) / cfg::block_n);
    if constexpr (column_masks > 0) w.tile_end = min(w.tile_end, item.top + 1), w.mask.lowest = max(w.mask.lowest, item.lowest);
    if constexpr (cfg::dropout != 0) w.stream = random_stream(p.dropout, w.ib, w.head);
}
