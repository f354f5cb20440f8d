// A boolean mask as the kernels read it, in one pass: which of 64 rows see a key, a bit each (p.bits, unless null); the states of tiles; and,
// where no block mask or mask function is beside it, which keys some row sees.  States and keys are zeros before.
//
// Grid: instances x groups of 64 rows (an even number) x groups of 128 keys (fastest), in one axis, a warp each.
#include "util/mask_params.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = 64, kKeys = 128, kOwn = kKeys / 32;  // of a warp; keys of a lane, which are neighbours and of one tile
static_assert(cfg::block_n % kOwn == 0);

// The elements of a lane's keys in one row, a byte each.
template <bool together>
__device__ __forceinline__ u32 load_keys(const u8* row, i64 col, i32 count) {
    if constexpr (together) return count > 0 ? __ldg(reinterpret_cast<const u32*>(row)) : 0;
    u32 keys = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i < count) keys |= static_cast<u32>(row[i * col]) << 8 * i;
    return keys;
}

// The highest bit of each byte that is not 0.
__device__ __forceinline__ u32 marked(u32 bytes) { return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) & 0x80808080; }

// Which of `rows` rows see each of a lane's keys.  together: four bytes at an address that four divides.
template <bool together>
__device__ __forceinline__ void load_bits(u64 (&bits)[kOwn], const MaskSource& source, const u8* first, i32 rows, i32 count) {
    constexpr int groups = kRows / 8, ahead = together ? 16 : 8;  // rows that are loaded before any is looked at
    u32 eights[groups];                                           // of eight rows, a byte per key; they move up as they come
#pragma unroll(together ? kRows / ahead : 1)
    for (int row = 0; row < kRows; row += ahead) {
        u32 loaded[ahead];
#pragma unroll
        for (int i = 0; i < ahead; ++i, first += source.row) loaded[i] = row + i < rows ? load_keys<together>(first, source.col, count) : 0;
#pragma unroll
        for (int group = 0; group < ahead / 8; ++group) {
#pragma unroll
            for (int i = 1; i < groups; ++i) eights[i - 1] = eights[i];
            eights[groups - 1] = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) eights[groups - 1] |= marked(loaded[8 * group + i]) >> (7 - i);
        }
    }
#pragma unroll
    for (int key = 0; key < kOwn; ++key) {
        u32 halves[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32* from = eights + 4 * half;
            const u32 pair = key | (4 + key) << 4;
            halves[half] = __byte_perm(__byte_perm(from[0], from[1], pair), __byte_perm(from[2], from[3], pair), 0x5410);
        }
        bits[key] = static_cast<u64>(halves[1]) << 32 | halves[0];
    }
}

// Rows [begin, end) of 64.
__device__ __forceinline__ u64 row_range(i32 begin, i32 end) {
    const auto below = [](i32 n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; };
    return below(end) & ~below(begin);
}

// Which of 64 rows from `row` on the band and the column masks show a key.
__device__ __forceinline__ u64 shown_beside(const MaskParams& p, i32 instance, i32 row, i32 key) {
    const RowRange band = band_rows(p, key);
    u64 rows = row_range(band.first - row, band.end - row);
#pragma unroll
    for (int c = 0; c < column_masks; ++c) {
        const int4 x = source_bounds(p.column[c], source_offset(p, p.column[c], instance), key);
        const auto from_here = [&](i32 bound) { return min(max(bound, 0), p.n_queries) - row; };
        rows &= ~row_range(from_here(x.x), from_here(x.y)) & ~row_range(from_here(x.z), from_here(x.w));
    }
    return rows;
}

// Adds to the states of the tiles that the warp's keys are in.
__device__ __forceinline__ void add_states(const MaskParams& p, i32 instance, const u64 (&bits)[kOwn], i32 row, i32 rows, i32 first_key, i32 key, i32 count) {
    const i32 mine = key / cfg::block_n, last = (min(first_key + kKeys, p.n_keys) - 1) / cfg::block_n;
    for (i32 m = row / cfg::block_m; m * cfg::block_m < row + rows; ++m) {
        const u64 there = row_range(m * cfg::block_m - row, min((m + 1) * cfg::block_m - row, rows));
        u32 state = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i < count) state |= ((bits[i] & there) != 0 ? kSomeSeen : 0) | ((~bits[i] & there) != 0 ? kSomeHidden : 0);
        for (i32 n = first_key / cfg::block_n; n <= last; ++n) {
            const u32 found = __reduce_or_sync(~0u, n == mine ? state : 0);
            if (threadIdx.x % 32 == 0 && found)
                atomicOr(p.states + instance * p.states_instance + state_word(m, n, p.key_tiles), found << state_shift(m, n));
        }
    }
}

constexpr int kBlocks = __CUDA_ARCH__ > 900 ? 4 : 8;  // of a multiprocessor; on compute capability 12 registers for eight spill

extern "C" __global__ __launch_bounds__(kThreads, kBlocks) void mask_bits(const __grid_constant__ MaskParams p) {
    const i32 key_groups = (p.keys_padded + kKeys - 1) / kKeys, row_groups = (p.n_queries + 2 * kRows - 1) / (2 * kRows) * 2;
    const i64 warp = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32, group = warp / key_groups;
    const i32 instance = static_cast<i32>(group / row_groups), row = static_cast<i32>(group % row_groups) * kRows;
    if (instance >= p.instances) return;
    const i32 first_key = static_cast<i32>(warp % key_groups) * kKeys, key = first_key + kOwn * (threadIdx.x % 32);
    const i32 rows = min(kRows, max(p.n_queries - row, 0)), count = min(max(p.n_keys - key, 0), kOwn);
    const MaskSource& source = p.boolean;
    const u8* first = static_cast<const u8*>(source.data) + source_offset(p, source, instance) + row * source.row + key * source.col;
    u64 bits[kOwn] = {};
    const bool together = source.col == 1 && count % kOwn == 0 && ((reinterpret_cast<u64>(first) | source.row) & 3) == 0;
    const i32 different = source.row == 0 ? min(rows, 1) : rows;
    if (__all_sync(~0u, together)) load_bits<true>(bits, source, first, different, count);
    else load_bits<false>(bits, source, first, different, count);
#pragma unroll
    for (u64& of_key : bits)
        if (source.row == 0) of_key = of_key ? ~0ull : 0;
    add_states(p, instance, bits, row, rows, first_key, key, count);

    if (p.bits != nullptr && key < p.keys_padded && (row == 0 || p.bits_row) && (key < cfg::block_n || p.bits_tile)) {
        ulonglong2* to = reinterpret_cast<ulonglong2*>(p.bits + instance * p.bits_instance + row / kRows * p.bits_row + key / cfg::block_n * p.bits_tile + key % cfg::block_n);
        to[0] = {bits[0], bits[1]}, to[1] = {bits[2], bits[3]};
    }
    if constexpr (!block_mask && !function_mask) {
        u32 alive = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i < count && bits[i] & row_range(0, rows) & shown_beside(p, instance, row, key + i)) alive |= 1u << i;
        alive <<= kOwn * (threadIdx.x % 8);
#pragma unroll
        for (int lanes = 1; lanes < 8; lanes *= 2) alive |= __shfl_xor_sync(~0u, alive, lanes);
        if (threadIdx.x % 8 == 0 && alive) atomicOr(p.alive + instance * ((p.n_keys + 31) / 32ll) + key / 32, alive);
    }
}
