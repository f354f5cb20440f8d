// Which keys a row may see: whole tiles (TileWalk) and single elements (KeyMask).
//
// Tiles are walked in descending order whatever the mask, and a tile that turns out to be masked altogether changes nothing; so a
// row's result does not depend on how its mask was expressed.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/mask_function.cuh"
#include "attn/math.cuh"
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

__device__ __forceinline__ i32 clamp_key(i64 key, i32 n_keys) { return key < 0 ? 0 : (key > n_keys ? n_keys : static_cast<i32>(key)); }

// First key and end of the keys that the band lets any of the rows see.
__device__ __forceinline__ i32 band_first(const Params& p, const Rows& rows) {
    if constexpr (!cfg::band_left) return 0;
    return clamp_key(static_cast<i64>(rows.first) - p.band_left, p.n_keys);
}
__device__ __forceinline__ i32 band_end(const Params& p, const Rows& rows) {
    if constexpr (!cfg::band_right) return p.n_keys;
    return clamp_key(static_cast<i64>(rows.end) + p.band_right, p.n_keys);
}

// Which matrix of a mask function, where there is one.
struct NoMatrix {
    __device__ __forceinline__ void set_matrix(i32) {}
    __device__ __forceinline__ i32 matrix() const { return 0; }
};
struct Matrix {
    i32 number;
    __device__ __forceinline__ void set_matrix(i32 of) { number = of; }
    __device__ __forceinline__ i32 matrix() const { return number; }
};
using OwnMatrix = Either<function_mask, Matrix, NoMatrix>::type;

// All of the masks that depends on the head: the instance of the tables, the element offsets of the block mask and of the boolean one (not read as bits).
struct MaskSlices : OwnMatrix {
    i64 instance, blocks, boolean;

    __device__ __forceinline__ MaskSlices() = default;
    __device__ __forceinline__ MaskSlices(i64 instance, i64 blocks, i64 boolean, i32 matrix) : instance(instance), blocks(blocks), boolean(boolean) { set_matrix(matrix); }

    __device__ __forceinline__ static MaskSlices of(const Params& p, const BatchIndex& index, i32 head) {
        return {cfg::mask != kMaskNone ? slice_offset(p.table, index, head) : 0, block_mask ? slice_offset(p.mask, index, head) : 0,
                boolean_mask ? slice_offset(p.boolean, index, head) : 0, function_mask ? static_cast<i32>(slice_offset(p.function, index, head)) : 0};
    }
};

// Where a block's masks lie: its rows, what MaskSlices says of its head, the lowest key tile to look at.
struct MaskPlace : OwnMatrix {
    Rows rows;
    i32 instance;
    i64 offset;  // of the block mask
    i32 lowest;
    i64 boolean;

    __device__ __forceinline__ MaskPlace() = default;
    __device__ __forceinline__ MaskPlace(const Rows& rows, i32 instance, i64 offset) : rows(rows), instance(instance), offset(offset), lowest(0), boolean(0) {}

    // Those of the row tile with this number.
    __device__ __forceinline__ void set_rows(const Params& p, i32 tile) {
        const i32 first = tile * cfg::block_m;
        rows = {first, min(first + cfg::block_m, p.n_queries), tile};
        lowest = band_first(p, rows) / cfg::block_n;
    }
    __device__ __forceinline__ void set(const MaskSlices& of) { instance = static_cast<i32>(of.instance), offset = of.blocks, boolean = of.boolean, set_matrix(of.matrix()); }
    __device__ __forceinline__ MaskSlices slices() const { return {instance, offset, boolean, matrix()}; }
};

// Do the end of the keys or the band's edges cut through the tile?
__device__ __forceinline__ bool cut(const Params& p, const Rows& rows, i32 n) {
    const i32 first = n * cfg::block_n, end = first + cfg::block_n;
    bool partial = end > p.n_keys;
    if constexpr (cfg::band_right) partial |= end - 1 > rows.first + p.band_right;
    if constexpr (cfg::band_left) partial |= first < rows.end - 1 - p.band_left;
    return partial;
}

