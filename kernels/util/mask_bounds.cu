// Tables of column masks that hold together (FlashMask, section 4.1: per-tile minima and maxima), O(keys) memory.
//
// mask_bounds: grid instances x key tiles (fastest) in one axis, one thread per key and whole warps.  Clamps the intervals, marks keys that no
//              row sees, and reduces each tile's intervals to ranges of row tiles that it hides wholly (skip) or may hide partly (partial).
// mask_order:  one block per instance; counts the key tiles that each row tile sees and sorts them, most work first and
//              the last rows first among equals, cfg::rows_per_item row tiles at a time (the most loaded of them counts).
//              Dynamic shared memory: (row_tiles + 1) ints.
#include "attn/mask_format.cuh"
#include "util/mask_params.cuh"

constexpr int kKeyWarps = (cfg::block_n + 31) / 32;  // of mask_bounds
constexpr int kThreads = 1024, kBuckets = 1024;       // of mask_order
constexpr int kRanges = 2 * column_masks;             // intervals of a key

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

// Adds one for every row tile that sees something of the key tile: the band's range minus the union of the skip ranges.
__device__ __forceinline__ void count_tile(const MaskParams& p, const int4* bounds, i32 n, i32* steps) {
    i32 first = 0, end = p.row_tiles;
    if constexpr (cfg::band_right) first = band_rows(p, n * cfg::block_n).first / cfg::block_m;
    if constexpr (cfg::band_left) {
        const RowRange last = band_rows(p, min((n + 1) * cfg::block_n, p.n_keys) - 1);
        end = (last.end + cfg::block_m - 1) / cfg::block_m;
    }
    add_range(steps, first, end, 1);
    i32 from[kRanges], to[kRanges];
#pragma unroll
    for (int i = 0; i < kRanges; ++i) from[i] = max(bounds[i].x & ~kDeadTile, first), to[i] = min(bounds[i].y, end);
    // In ascending order, each from where those before it end: what two hide counts once.
#pragma unroll
    for (int i = 0; i < kRanges; ++i) {
#pragma unroll
        for (int j = i + 1; j < kRanges; ++j) {
            const bool swap = from[j] < from[i];
            const i32 a = from[i], a_end = to[i];
            from[i] = swap ? from[j] : a, to[i] = swap ? to[j] : a_end;
            from[j] = swap ? a : from[j], to[j] = swap ? a_end : to[j];
        }
        add_range(steps, max(from[i], first), to[i], -1);
        first = max(first, to[i]);
    }
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
    for (i32 n = threadIdx.x; n < p.key_tiles; n += kThreads) count_tile(p, p.bounds + (instance * p.key_tiles + n) * kRanges, n, counts);
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
