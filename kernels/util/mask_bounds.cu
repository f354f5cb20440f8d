// Tables of column masks that hold together (FlashMask, section 4.1: per-tile minima and maxima), O(keys) memory.
//
// Grid: instances x key tiles (fastest) in one axis, one thread per key and whole warps.  Clamps the intervals, marks keys that no row sees,
// and reduces each tile's intervals to ranges of row tiles that it hides wholly (skip) or may hide partly (partial).
#include "attn/mask_format.cuh"
#include "util/mask_params.cuh"

constexpr int kKeyWarps = (cfg::block_n + 31) / 32;
constexpr int kRanges = 2 * column_masks;  // intervals of a key

__device__ __forceinline__ i32 clamp_row(i32 row, i32 n_queries) { return min(max(row, 0), n_queries); }

// A key's intervals [start, end) of hidden rows; empty ones are (n_queries, 0), neutral in the minima and maxima below.
struct KeyRanges {
    i32 start[kRanges], end[kRanges];
    bool dead;  // no row sees the key

    __device__ __forceinline__ KeyRanges(const MaskParams& p, i32 instance, i32 key) : dead(true) {
        const i32 n = p.n_queries;
#pragma unroll
        for (int c = 0; c < column_masks && key < p.n_keys; ++c) {
            const int4 x = source_bounds(p.column[c], source_offset(p, p.column[c], instance), key);
            set(2 * c, clamp_row(x.x, n), clamp_row(x.y, n), n);
            set(2 * c + 1, clamp_row(x.z, n), clamp_row(x.w, n), n);
        }
        if (key < p.n_keys) {
            const RowRange rows = band_rows(p, key);
            dead = rows.first >= rows.end || first_visible(rows.first) >= rows.end;
        }
    }

    __device__ __forceinline__ void set(int i, i32 from, i32 to, i32 n) { start[i] = from < to ? from : n, end[i] = from < to ? to : 0; }

    // The first row from `row` on that no interval hides.
    __device__ __forceinline__ i32 first_visible(i32 row) const {
#pragma unroll
        for (int jump = 0; jump < kRanges; ++jump)  // leaving one interval may enter another, each at most once
#pragma unroll
            for (int i = 0; i < kRanges; ++i)
                if (row >= start[i] && row < end[i]) row = end[i];
        return row;
    }
};

template <class Combine>
__device__ __forceinline__ i32 reduce_block(i32 value, i32* scratch, const Combine& combine) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) value = combine(value, __shfl_xor_sync(~0u, value, lane));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();  // every warp has written its part
    value = scratch[0];
    for (int warp = 1; warp < kKeyWarps; ++warp) value = combine(value, scratch[warp]);
    __syncthreads();  // scratch may be written again
    return value;
}

extern "C" __global__ __launch_bounds__(kKeyWarps * 32) void mask_bounds(const __grid_constant__ MaskParams p) {
    __shared__ i32 scratch[kKeyWarps];
    const i32 instance = blockIdx.x / p.key_tiles, tile = blockIdx.x % p.key_tiles;
    // Threads beyond the tile repeat its last key, which changes no minimum or maximum.
    const i32 key = tile * cfg::block_n + min(static_cast<i32>(threadIdx.x), cfg::block_n - 1);
    const KeyRanges x(p, instance, key);
#pragma unroll
    for (int c = 0; c < column_masks; ++c) {
        const int4 bounds = {x.start[2 * c], x.end[2 * c], x.start[2 * c + 1], x.end[2 * c + 1]};
        p.cols[(static_cast<i64>(instance) * column_masks + c) * p.keys_padded + key] = x.dead ? int4{0, p.n_queries, p.n_queries, 0} : bounds;
    }
    const auto lower = [](i32 a, i32 b) { return min(a, b); };
    const auto upper = [](i32 a, i32 b) { return max(a, b); };
    const u32 dead_tile = reduce_block(x.dead && key < p.n_keys, scratch, upper) ? kDeadTile : 0;
#pragma unroll
    for (int i = 0; i < kRanges; ++i) {
        // A dead key counts as hidden by every interval, so that it spoils the skip range of none.
        const i32 start = x.dead ? 0 : x.start[i], end = x.dead ? p.n_queries : x.end[i];
        const i32 first_start = reduce_block(start, scratch, lower), last_start = reduce_block(start, scratch, upper);
        const i32 first_end = reduce_block(end, scratch, lower), last_end = reduce_block(end, scratch, upper);
        constexpr i32 rows = cfg::block_m;
        int4 result;
        result.x = (last_start + rows - 1) / rows | (i == 0 ? dead_tile : 0);
        result.y = first_end == p.n_queries ? p.row_tiles : first_end / rows;
        result.z = first_start / rows;
        result.w = (last_end + rows - 1) / rows;
        if (threadIdx.x == 0) p.bounds[(static_cast<i64>(instance) * p.key_tiles + tile) * kRanges + i] = result;
    }
}