// What the tables say of a tile, by the number of its rows in their unit: kSomeSeen and kSomeHidden of its elements.
__device__ __forceinline__ u32 tile_state(const Params& p, i64 instance, i32 m, i32 n) {
    const u32 word = __ldg(p.table.states + instance * p.table.states_instance + state_word(m, n, p.key_tiles));
    return word >> state_shift(m, n) & (kSomeSeen | kSomeHidden);
}

// Is some key of the tile seen by no row, by the table of keys?
__device__ __forceinline__ bool has_dead_keys(const Params& p, i64 instance, i32 n) {
    const u32* alive = p.table.alive + instance * ((p.n_keys + 31) / 32);
    const i32 first = n * cfg::block_n, end = min(first + cfg::block_n, p.n_keys);
    bool dead = false;
    for (i32 word = first / 32; word * 32 < end; ++word) {
        const u32 ours = (~0u << max(first - 32 * word, 0)) & (~0u >> max(32 * word + 32 - end, 0));
        dead |= (~__ldg(alive + word) & ours) != 0;
    }
    return dead;
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
        if constexpr (cfg::mask == kMaskNone) {
            if (top < place.lowest) return Tile::none();
            const i32 n = top;
            top -= step;
            return Tile::make(n, cut(p, place.rows, n), false);
        } else {
            while (visible == 0) {
                if (top < place.lowest) return Tile::none();
                classify_group();
            }
            const int bit = __ffs(visible) - 1;
            visible &= visible - 1;
            const i32 n = group - bit * step;
            const bool edge = (partial >> bit & 1) || cut(p, place.rows, n);
            // A table of keys: a tile in which nothing is hidden has none that no row sees.
            return Tile::make(n, edge, (dead >> bit & 1) != 0 || (alive_table && edge));
        }
    }

    __device__ __forceinline__ void classify_group() {
        group = top;
        top -= 32 * step;
        const i32 n = group - static_cast<i32>(threadIdx.x % 32) * step;
        bool seen = false, edge = false, zero = false;
        if (n >= place.lowest) {
            if constexpr (block_mask) classify_blocks(n, seen, edge, zero);
            else seen = true;
            if constexpr (column_masks > 0) {
                bool in_columns, cut_by_columns, dead_in_columns;
                classify_column(n, in_columns, cut_by_columns, dead_in_columns);
                seen &= in_columns, edge |= cut_by_columns, zero |= dead_in_columns;
            }
            if constexpr (stated_mask) {
                const u32 state = tile_state(p, place.instance, place.rows.tile, n);
                seen &= state & kSomeSeen, edge |= state & kSomeHidden;
            }
        }
        visible = __ballot_sync(~0u, seen);
        partial = __ballot_sync(~0u, edge);
        dead = __ballot_sync(~0u, zero);
    }

    __device__ __forceinline__ void classify_column(i32 n, bool& seen, bool& edge, bool& zero) const {
        const int4* bounds = p.table.bounds + (static_cast<i64>(place.instance) * p.key_tiles + n) * (2 * column_masks);
        const i32 m = place.rows.tile;
        seen = true, edge = zero = false;
#pragma unroll
        for (int i = 0; i < 2 * column_masks; ++i) {
            int4 x = __ldg(bounds + i);
            if (i == 0) {
                zero = x.x < 0;
                x.x &= ~kDeadTile;
            }
            seen &= !(m >= x.x && m < x.y);
            edge |= m >= x.z && m < x.w;
        }
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

// The intervals of a key in one of the column masks.
__device__ __forceinline__ int4 column_intervals(const Params& p, i64 instance, int mask, i32 key) {
    return __ldg(p.table.cols + (instance * column_masks + mask) * p.table.keys_padded + key);
}

// Where, of a boolean mask as bits, the words of 64 rows, counted in such, and a key tile begin.
__device__ __forceinline__ const u64* boolean_bits(const Params& p, i64 instance, i32 rows, i32 n) {
    return p.table.bits + instance * p.table.bits_instance + rows * p.table.bits_row + n * p.table.bits_tile;
}

// One key's visibility to any row.  packed: a boolean mask is read as bits, which are all that there is of one whose elements were computed ahead.
template <bool packed>
struct KeyMaskOf {
    int4 columns[column_masks + 1];
    const u8* blocks;
    const typename Either<packed, u32, u8>::type* boolean;
    FunctionHead head;
    FunctionKey own;
    bool inside;

    __device__ __forceinline__ KeyMaskOf(const Params& p, const MaskSlices& slices, i32 key) {
        if constexpr (column_masks > 0) columns[0] = column_intervals(p, slices.instance, 0, key);
        find(p, slices, key);
    }

    // The same with the intervals of the first column mask at hand.
    __device__ __forceinline__ KeyMaskOf(const Params& p, const MaskSlices& slices, i32 key, int4 intervals) {
        columns[0] = intervals;
        find(p, slices, key);
    }

    __device__ __forceinline__ KeyMaskOf(const Params& p, i64 instance, i64 mask_offset, i32 key)
        : KeyMaskOf(p, MaskSlices{instance, mask_offset, 0, 0}, key) {}

    __device__ __forceinline__ void find(const Params& p, const MaskSlices& slices, i32 key) {
        inside = key < p.n_keys;
        const i32 safe = inside ? key : 0;
#pragma unroll
        for (int c = 1; c < column_masks; ++c) columns[c] = column_intervals(p, slices.instance, c, key);
        if constexpr (block_mask) blocks = static_cast<const u8*>(p.mask.data) + slices.blocks + safe / p.table.block_n * p.mask.col;
        if constexpr (boolean_mask && packed) boolean = reinterpret_cast<const u32*>(boolean_bits(p, slices.instance, 0, safe / cfg::block_n) + safe % cfg::block_n);
        else if constexpr (boolean_mask) boolean = static_cast<const u8*>(p.boolean.data) + slices.boolean + safe * p.boolean.col;
        if constexpr (function_mask) head = FunctionHead::of(p, slices.matrix()), own = FunctionKey::of(p, head, key);
    }

    // `row` must lie in [0, n_queries); `key` is the constructor's.
    __device__ __forceinline__ bool visible(const Params& p, i32 row, i32 key) const {
        bool seen = inside;
        if constexpr (cfg::band_right) seen &= key <= row + p.band_right;
        if constexpr (cfg::band_left) seen &= key >= row - p.band_left;
#pragma unroll
        for (int c = 0; c < column_masks; ++c) {
            const int4& x = columns[c];
            seen &= !(row >= x.x && row < x.y) && !(row >= x.z && row < x.w);
        }
        if constexpr (boolean_mask && packed) seen &= __ldg(boolean + 2 * (row / 64 * p.table.bits_row) + row / 32 % 2) >> row % 32;
        else if constexpr (boolean_mask) seen &= boolean[row * p.boolean.row] != 0;
        if constexpr (block_mask) seen &= blocks[row / p.table.block_m * p.mask.row] != 0;
        if constexpr (function_mask) seen &= function_shows(p, head, FunctionRow::of(p, head, row), own);
        return seen;
    }
};
using KeyMask = KeyMaskOf<false>;

// Does any row see the key?  Only asked in tiles that are marked dead.
__device__ __forceinline__ bool key_alive(const Params& p, i64 instance, i32 key) {
    if constexpr (alive_table) return p.table.alive[instance * ((p.n_keys + 31) / 32) + key / 32] >> key % 32 & 1;
    if constexpr (column_masks == 0) return true;
    const int4 x = column_intervals(p, instance, 0, key);
    return !(x.x == 0 && x.y == p.n_queries);  // what all masks together hide has these bounds in each of them
}

// The band alone may hide a key from every row (more keys than queries); its arithmetic needs no table.
__device__ __forceinline__ bool band_sees(const Params& p, i32 key) {
    i64 first = 0, last = p.n_queries - 1;
    if constexpr (cfg::band_right) first = max(first, static_cast<i64>(key) - p.band_right);
    if constexpr (cfg::band_left) last = min(last, static_cast<i64>(key) + p.band_left);
    return first <= last;
}
