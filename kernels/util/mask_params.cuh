// The argument of the kernels that turn a mask into tables, mirrored by MASK_PARAMS in cuattn/cuda/params.py.
#pragma once
#include "attn/params.cuh"

constexpr int kLeadingAxes = kBatchAxes + 1;  // batch axes and heads

struct MaskParams {
    const i32 *lts, *lte, *uts, *ute;  // column: [instance][n_keys]
    const u8* mask;                    // dense: elements;  block: blocks
    i64 stride[kLeadingAxes];          // of the mask's own leading axes, elements
    i64 row, col;
    int4 *cols, *bounds;
    i32* order;
    u8* alive;                         // zeros on entry
    i32 size[kLeadingAxes];            // the mask's own leading sizes; their product is the number of instances
    i32 rows;                          // dense: rows to look at (1 when all are the same);  block: block rows
    i32 block_m, block_n;              // block: rows and keys per block;  dense: 1, 1
    i32 n_queries, n_keys, keys_padded, row_tiles, key_tiles;
    i32 band_left, band_right, band_offset;
};

// Query rows [first, end) that the band lets see a key.
struct RowRange {
    i32 first, end;
};

__device__ __forceinline__ RowRange band_rows(const MaskParams& p, i32 key) {
    i64 first = 0, end = p.n_queries;
    if constexpr (cfg::band_right) first = max(first, static_cast<i64>(key) - p.band_offset - p.band_right);
    if constexpr (cfg::band_left) end = min(end, static_cast<i64>(key) - p.band_offset + p.band_left + 1);
    return {static_cast<i32>(min(first, static_cast<i64>(p.n_queries))), static_cast<i32>(max(end, 0ll))};
}
