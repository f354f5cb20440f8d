// Which of 64 consecutive query rows see a key, as bits.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/params.cuh"

namespace sm90 {

// The first n of 64 bits, for any n.
__device__ __forceinline__ u64 low_bits(i32 n) {
    n = min(max(n, 0), 64);
    return n == 64 ? ~0ull : (1ull << n) - 1;
}

__device__ __forceinline__ u64 bit_range(i32 begin, i32 end) { return low_bits(end) & ~low_bits(begin); }

// Which of 64 rows the band lets see a key.
__device__ __forceinline__ u64 band_rows(const Params& p, i32 first_row, i32 key) {
    const i32 diagonal = key - p.band_offset - first_row;
    u64 rows = key < p.n_keys ? ~0ull : 0;
    if constexpr (cfg::band_right) rows &= ~low_bits(diagonal - p.band_right);
    if constexpr (cfg::band_left) rows &= low_bits(diagonal + p.band_left + 1);
    return rows;
}

// Which of them lie outside the key's two intervals.
__device__ __forceinline__ u64 column_rows(const int4& x, i32 first_row) {
    return ~(bit_range(x.x - first_row, x.y - first_row) | bit_range(x.z - first_row, x.w - first_row));
}

// Which of them lie in visible blocks; `blocks` is the head's.
__device__ __forceinline__ u64 block_rows(const Params& p, const u8* blocks, i32 first_row, i32 key) {
    const i32 size = p.table.block_m, end = min(first_row + 64, p.n_queries);
    const u8* column = blocks + min(key, p.n_keys - 1) / p.table.block_n * p.mask.col;
    u64 rows = 0;
    for (i32 block = first_row / size; block * size < end; ++block)
        if (column[block * p.mask.row]) rows |= bit_range(block * size - first_row, (block + 1) * size - first_row);
    return rows;
}

}  // namespace sm90
