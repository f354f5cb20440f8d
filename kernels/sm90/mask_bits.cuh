// Which of 32 or 64 consecutive query rows see a key, as bits.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/params.cuh"

namespace sm90 {

// The first n bits, for any n.
template <class Bits>
__device__ __forceinline__ Bits low_bits(i32 n) {
    const u32 low = __funnelshift_lc(~0u, 0u, max(n, 0));  // n beyond 32 counts as 32
    if constexpr (sizeof(Bits) == 4) return low;
    return static_cast<u64>(low_bits<u32>(n - 32)) << 32 | low;
}

template <class Bits>
__device__ __forceinline__ Bits bit_range(i32 begin, i32 end) {
    return low_bits<Bits>(end) & ~low_bits<Bits>(begin);
}

// Which rows the band and the end of the keys let see a key.  Column tables hide the keys beyond the end themselves.
template <class Bits>
__device__ __forceinline__ Bits band_rows(const Params& p, i32 first_row, i32 key) {
    const i32 diagonal = key - first_row;
    Bits rows = cfg::mask == kMaskColumn || key < p.n_keys ? ~Bits{0} : 0;
    if constexpr (cfg::band_right) rows &= ~low_bits<Bits>(diagonal - p.band_right);
    if constexpr (cfg::band_left) rows &= low_bits<Bits>(diagonal + p.band_left + 1);
    return rows;
}

// Which of them lie outside the key's two intervals.
template <class Bits>
__device__ __forceinline__ Bits column_rows(const int4& x, i32 first_row) {
    return ~(bit_range<Bits>(x.x - first_row, x.y - first_row) | bit_range<Bits>(x.z - first_row, x.w - first_row));
}

// Which of them lie in visible blocks; `blocks` is the head's.
template <class Bits>
__device__ __forceinline__ Bits block_rows(const Params& p, const u8* blocks, i32 first_row, i32 key) {
    const i32 size = p.table.block_m, end = min(first_row + 8 * static_cast<i32>(sizeof(Bits)), p.n_queries);
    const u8* column = blocks + min(key, p.n_keys - 1) / p.table.block_n * p.mask.col;
    Bits rows = 0;
    for (i32 block = first_row / size; block * size < end; ++block)
        if (column[block * p.mask.row])
            rows |= bit_range<Bits>(block * size - first_row, (block + 1) * size - first_row);
    return rows;
}

}  // namespace sm90
