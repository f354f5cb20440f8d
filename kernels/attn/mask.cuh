// Which keys a row may see: whole tiles (TileWalk) and single elements (KeyMask).
//
// Tiles are walked in descending order whatever the mask, and a tile that turns out to be masked altogether changes nothing; so a
// row's result does not depend on how its mask was expressed.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/params.cuh"

// A key tile to work on, packed into one register: several are under way at a time.
struct Tile {
    i32 code;

    __device__ __forceinline__ static Tile none() { return {-1}; }
    __device__ __forceinline__ static Tile make(i32 n, bool partial, bool dead) { return {n << 2 | (dead ? 2 : 0) | (partial ? 1 : 0)}; }
    __device__ __forceinline__ bool exists() const { return code >= 0; }
    __device__ __forceinline__ i32 n() const { return code >> 2; }
    __device__ __forceinline__ bool partial() const { return (code & 1) != 0; }  // elements must be tested
    __device__ __forceinline__ bool dead() const { return (code & 2) != 0; }     // some key's v must be read as zero
};

struct Rows {
    i32 first, end, tile;  // query rows of a row tile, and its number
};

// Where a block's masks lie: its rows, the instance of the tables, the mask's element offset, the lowest key tile to look at.
struct MaskPlace {
    Rows rows;
    i64 instance, offset;
    i32 lowest;
};

__device__ __forceinline__ i32 clamp_key(i64 key, i32 n_keys) { return key < 0 ? 0 : (key > n_keys ? n_keys : static_cast<i32>(key)); }

// First key and end of the keys that the band lets any of the rows see.
__device__ __forceinline__ i32 band_first(const Params& p, const Rows& rows) {
    if constexpr (!cfg::band_left) return 0;
    return clamp_key(static_cast<i64>(rows.first) + p.band_offset - p.band_left, p.n_keys);
}
__device__ __forceinline__ i32 band_end(const Params& p, const Rows& rows) {
    if constexpr (!cfg::band_right) return p.n_keys;
    return clamp_key(static_cast<i64>(rows.end) + p.band_offset + p.band_right, p.n_keys);
}

// Do the end of the keys or the band's edges cut through the tile?
__device__ __forceinline__ bool cut(const Params& p, const Rows& rows, i32 n) {
    const i32 first = n * cfg::block_n, end = first + cfg::block_n;
    bool partial = end > p.n_keys;
    if constexpr (cfg::band_right) partial |= end - 1 > rows.first + p.band_offset + p.band_right;
    if constexpr (cfg::band_left) partial |= first < rows.end - 1 + p.band_offset - p.band_left;
    return partial;
}

// The key tiles of one row tile, or every step-th of them, in descending order.  All lanes of a warp hold the same walk.
template <int step = 1>
struct TileWalk {
    const Params& p;
    const MaskPlace& place;  // in shared memory: it is needed rarely, and registers are short
    i32 top, group = 0;      // next candidate, first tile of the group of 32 whose ballots are held
    u32 visible = 0, partial = 0, dead = 0;

    // `phase` is one of the tiles: which they are does not depend on where the mask ends.
    __device__ __forceinline__ TileWalk(const Params& params, const MaskPlace& where, i32 tile_end, i32 phase = 0) : p(params), place(where) {
        static_assert((step & (step - 1)) == 0, "a power of two");
        top = min(tile_end, (band_end(p, place.rows) + cfg::block_n - 1) / cfg::block_n) - 1;
        top -= (top - phase) & (step - 1);
    }

    __device__ __forceinline__ Tile next() {
        if constexpr (cfg::mask == kMaskNone || cfg::mask == kMaskDense) {
            if (top < place.lowest) return Tile::none();
            const i32 n = top;
            top -= step;
            return Tile::make(n, cfg::mask == kMaskDense || cut(p, place.rows, n), cfg::mask == kMaskDense);
        } else {
            while (visible == 0) {
                if (top < place.lowest) return Tile::none();
                classify_group();
            }
            const int bit = __ffs(visible) - 1;
            visible &= visible - 1;
            const i32 n = group - bit * step;
            return Tile::make(n, (partial >> bit & 1) || cut(p, place.rows, n), (dead >> bit & 1) != 0);
        }
    }

    __device__ __forceinline__ void classify_group() {
        group = top;
        top -= 32 * step;
        const i32 n = group - static_cast<i32>(threadIdx.x % 32) * step;
        bool seen = false, edge = false, zero = false;
        if (n >= place.lowest) {
            if constexpr (cfg::mask == kMaskColumn) classify_column(n, seen, edge, zero);
            else classify_blocks(n, seen, edge, zero);
        }
        visible = __ballot_sync(~0u, seen);
        partial = __ballot_sync(~0u, edge);
        dead = __ballot_sync(~0u, zero);
    }

