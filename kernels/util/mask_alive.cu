// Which keys some row sees when a block mask is among the masks: a bit per key, zeros before.
//
// Grid: instances x chunks of kChunk groups of rows that are alike x keys / 256 (fastest), in one axis; 256 threads, one per key.
#include "util/mask_params.cuh"

constexpr int kThreads = 256, kChunk = 512;

// What one key's masks say of rows.
struct KeySources {
    int4 columns[column_masks + 1];
    const u8 *blocks, *boolean;

    __device__ __forceinline__ KeySources(const MaskParams& p, i32 instance, i32 key) {
#pragma unroll
        for (int c = 0; c < column_masks; ++c) columns[c] = source_bounds(p.column[c], source_offset(p, p.column[c], instance), key);
        const auto column_of = [&](const MaskSource& source) {
            return static_cast<const u8*>(source.data) + source_offset(p, source, instance) + key / source.block_n * source.col;
        };
        if constexpr (block_mask) blocks = column_of(p.blocks);
        if constexpr (boolean_mask) boolean = column_of(p.boolean);
    }

    __device__ __forceinline__ bool visible(const MaskParams& p, i32 row) const {
        bool seen = true;
        if constexpr (block_mask) seen = blocks[row / p.blocks.block_m * p.blocks.row] != 0;
        if constexpr (boolean_mask) seen = seen && boolean[row * p.boolean.row] != 0;
#pragma unroll
        for (int c = 0; c < column_masks; ++c) {
            const int4& x = columns[c];
            seen = seen && !(row >= x.x && row < x.y) && !(row >= x.z && row < x.w);
        }
        return seen;
    }
};

extern "C" __global__ __launch_bounds__(kThreads) void mask_alive(const __grid_constant__ MaskParams p) {
    const i32 key_blocks = (p.n_keys + kThreads - 1) / kThreads;
    const i32 groups = (p.n_queries + p.alike - 1) / p.alike, chunks = (groups + kChunk - 1) / kChunk;
    const i32 key = blockIdx.x % key_blocks * kThreads + threadIdx.x, rest = blockIdx.x / key_blocks;
    const i32 instance = rest / chunks, chunk = rest % chunks;
    const RowRange rows = key < p.n_keys ? band_rows(p, key) : RowRange{0, 0};
    bool seen = false;
    if (rows.first < rows.end) {
        const KeySources sources(p, instance, key);
        const i32 first = max(chunk * kChunk, rows.first / p.alike);
        const i32 end = min(min(chunk * kChunk + kChunk, groups), (rows.end - 1) / p.alike + 1);
        for (i32 group = first; group < end && !seen; ++group) seen = sources.visible(p, group * p.alike);
    }
    const u32 alive = __ballot_sync(~0u, seen);
    if (threadIdx.x % 32 == 0 && alive) atomicOr(p.alive + instance * ((p.n_keys + 31) / 32ll) + key / 32, alive);
}
