// The row tiles that a key tile needs, in ascending or descending order: FlashMask's algorithm 2, lines 13-19, 22 and 25, as arithmetic on ranges;
// with a block mask, line 8 of FlashAttention's algorithm 5.
//
// For a fixed key tile bands and column masks hide a few ranges of row tiles, so the next visible tile is found by jumps.  With other masks a
// warp looks at 32 tiles at a time.
#pragma once
#include "attn/mask.cuh"
#include "attn/math.cuh"

constexpr bool looks_up = block_mask || stated_mask;  // whether tiles are visible

// Which matrix the states of tiles are looked up in, where they are.
struct NoInstance {
    __device__ __forceinline__ void set_instance(i64) {}
    __device__ __forceinline__ i64 instance() const { return 0; }
};
struct Instance {
    i64 number;
    __device__ __forceinline__ void set_instance(i64 of) { number = of; }
    __device__ __forceinline__ i64 instance() const { return number; }
};

// What the walk looks up for every tile; lies in shared memory, registers being short.
struct WalkTables : Either<stated_mask, Instance, NoInstance>::type {
    int4 bounds[column_masks > 1 ? 2 * column_masks : 2];  // column masks: skip [x, y) and partial [z, w) of their intervals, in row tiles
    const u8* blocks;  // the block mask of this head
    i32 first_key;
    i32 end;           // one past the last row tile that may be visible
};

__device__ __forceinline__ i32 walk_end(const Params& p, i32 first_key) {
    if constexpr (!cfg::band_left) return p.row_tiles;
    const i32 last_row = min(first_key + cfg::block_n, p.n_keys) - 1 + p.band_left;
    return last_row < 0 ? 0 : min(p.row_tiles, last_row / cfg::block_m + 1);
}

// The tables of one key tile under one head's mask.  True when masks hide some key of it from every row.
__device__ __forceinline__ bool describe_tables(WalkTables& tables, const Params& p, i64 instance, i64 mask_offset, i32 key_tile) {
    tables.first_key = key_tile * cfg::block_n;
    tables.end = walk_end(p, tables.first_key);
    if constexpr (block_mask) tables.blocks = static_cast<const u8*>(p.mask.data) + mask_offset;
    tables.set_instance(instance);
    const int4* bounds = p.table.bounds + (instance * p.key_tiles + key_tile) * (2 * column_masks);
#pragma unroll
    for (int i = 0; i < 2 * column_masks; ++i) tables.bounds[i] = bounds[i];
    const bool dead = column_masks > 0 && tables.bounds[0].x < 0;
    tables.bounds[0].x &= ~kDeadTile;
    if constexpr (alive_table) return has_dead_keys(p, instance, key_tile);
    return dead;
}

template <bool descending>
struct DirectedRowWalk {
    i32 tile;  // current row tile
    const WalkTables& tables;

    __device__ __forceinline__ i32 first_key() const { return tables.first_key; }
    __device__ __forceinline__ i32 last_key(const Params& p) const { return min(first_key() + cfg::block_n, p.n_keys) - 1; }

    __device__ __forceinline__ DirectedRowWalk(const Params& p, const WalkTables& tables) : tables(tables) { begin(p); }

    // The first row tile that the band lets see the keys.
    __device__ __forceinline__ i32 first_tile(const Params& p) const {
        if constexpr (!cfg::band_right) return 0;
        return max(first_key() - p.band_right, 0) / cfg::block_m;
    }

    // Before the first tile of what the tables say now.
    __device__ __forceinline__ void begin(const Params& p) { tile = descending ? tables.end : first_tile(p) - 1; }

    __device__ __forceinline__ bool in_range(i32 first) const { return descending ? tile >= first : tile < tables.end; }

    // Moves to the next visible tile; false at the end.
    __device__ __forceinline__ bool next(const Params& p) {
        tile += descending ? -1 : 1;
        const i32 first = descending ? first_tile(p) : 0;  // going up, begin() has seen to it
        if constexpr (looks_up) {
            for (; in_range(first); tile += descending ? -32 : 32) {
                const i32 lane = threadIdx.x % 32, candidate = descending ? tile - lane : tile + lane;
                const bool some = (descending ? candidate >= first : candidate < tables.end) && sees(p, candidate);
                const u32 seen = __ballot_sync(~0u, some);
                if (seen) {
                    tile += descending ? 1 - __ffs(seen) : __ffs(seen) - 1;
                    break;
                }
            }
        } else {
            jump_columns();
        }
        return in_range(first);
    }

    // Do the masks show some key of the tile to a row tile?  All but the band are asked.
    __device__ __forceinline__ bool sees(const Params& p, i32 row_tile) const {
        bool seen = true;
#pragma unroll
        for (int i = 0; i < 2 * column_masks; ++i) seen &= !(row_tile >= tables.bounds[i].x && row_tile < tables.bounds[i].y);
        if constexpr (stated_mask) seen = seen && state(p, row_tile) & kSomeSeen;
        if constexpr (block_mask) seen = seen && block_state<false>(p, row_tile);
        return seen;
    }

    __device__ __forceinline__ u32 state(const Params& p, i32 row_tile) const {
        return tile_state(p, tables.instance(), row_tile, first_key() / cfg::block_n);
    }

    // Past what the column masks skip.  Leaving one range may enter another: of n ranges, n rounds leave none to enter, and of two
    // ranges three looks.
    __device__ __forceinline__ void jump_columns() {
        constexpr int ranges = column_masks > 0 ? 2 * column_masks : 1, looks = column_masks <= 1 ? 3 * column_masks : ranges * ranges;
#pragma unroll
        for (int look = 0; look < looks; ++look) {
            const int4 range = tables.bounds[look % ranges];
            if (tile >= range.x && tile < range.y) tile = descending ? range.x - 1 : range.y;
        }
    }

    // Whether elements of the current tile must be tested one by one.
    __device__ __forceinline__ bool partial(const Params& p) const {
        bool result = first_key() + cfg::block_n > p.n_keys;
#pragma unroll
        for (int i = 0; i < 2 * column_masks; ++i) result |= tile >= tables.bounds[i].z && tile < tables.bounds[i].w;
        const i32 first_row = tile * cfg::block_m, last_row = min(first_row + cfg::block_m, p.n_queries) - 1;
        if constexpr (cfg::band_right) result |= last_key(p) > first_row + p.band_right;
        if constexpr (cfg::band_left) result |= first_key() < last_row - p.band_left;
        if constexpr (block_mask) result |= !block_state<true>(p, tile);
        if constexpr (stated_mask) result |= state(p, tile) & kSomeHidden;
        return result;
    }

    // Over the blocks that a row tile touches: is any of them visible, or (all) are all of them?
    template <bool all>
    __device__ __forceinline__ bool block_state(const Params& p, i32 row_tile) const {
        const i32 row = row_tile * cfg::block_m, last_row = min(row + cfg::block_m, p.n_queries) - 1;
        for (i32 r = row / p.table.block_m; r <= last_row / p.table.block_m; ++r)
            for (i32 c = first_key() / p.table.block_n; c <= last_key(p) / p.table.block_n; ++c)
                if ((tables.blocks[r * p.mask.row + c * p.mask.col] != 0) != all) return !all;
        return all;
    }
};

using RowWalk = DirectedRowWalk<false>;
