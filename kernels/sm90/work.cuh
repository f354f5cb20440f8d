// Which row tiles a block of the persistent grid works on, and which key tiles each of them visits.
#pragma once
#include "sm90/clean.cuh"
#include "sm90/layout.cuh"

namespace sm90 {

// In a section the row tiles with most work come first; neighbours share keys and values.
__device__ __forceinline__ Work row_tile(const Params& p, i32 number) {
    const TileRank place = rank_of(p, number, p.heads, p.row_tiles);
    i32 tile = p.row_tiles - 1 - place.rank;
    if constexpr (cfg::mask == kMaskColumn) {
        const i64 instance = slice_offset(p.table, batch_index(p, place.batch), place.head);
        if (p.table.order != nullptr) tile = p.table.order[instance * p.row_tiles + place.rank];
    }
    return {tile * cfg::block_m, place.head, place.batch, tile};
}

__device__ __forceinline__ MaskPlace mask_place(const Params& p, const Work& work) {
    MaskPlace place{{work.row, min(work.row + cfg::block_m, p.n_queries), work.tile}, 0, 0, 0};
    place.lowest = band_first(p, place.rows) / cfg::block_n;
    if constexpr (cfg::mask != kMaskNone) {
        const BatchIndex index = batch_index(p, work.batch);
        place.instance = slice_offset(p.table, index, work.head);
        if constexpr (cfg::mask == kMaskBlock) place.offset = slice_offset(p.mask, index, work.head);
    }
    return place;
}

// The next visible key tile of a row tile, in descending order; all lanes of a warp take part.
__device__ __forceinline__ KeyTile next_key_tile(TileWalk& walk) {
    const Tile tile = walk.next();
    if (!tile.exists()) return KeyTile::none();
    return KeyTile::make(tile.n(), tile.partial(), tile.dead() || band_hides(walk.p, tile.n()));
}

}  // namespace sm90
