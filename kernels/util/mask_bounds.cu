// Tables of a column mask (FlashMask, section 4.1: per-tile minima and maxima), O(keys) memory.
//
// mask_bounds: grid (key tiles, instances), one thread per key and whole warps.  Clamps the intervals, marks keys that no row sees, and
//              reduces each tile's intervals to ranges of row tiles that it hides wholly (skip) or may hide partly (partial).
// mask_order:  one block per instance; counts the key tiles that each row tile sees and sorts them, most work first and
//              the last rows first among equals, cfg::rows_per_item row tiles at a time (the most loaded of them counts).
//              Dynamic shared memory: (row_tiles + 1) ints.
#include "attn/mask_format.cuh"
#include "util/mask_params.cuh"

constexpr int kKeyWarps = (cfg::block_n + 31) / 32;  // of mask_bounds
constexpr int kThreads = 1024, kBuckets = 1024;       // of mask_order

__device__ __forceinline__ i32 clamp_row(i32 row, i32 n_queries) { return min(max(row, 0), n_queries); }

// The first row from `row` on that neither interval hides.
__device__ __forceinline__ i32 first_visible(i32 row, const int4& x) {
#pragma unroll
    for (int jump = 0; jump < 2; ++jump) {  // leaving one interval may enter the other, and then none is left
        if (row >= x.x && row < x.y) row = x.y;
        if (row >= x.z && row < x.w) row = x.w;
    }
    return row;
}

__device__ __forceinline__ int4 key_intervals(const MaskParams& p, i64 at, i32 key) {
    const i32 n = p.n_queries;
    const int4 dead = {0, n, n, 0};
    if (key >= p.n_keys) return dead;
    int4 x = {clamp_row(p.lts[at], n), clamp_row(p.lte[at], n), clamp_row(p.uts[at], n), clamp_row(p.ute[at], n)};
    if (x.x >= x.y) x.x = n, x.y = 0;  // empty: neutral in the minima and maxima below
    if (x.z >= x.w) x.z = n, x.w = 0;
    const RowRange rows = band_rows(p, key);
    return rows.first >= rows.end || first_visible(rows.first, x) >= rows.end ? dead : x;
}

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
    const i64 instance = blockIdx.y;
    // Threads beyond the tile repeat its last key, which changes no minimum or maximum.
    const i32 key = blockIdx.x * cfg::block_n + min(static_cast<i32>(threadIdx.x), cfg::block_n - 1);
    const int4 x = key_intervals(p, instance * p.n_keys + key, key);
    p.cols[instance * p.keys_padded + key] = x;
    const auto lower = [](i32 a, i32 b) { return min(a, b); };
    const auto upper = [](i32 a, i32 b) { return max(a, b); };
    const bool dead = key < p.n_keys && x.x == 0 && x.y == p.n_queries;
    const i32 any_dead = reduce_block(dead, scratch, upper);
    int4 result[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const i32 start = i == 0 ? x.x : x.z, end = i == 0 ? x.y : x.w;
        const i32 first_start = reduce_block(start, scratch, lower), last_start = reduce_block(start, scratch, upper);
        const i32 first_end = reduce_block(end, scratch, lower), last_end = reduce_block(end, scratch, upper);
        constexpr i32 rows = cfg::block_m;
        result[i].x = (last_start + rows - 1) / rows;
        result[i].y = first_end == p.n_queries ? p.row_tiles : first_end / rows;
        result[i].z = first_start / rows;
        result[i].w = (last_end + rows - 1) / rows;
    }
    if (any_dead) result[0].x |= kDeadTile;
    if (threadIdx.x < 2) p.bounds[(instance * p.key_tiles + blockIdx.x) * 2 + threadIdx.x] = result[threadIdx.x];
}

