// What masks hide: which of 32 or 64 consecutive query rows see a key, as bits; keys hidden from every row, which become zero.
#pragma once
#include "attn/mask.cuh"
#include "sm90/tiles.cuh"

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
    Bits rows = column_masks > 0 || key < p.n_keys ? ~Bits{0} : 0;
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

// Does the band alone hide some key of the tile from every row?  The keys it shows to some row are consecutive.
__device__ __forceinline__ bool band_hides(const Params& p, i32 n) {
    if constexpr (!cfg::band_left && !cfg::band_right) return false;
    const i32 first = n * cfg::block_n, last = min(first + cfg::block_n, p.n_keys) - 1;
    return !band_sees(p, first) || !band_sees(p, last);
}

// The same for those of 32 rows whose bits are set, by a warp, four of them at a time.
template <int rows, int slab_count>
__device__ __forceinline__ void clear_rows(u8* tile, u32 first, u32 which, u32 lane) {
    if (which == 0) return;
#pragma unroll 2
    for (u32 row = lane / 8; row < 32; row += 4) {
        if (!(which >> row & 1)) continue;
        unroll<slab_count>([&](int slab) { *reinterpret_cast<uint4*>(tile + (slab * rows + first + row) * row_bytes + 16 * (lane % 8)) = uint4{}; });
    }
}

// Zeroes one row of a tile of `slab_count` slabs.
template <int rows, int slab_count>
__device__ __forceinline__ void clear_row(u8* tile, u32 row) {
    for (int slab = 0; slab < slab_count; ++slab) {
        uint4* line = reinterpret_cast<uint4*>(tile + (slab * rows + row) * row_bytes);
        for (int chunk = 0; chunk < 8; ++chunk) line[chunk] = uint4{};
    }
}

}  // namespace sm90