    __device__ __forceinline__ void classify_column(i32 n, bool& seen, bool& edge, bool& zero) const {
        const int4* bounds = p.table.bounds + (place.instance * p.key_tiles + n) * 2;
        const int4 x = __ldg(bounds), y = __ldg(bounds + 1);
        const i32 m = place.rows.tile, first = x.x & ~kDeadTile;
        seen = !(m >= first && m < x.y) && !(m >= y.x && m < y.y);
        edge = (m >= x.z && m < x.w) || (m >= y.z && m < y.w);
        zero = x.x < 0;
    }

    __device__ __forceinline__ void classify_blocks(i32 n, bool& seen, bool& edge, bool& zero) const {
        const u8* blocks = static_cast<const u8*>(p.mask.data) + place.offset;
        const i32 first = place.rows.first / p.table.block_m, last = (place.rows.end - 1) / p.table.block_m;
        const i32 left = n * cfg::block_n / p.table.block_n;
        const i32 right = (min((n + 1) * cfg::block_n, p.n_keys) - 1) / p.table.block_n;
        bool all = true;
        for (i32 r = first; r <= last; ++r)
            for (i32 c = left; c <= right; ++c) {
                const bool on = blocks[r * p.mask.row + c * p.mask.col] != 0;
                seen |= on;
                all &= on;
            }
        edge = zero = seen && !all;
    }
};

// One key's visibility to any row.
struct KeyMask {
    i32 lts, lte, uts, ute;
    const u8* column;
    i64 row_stride;
    bool inside;

    __device__ __forceinline__ KeyMask(const Params& p, i64 instance, i64 mask_offset, i32 key)
        : KeyMask(p, mask_offset, key, cfg::mask == kMaskColumn ? __ldg(p.table.cols + instance * p.table.keys_padded + key) : int4{}) {}

    // The same with the key's column intervals at hand.
    __device__ __forceinline__ KeyMask(const Params& p, i64 mask_offset, i32 key, int4 intervals) {
        inside = key < p.n_keys;
        const i32 safe = inside ? key : 0;
        if constexpr (cfg::mask == kMaskColumn) {
            lts = intervals.x, lte = intervals.y, uts = intervals.z, ute = intervals.w;
        } else if constexpr (cfg::mask != kMaskNone) {
            const i32 c = cfg::mask == kMaskBlock ? safe / p.table.block_n : safe;
            column = static_cast<const u8*>(p.mask.data) + mask_offset + c * p.mask.col;
            row_stride = p.mask.row;
        }
    }

    // `row` must lie in [0, n_queries); `key` is the constructor's.
    __device__ __forceinline__ bool visible(const Params& p, i32 row, i32 key) const {
        bool seen = inside;
        if constexpr (cfg::band_right) seen &= key <= row + p.band_offset + p.band_right;
        if constexpr (cfg::band_left) seen &= key >= row + p.band_offset - p.band_left;
        if constexpr (cfg::mask == kMaskColumn) seen &= !(row >= lts && row < lte) && !(row >= uts && row < ute);
        if constexpr (cfg::mask == kMaskDense) seen &= column[row * row_stride] != 0;
        if constexpr (cfg::mask == kMaskBlock) seen &= column[row / p.table.block_m * row_stride] != 0;
        return seen;
    }
};

// Does any row see the key?  Only asked in tiles that are marked dead.
__device__ __forceinline__ bool key_alive(const Params& p, i64 instance, i32 key) {
    if constexpr (cfg::mask == kMaskColumn) {
        const int4 x = __ldg(p.table.cols + instance * p.table.keys_padded + key);
        return !(x.x == 0 && x.y == p.n_queries);
    } else if constexpr (cfg::mask != kMaskNone) {
        return p.table.alive[instance * p.table.keys_padded + key] != 0;
    } else {
        return true;
    }
}

// The band alone may hide a key from every row (more keys than queries); its arithmetic needs no table.
__device__ __forceinline__ bool band_sees(const Params& p, i32 key) {
    i64 first = 0, last = p.n_queries - 1;
    if constexpr (cfg::band_right) first = max(first, static_cast<i64>(key) - p.band_offset - p.band_right);
    if constexpr (cfg::band_left) last = min(last, static_cast<i64>(key) - p.band_offset + p.band_left);
    return first <= last;
}
