// Which row tiles a block of the persistent grid works on, and which key tiles each of them visits.
#pragma once
#include "sm90/hidden.cuh"
#include "sm90/fwd_layout.cuh"

namespace sm90::fwd {

// Where keys end with the row, the last row tile ends with the last 64 queries, and the rows that are too many stand before
// the first one, which sees fewest keys.  Whole warpgroups: no output is stored from before a tensor's beginning.
__device__ __forceinline__ i32 rows_before_first(const Params& p) {
    return cfg::band_right ? p.row_tiles * cfg::block_m - (p.n_queries + 63) / 64 * 64 : 0;
}

// In a section the row tiles with most work come first; neighbours share keys and values.
__device__ __forceinline__ Work row_tile(const Params& p, i32 number) {
    const TileRank place = rank_of(p, number, p.heads, p.row_tiles);
    i32 tile = p.row_tiles - 1 - place.rank, instance = 0;
    if constexpr (cfg::mask != kMaskNone) instance = static_cast<i32>(slice_of(p.table, place.batch, place.head));
    if constexpr (cfg::mask == kMaskColumn)
        if (p.table.order != nullptr) tile = p.table.order[static_cast<i64>(instance) * p.row_tiles + place.rank];
    return {tile * cfg::block_m - rows_before_first(p), place.head, place.batch, instance};
}

// A row tile's rows.
__device__ __forceinline__ Rows all_rows(const Params& p, const Work& work) {
    return {max(work.row, 0), min(work.row + cfg::block_m, p.n_queries), 0};
}

// A warpgroup's rows; before the first query and past the last one there are none.
__device__ __forceinline__ Rows warpgroup_rows(const Params& p, const Work& work, int warpgroup) {
    const i32 first = work.row + 64 * warpgroup;
    return {first, first < 0 ? first : min(first + 64, p.n_queries), first / 64};
}

// The first key tile, of which no row sees anything.
__device__ __forceinline__ KeyTile hidden_tile(const Params& p, const Work& work) {
    i32 bits = 0;
    for (int w = 0; w < warpgroups; ++w) {
        const Rows rows = warpgroup_rows(p, work, w);
        if (rows.first < rows.end) bits |= KeyTile::partial_bit << w;
    }
    return KeyTile::make(0, bits);
}

// How a key tile looks to each warpgroup of a row tile; none when it is hidden from all of them (FlashMask algorithm 1, lines 10-15;
// FlashAttention algorithm 5, line 8, for block masks).  `blocks` is the offset
// of the head's blocks.
__device__ __forceinline__ KeyTile classify(const Params& p, const Work& work, i64 blocks, i32 n) {
    bool seen = true, partial = false, dead = false;
    if constexpr (cfg::mask == kMaskBlock) {
        const MaskPlace place{all_rows(p, work), 0, blocks, 0};
        TileWalk(p, place, 0).classify_blocks(n, seen = false, partial, dead);
    }
    i32 bits = dead || band_hides(p, n) ? KeyTile::dead_bit : 0;
#pragma unroll 1  // registers are few
    for (int w = 0; w < warpgroups; ++w) {
        const MaskPlace place{warpgroup_rows(p, work, w), work.instance, 0, 0};
        const Rows& rows = place.rows;
        if constexpr (cfg::mask == kMaskColumn) TileWalk(p, place, 0).classify_column(n, seen, partial, dead);
        const bool some = rows.first < rows.end, mine = seen && some && n * cfg::block_n < band_end(p, rows) &&
                                                        (n + 1) * cfg::block_n > band_first(p, rows);
        if (!mine) bits |= KeyTile::hidden_bit << w;
        if (some && (!mine || partial || cut(p, rows, n))) bits |= KeyTile::partial_bit << w;
        if (dead) bits |= KeyTile::dead_bit;
    }
    // Blocks and the band may hide a key only together.
    if (cfg::mask == kMaskBlock && bits & KeyTile::partial_bits) bits |= KeyTile::dead_bit;
    constexpr i32 hidden = (1 << warpgroups) - 1;
    return (bits & hidden) == hidden ? KeyTile::none() : KeyTile::make(n, bits);
}

}  // namespace sm90::fwd
