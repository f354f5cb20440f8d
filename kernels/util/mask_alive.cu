// Which keys some row sees when a block mask or a mask function is among the masks: a bit per key, zeros before.  A function is asked where the
// states of tiles, which are there, leave it open.
//
// Grid: instances x chunks of kChunk groups of rows that are alike x keys / 256 (fastest), in one axis; 256 threads, one per key.
#include "attn/mask_function.cuh"
#include "util/mask_params.cuh"

constexpr int kThreads = 256, kChunk = 512;

// What one key's masks say of rows.
struct KeySources {
    int4 columns[column_masks + 1];
    const u8 *blocks, *boolean;
    const u32* states;  // of the key's tile and the first row tile
    i32 n;
    FunctionHead head;
    FunctionKey own;

    __device__ __forceinline__ KeySources(const MaskParams& p, i32 instance, i32 key) {
#pragma unroll
        for (int c = 0; c < column_masks; ++c) columns[c] = source_bounds(p.column[c], source_offset(p, p.column[c], instance), key);
        const auto column_of = [&](const MaskSource& source) {
            return static_cast<const u8*>(source.data) + source_offset(p, source, instance) + key / source.block_n * source.col;
        };
        if constexpr (block_mask) blocks = column_of(p.blocks);
        if constexpr (boolean_mask) boolean = column_of(p.boolean);
        if constexpr (function_mask) {
            states = p.states + instance * p.states_instance;
            n = key / cfg::block_n;
            head = FunctionHead::of(p, static_cast<i32>(source_offset(p, p.function, instance)));
            own = FunctionKey::of(p, head, key);
        }
    }

    // What the states say of the key's tile and a row's.
    __device__ __forceinline__ u32 state(const MaskParams& p, i32 row) const {
        if constexpr (!function_mask) return kSomeSeen;
        const i32 m = row / cfg::block_m;
        return states[state_word(m, n, p.key_tiles)] >> state_shift(m, n) & (kSomeSeen | kSomeHidden);
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
        if constexpr (function_mask) seen = seen && function_shows(p, head, FunctionRow::of(p, head, row), own);
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
        for (i32 group = first; group < end && !seen; ++group) {
            if (sources.state(p, group * p.alike) & kSomeSeen) seen = sources.visible(p, group * p.alike);
            else group = (group * p.alike / cfg::block_m + 1) * cfg::block_m / p.alike - 1;
        }
    }
    const u32 alive = __ballot_sync(~0u, seen);
    if (threadIdx.x % 32 == 0 && alive) atomicOr(p.alive + instance * ((p.n_keys + 31) / 32ll) + key / 32, alive);
}
