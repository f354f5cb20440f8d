// The argument of the kernels that turn masks into tables, mirrored by MASK_PARAMS in cuattn/cuda/params.py.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/params.cuh"

constexpr int kLeadingAxes = kBatchAxes + 1;  // batch axes and heads

// A mask as it was given.
struct MaskSource {
    const void* data;
    i64 stride[kLeadingAxes];  // elements along the leading axes of all masks together; 0 where this mask is broadcast
    i64 row, col;              // column: from one of lts, lte, uts, ute to the next, and from key to key
    i32 block_m, block_n;      // block: rows and keys per block;  others: 1, 1
};

struct CoreMaskParams {
    MaskSource column[kMaxColumnMasks];  // i32
    MaskSource blocks, boolean;          // u8
    MaskSource function;                 // i32: see Params; strides count matrices
    int4 *cols, *bounds;
    OrderedTile* order;
    u64* bits;
    void* values;                        // function: see util/mask_states.cu
    u32 *alive, *states;                 // zeros on entry
    i64 bits_instance, bits_row, bits_tile, states_instance;
    i32 size[kLeadingAxes];              // leading axes of all masks together; their product is the number of instances
    MatrixPlace matrices;
    i32 instances;
    i32 alike;                           // mask_alive: neighbouring rows, from a multiple of this on, that see the same
    i32 n_queries, n_keys, keys_padded, row_tiles, key_tiles;
    i32 band_left, band_right;
    u32* rough;                          // function: states of tiles by bounds alone, or null: they are the states
};

struct MaskParams : CoreMaskParams, traced::mask::Arguments {};

// Where an instance of a mask begins, in elements.
__device__ __forceinline__ i64 source_offset(const MaskParams& p, const MaskSource& source, i32 instance) {
    i64 offset = 0;
#pragma unroll
    for (int axis = kLeadingAxes - 1; axis >= 0; --axis) {
        offset += instance % p.size[axis] * source.stride[axis];
        instance /= p.size[axis];
    }
    return offset;
}

// The bounds of a key in a column mask: as they were given, of any value.
__device__ __forceinline__ int4 source_bounds(const MaskSource& source, i64 offset, i32 key) {
    const i32* at = static_cast<const i32*>(source.data) + offset + key * source.col;
    return {at[0], at[source.row], at[2 * source.row], at[3 * source.row]};
}

// Query rows [first, end) that the band lets see a key.
struct RowRange {
    i32 first, end;
};

__device__ __forceinline__ RowRange band_rows(const MaskParams& p, i32 key) {
    i64 first = 0, end = p.n_queries;
    if constexpr (cfg::band_right) first = max(first, static_cast<i64>(key) - p.band_right);
    if constexpr (cfg::band_left) end = min(end, static_cast<i64>(key) + p.band_left + 1);
    return {static_cast<i32>(min(first, static_cast<i64>(p.n_queries))), static_cast<i32>(max(end, 0ll))};
}
