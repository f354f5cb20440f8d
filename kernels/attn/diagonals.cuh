// Diagonals of tiles: those whose corners have the same row less key.
#pragma once
#include "ptx/types.cuh"

// Tiles' corners lie on every step-th diagonal, the first that of the last key tile's first key.
constexpr i32 common_divisor(i32 a, i32 b) { return b == 0 ? a : common_divisor(b, a % b); }
template <int rows, int keys>
struct Diagonals {
    static constexpr i32 step = common_divisor(rows, keys), lines = rows + keys;  // of one of them, the last unused

    // Row less key of the upper left corner of a diagonal's tiles.
    __device__ __forceinline__ static i32 corner(i32 owner, i32 key_tiles) { return owner * step - (key_tiles - 1) * keys; }
    // Which diagonal a tile lies on.
    __device__ __forceinline__ static i32 owner(i32 row_tile, i32 key_tile, i32 key_tiles) {
        return row_tile * (rows / step) + (key_tiles - 1 - key_tile) * (keys / step);
    }
    // The line with this row less key, counted from the corner.
    __device__ __forceinline__ static i32 line(i32 difference) { return difference + keys - 1; }
    // Row less key of line x.
    __device__ __forceinline__ static i32 difference(i32 corner, i32 x) { return corner + x - (keys - 1); }
};
