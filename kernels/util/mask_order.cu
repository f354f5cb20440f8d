// The order in which row tiles are worked on: most key tiles that they see first, and the last rows first among equals, cfg::rows_per_item row
// tiles at a time (the most loaded of them counts).  What they see is told by the bounds of column masks or, without these, by states.
//
// mask_order: one block per instance; dynamic shared memory: (row_tiles + 1) ints.  mask_spans: a warp for each item, in their order.
#include "attn/mask_format.cuh"
#include "util/mask_params.cuh"

constexpr int kThreads = 1024, kBuckets = 1024;
constexpr int kRanges = column_masks > 0 ? 2 * column_masks : 1;  // intervals of a key

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

// By columns of 4 x 4 tiles.
__device__ __forceinline__ void count_states(const MaskParams& p, const u32* states, i32* counts) {
    const i32 columns = (p.key_tiles + 3) / 4, words = (p.row_tiles + 3) / 4 * columns;
    for (i32 i = threadIdx.x; i < words; i += kThreads)
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const i32 seen = __popc(states[i] >> 8 * m & 0x55 * kSomeSeen);
            if (seen) atomicAdd(counts + i / columns * 4 + m, seen);
        }
}

// Fills each bucket from its end with the items in ascending order; one warp.
template <class Bucket>
__device__ __forceinline__ void place_items(OrderedTile* order, i32 items, i32 key_tiles, i32* ends, const Bucket& bucket) {
    for (i32 base = 0; base < items; base += 32) {
        const i32 item = base + threadIdx.x, mine = item < items ? bucket(item) : -1;
        const u32 equals = __match_any_sync(~0u, mine), before = equals & ((1u << threadIdx.x) - 1);
        if (mine >= 0) order[ends[mine] - 1 - __popc(before)] = {item, 0, key_tiles - 1};
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
    if constexpr (column_masks > 0)
        for (i32 n = threadIdx.x; n < p.key_tiles; n += kThreads)
            count_tile(p, p.bounds + (instance * p.key_tiles + n) * kRanges, n, counts);
    else
        count_states(p, p.states + instance * p.states_instance, counts);
    __syncthreads();  // all steps are in
    if constexpr (column_masks > 0) scan(counts, p.row_tiles);
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
    if (threadIdx.x < 32) place_items(p.order + instance * items, items, p.key_tiles, buckets, bucket);
}

// Do some of the row tiles see something of the key tile, as far as column masks tell?
__device__ __forceinline__ bool shows(const int4* bounds, i32 first, i32 end) {
    bool some = false;
    for (i32 m = first; m < end; ++m) {
        bool seen = true;
#pragma unroll
        for (int i = 0; i < kRanges; ++i) seen &= m < (bounds[i].x & ~kDeadTile) || m >= bounds[i].y;
        some |= seen;
    }
    return some;
}

// Narrows what an item may see to the key tiles between the first and the last that column masks show it.  Where keys end with the row, its rows may
// begin up to an item before (sm90/fwd_planner.cuh).
extern "C" __global__ __launch_bounds__(kThreads) void mask_spans(const __grid_constant__ MaskParams p) {
    constexpr i32 width = cfg::rows_per_item, before = cfg::band_right ? width - 1 : 0;
    const i32 items = (p.row_tiles + width - 1) / width, lane = threadIdx.x % 32;
    const i64 place = (static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x) / 32;
    if (place >= static_cast<i64>(p.instances) * items) return;
    const int4* bounds = p.bounds + place / items * p.key_tiles * kRanges;
    const i32 item = p.order[place].tile, first = max(item * width - before, 0), end = min((item + 1) * width, p.row_tiles);
    const auto seen = [&](i32 n) { return __ballot_sync(~0u, n >= 0 && n < p.key_tiles && shows(bounds + n * kRanges, first, end)); };
    i32 top = p.key_tiles - 1, lowest = 0;
    u32 some = 0;
    for (; top >= 0 && (some = seen(top - lane)) == 0; top -= 32) {}
    if (some != 0) top -= __ffs(some) - 1;
    for (some = 0; lowest <= top && (some = seen(lowest + lane)) == 0; lowest += 32) {}
    if (some != 0) lowest += __ffs(some) - 1;
    if (lane == 0) p.order[place].lowest = lowest, p.order[place].top = top;
}
