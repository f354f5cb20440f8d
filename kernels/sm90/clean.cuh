// Which keys a mask hides from every row, by tile; and how their rows become zero in shared memory.
#pragma once
#include "attn/mask.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

// Does the band alone hide some key of the tile from every row?  The keys it shows to some row are consecutive.
__device__ __forceinline__ bool band_hides(const Params& p, i32 n) {
    if constexpr (!cfg::band_left && !cfg::band_right) return false;
    const i32 first = n * cfg::block_n, last = min(first + cfg::block_n, p.n_keys) - 1;
    return !band_sees(p, first) || !band_sees(p, last);
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