// Inclusive prefix sums of values[0 .. count), in place.
__device__ void scan(i32* values, i32 count) {
    __shared__ i32 sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i32 carry = 0;
    for (i32 base = 0; base < count; base += kThreads) {
        const i32 at = base + threadIdx.x;
        i32 sum = at < count ? values[at] : 0;
        for (int step = 1; step < 32; step *= 2) {
            const i32 before = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += before;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();  // the warps' sums are written
        for (int w = 0; w < warp; ++w) sum += sums[w];
        if (at < count) values[at] = sum + carry;
        for (int w = 0; w < 32; ++w) carry += sums[w];
        __syncthreads();  // sums may be written again, and values are complete
    }
}

__device__ __forceinline__ void add_range(i32* steps, i32 first, i32 end, i32 amount) {
    if (first < end) atomicAdd(steps + first, amount), atomicAdd(steps + end, -amount);
}

// Adds one for every row tile that sees something of the key tile: the band's range minus the union of two skip ranges.
__device__ __forceinline__ void count_tile(const MaskParams& p, const int4* bounds, i32 n, i32* steps) {
    i32 first = 0, end = p.row_tiles;
    if constexpr (cfg::band_right) first = band_rows(p, n * cfg::block_n).first / cfg::block_m;
    if constexpr (cfg::band_left) {
        const RowRange last = band_rows(p, min((n + 1) * cfg::block_n, p.n_keys) - 1);
        end = (last.end + cfg::block_m - 1) / cfg::block_m;
    }
    const i32 a = max(bounds[0].x & ~kDeadTile, first), a_end = min(bounds[0].y, end);
    i32 b = max(bounds[1].x, first), b_end = min(bounds[1].y, end);
    add_range(steps, first, end, 1);
    add_range(steps, a, a_end, -1);
    if (a < a_end && b < a_end && b_end > a) {  // count the overlap once
        add_range(steps, b, min(b_end, a), -1);
        b = max(b, a_end);
    }
    add_range(steps, b, b_end, -1);
}

// Fills each bucket from its end with the items in ascending order; one warp.
template <class Bucket>
__device__ __forceinline__ void place_items(i32* order, i32 items, i32* ends, const Bucket& bucket) {
    for (i32 base = 0; base < items; base += 32) {
        const i32 item = base + threadIdx.x, mine = item < items ? bucket(item) : -1;
        const u32 equals = __match_any_sync(~0u, mine), before = equals & ((1u << threadIdx.x) - 1);
        if (mine >= 0) order[ends[mine] - 1 - __popc(before)] = item;
        __syncwarp();  // the ends are read
        if (mine >= 0 && before == 0) ends[mine] -= __popc(equals);
        __syncwarp();  // the ends have moved
    }
}

extern "C" __global__ __launch_bounds__(kThreads) void mask_order(const __grid_constant__ MaskParams p) {
    extern __shared__ i32 counts[];
    __shared__ i32 buckets[kBuckets];
    const i64 instance = blockIdx.x;
    for (i32 i = threadIdx.x; i <= p.row_tiles; i += kThreads) counts[i] = 0;
    for (i32 i = threadIdx.x; i < kBuckets; i += kThreads) buckets[i] = 0;
    __syncthreads();  // counters are zero
    for (i32 n = threadIdx.x; n < p.key_tiles; n += kThreads) count_tile(p, p.bounds + (instance * p.key_tiles + n) * 2, n, counts);
    __syncthreads();  // all steps are in
    scan(counts, p.row_tiles);
    constexpr i32 width = cfg::rows_per_item;
    const i32 items = (p.row_tiles + width - 1) / width;
    const auto bucket = [&](i32 item) {
        i32 most = 0;
        for (i32 m = item * width; m < min((item + 1) * width, p.row_tiles); ++m) most = max(most, counts[m]);
        return kBuckets - 1 - static_cast<i32>(static_cast<i64>(most) * (kBuckets - 1) / max(p.key_tiles, 1));
    };
    for (i32 i = threadIdx.x; i < items; i += kThreads) atomicAdd(buckets + bucket(i), 1);
    __syncthreads();  // bucket sizes are known
    scan(buckets, kBuckets);
    if (threadIdx.x < 32) place_items(p.order + instance * items, items, buckets, bucket);
}
