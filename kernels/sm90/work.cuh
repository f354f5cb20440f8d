// Which row tiles a block of the persistent grid works on, and which key tiles each of them visits.
#pragma once
#include "attn/mask.cuh"
#include "sm90/layout.cuh"

namespace sm90 {

// Row tiles are numbered so that neighbours in time share keys and values in the L2 cache: sections of `section` heads;
// in a section heads are fastest and the row tiles with most work come first.
__device__ __forceinline__ Work row_tile(const Params& p, i32 number) {
    const i32 pairs = p.batch * p.heads;
    const i32 section = number / (p.section * p.row_tiles);
    const i32 first = section * p.section;
    const i32 width = min(p.section, pairs - first);
    const i32 within = number - first * p.row_tiles;
    const i32 rank = within / width, pair = first + within - rank * width;
    const i32 batch = pair / p.heads, head = pair - batch * p.heads;
    i32 tile = p.row_tiles - 1 - rank;
    if constexpr (cfg::mask == kMaskColumn) {
        const i64 instance = slice_offset(p.table, batch_index(p, batch), head);
        if (p.table.order != nullptr) tile = p.table.order[instance * p.row_tiles + rank];
    }
    return {tile * cfg::block_m, head, batch, tile};
}

// Is some key of the tile hidden from every row by the band alone?  The keys it shows to some row are consecutive.
__device__ __forceinline__ bool band_hides(const Params& p, i32 n) {
    if constexpr (!cfg::band_left && !cfg::band_right) return false;
    const i32 first = n * cfg::block_n, last = min(first + cfg::block_n, p.n_keys) - 1;
    return !band_sees(p, first) || !band_sees(p, last);
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
