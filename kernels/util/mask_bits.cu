// A boolean mask as the kernels read it, in one pass: which of 64 rows see a key, a bit each (p.bits, unless null); the states of tiles; and,
// where no block mask or mask function is beside it, which keys some row sees.  States and keys are zeros before.
#include "util/mask_bits.cuh"

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

constexpr int kBlocks = __CUDA_ARCH__ > 900 ? 4 : 8;  // of a multiprocessor; on compute capability 12 registers for eight spill

extern "C" __global__ __launch_bounds__(kThreads, kBlocks) void mask_bits(const __grid_constant__ MaskParams p) {
    const Place at(p);
    if (at.instance >= p.instances) return;
    const MaskSource& source = p.boolean;
    const u8* first = static_cast<const u8*>(source.data) + source_offset(p, source, at.instance) + at.row * source.row + at.key * source.col;
    u64 bits[kOwn] = {};
    const bool together = source.col == 1 && at.count % kOwn == 0 && ((reinterpret_cast<u64>(first) | source.row) & 3) == 0;
    const i32 different = source.row == 0 ? min(at.rows, 1) : at.rows;
    if (__all_sync(~0u, together)) load_bits<true>(bits, source, first, different, at.count);
    else load_bits<false>(bits, source, first, different, at.count);
#pragma unroll
    for (u64& of_key : bits)
        if (source.row == 0) of_key = of_key ? ~0ull : 0;
    add_states(p, at, bits);
    store_bits(p, at, bits);
    if constexpr (!block_mask && !function_mask) mark_alive(p, at, bits);
}
