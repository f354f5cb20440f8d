// The planner warp: draws row tiles, lists the key tiles that each of them visits, and loads the queries.
//
// It runs ahead of the producer, so that no table is waited for while keys or values could be on their way.
#pragma once
#include "attn/score.cuh"
#include "ptx/barrier.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/hidden.cuh"
#include "sm90/scores.cuh"
#include "sm90/tiles.cuh"

namespace sm90::fwd {

// Where keys end with the row, the last row tile ends with the last 64 queries, and the rows that are too many stand before
// the first one, which sees fewest keys.  Whole warpgroups: no output is stored from before a tensor's beginning.
// Not where the diagonal meets the corners of square tiles, and only one of a row's tiles is cut.
__device__ __forceinline__ i32 rows_before_first(const Params& p) {
    return cfg::band_right && !cfg::diagonal ? p.row_tiles * cfg::block_m - (p.n_queries + 63) / 64 * 64 : 0;
}

// In a section the row tiles with most work come first; neighbours share keys and values.  Before them come further parts of the first row tile,
// where there are any.
template <int first_parts>
__device__ __forceinline__ Work row_tile(const Params& p, i32 number, OrderedTile& item, Part& part) {
    constexpr i32 more = first_parts - 1;
    TileRank place = rank_of(p, number, p.heads, p.row_tiles + more);
    place.rank -= more;
    if constexpr (cfg::bias_shared) {  // in a section are then the batches of a head
        const i32 pair = place.batch * p.heads + place.head;
        place.head = pair / p.batch;
        place.batch = pair - place.head * p.batch;
    }
    item = {p.row_tiles - 1 - place.rank, 0, p.key_tiles - 1};
    i32 instance = 0;
    if constexpr (cfg::mask != kMaskNone) instance = static_cast<i32>(slice_of(p.table, place.batch, place.head));
    if constexpr (column_masks > 0 || stated_mask)
        if (p.table.order != nullptr && (more == 0 || place.rank >= 0)) item = p.table.order[static_cast<i64>(instance) * p.row_tiles + place.rank];
    if constexpr (more > 0) {
        if (place.rank < 0) item = {0, 0, p.key_tiles - 1};
        part = {max(-place.rank, 0), item.tile == 0 ? first_parts : 1, place.batch * p.heads + place.head};
    }
    return {item.tile * cfg::block_m - rows_before_first(p), place.head, place.batch, instance};
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

// A key tile of which no row sees anything.
__device__ __forceinline__ KeyTile hidden_tile(const Params& p, const Work& work, i32 n) {
    i32 bits = 0;
    for (int w = 0; w < warpgroups; ++w) {
        const Rows rows = warpgroup_rows(p, work, w);
        if (rows.first < rows.end) bits |= KeyTile::partial_bit << w;
    }
    return KeyTile::make(n, bits);
}

// How a key tile looks to each warpgroup of a row tile; none when it is hidden from all of them (FlashMask algorithm 1, lines 10-15;
// FlashAttention algorithm 5, line 8, for block masks).  `blocks` is the offset
// of the head's blocks.
__device__ __forceinline__ KeyTile classify(const Params& p, const Work& work, i64 blocks, i32 n) {
    bool seen = true, partial = false, dead = false;
    if constexpr (block_mask) {
        const MaskPlace place{all_rows(p, work), 0, blocks};
        TileWalk(p, place, 0).classify_blocks(n, seen = false, partial, dead);
        dead = false;
    }
    i32 bits = band_hides(p, n) ? KeyTile::dead_bit : 0;
#pragma unroll 1  // registers are few
    for (int w = 0; w < warpgroups; ++w) {
        const MaskPlace place{warpgroup_rows(p, work, w), work.instance, 0};
        const Rows& rows = place.rows;
        if constexpr (column_masks > 0) TileWalk(p, place, 0).classify_column(n, seen, partial, dead);
        bool shown = seen, tested = partial;
        const bool some = rows.first < rows.end;
        if constexpr (stated_mask) {
            const u32 state = some ? tile_state(p, work.instance, rows.tile, n) : 0;
            shown &= state & kSomeSeen, tested |= state & kSomeHidden;
        }
        const bool mine = shown && some && n * cfg::block_n < band_end(p, rows) && (n + 1) * cfg::block_n > band_first(p, rows);
        if (!mine) bits |= KeyTile::hidden_bit << w;
        if (some && (!mine || tested || cut(p, rows, n))) bits |= KeyTile::partial_bit << w;
        if (dead) bits |= KeyTile::dead_bit;
    }
    if constexpr (alive_table)
        if (bits & KeyTile::partial_bits && has_dead_keys(p, work.instance, n)) bits |= KeyTile::dead_bit;
    constexpr i32 hidden = (1 << warpgroups) - 1;
    return (bits & hidden) == hidden ? KeyTile::none() : KeyTile::make(n, bits);
}

// The next row tile is drawn when the producer begins with the last list, and so many tiles are left of this row at most: a block that is
// behind then draws less.  Rows of equal length, as a window's, need no such care.
constexpr bool lengths_vary = (cfg::band_right && !cfg::band_left) || column_masks > 0;
constexpr int tiles_left = 2;

// Beside tiles of a bias, which are large, queries go before the first list where their buffer is free.
constexpr bool queries_first = cfg::bias_tiles;

template <class Beside = Alone>
struct Planner {
    static constexpr int first_parts = Beside::first_parts;
    const Params& p;
    const ptx::TensorMap& q_map;
    const Shared shared;
    const u32 lane;
    Slot<1> list;
    Slot<cfg::q_stages> q;
    Beside beside;

    // Tiles are handed out in order by a ticket that returns to 0 by itself after the last one.  Lane 0 alone has it.
    __device__ __forceinline__ i32 draw(i32 total) const {
        return lane == 0 ? gridDim.x + static_cast<i32>(atomicInc(reinterpret_cast<u32*>(p.counters), total - 1)) : 0;
    }

    // Lanes with a tile write it, in their order.
    __device__ __forceinline__ void publish(const Work& work, KeyTile tile, bool last) {
        const u32 some = __ballot_sync(~0u, tile.exists());
        const i32 count = __popc(some), position = __popc(some & ((1u << lane) - 1));
        // Every warpgroup works on the last tile of a row, whatever its rows see of it: none needs a path without any.
        if (last && position == count - 1) tile.code = (tile.code & ~KeyTile::hidden_bits) | KeyTile::last_bit;
        ptx::mbarrier_wait(shared.barrier(list_empty), list.phase ^ 1);
        TileList& to = shared.list();
        if (some >> lane & 1) to.tiles[position] = tile;
        if (lane == 0) {
            to.count = count;
            to.head = work.head / p.group;
            to.batch = work.batch;
            to.instance = work.instance;
            to.set_row(work.row);
            if constexpr (cfg::bias || cfg::split_score) shared.bias_of_list() = {work.head, work.batch, work.row};
        }
        ptx::mbarrier_arrive(shared.barrier(list_full));
        list.advance();
    }

    __device__ __forceinline__ void load_queries(const Work& work, const Part& part) {
        const u32 full = shared.barrier(q_full + q.stage);
        ptx::mbarrier_wait(shared.barrier(q_empty + q.stage), q.phase ^ 1);
        if (lane == 0) {
            shared.work(q.stage) = work;
            if constexpr (cfg::split) shared.part(q.stage) = part;
            if (work.head < 0) {
                ptx::mbarrier_arrive(full);
            } else {
                ptx::mbarrier_arrive_expect(full, q_bytes);
                load_tile<cfg::block_m, slabs>(q_map, shared.q(q.stage), full, ptx::evict_first, work.row,
                                               {p.q, work.head, work.batch});
                beside.load_queries(shared.q(q.stage) + q_part, full, work);
            }
        }
        q.advance();
    }

    // Does the bias of some key of a tile exceed `least`?
    __device__ __forceinline__ bool shows(i64 offset, i32 n, float least = minus_infinity()) const {
        for (i32 key = n * cfg::block_n; key < (n + 1) * cfg::block_n; key += 8) {
            bool some = false;
            unroll<8>([&](int i) { some |= !(bias_at(p, offset, 0, key + i) <= least); });
            if (some) return true;
        }
        return false;
    }

    // What a key's bias must exceed for a row to notice it: where all rows see all keys, sunk ones count only where all are.
    __device__ __forceinline__ float least_bias(i64 offset, i32 lowest, i32 top) const {
        if (!unmasked) return minus_infinity();
        for (; top >= lowest; top -= 32) {
            const i32 n = top - static_cast<i32>(lane);
            if (uniform(n >= lowest && shows(offset, n, sunk))) return sunk;
        }
        return minus_infinity();
    }

    // Narrows a range of key tiles to where some key's bias exceeds `least`: padding costs nothing.  False if none does.
    __device__ __forceinline__ bool trim(i64 offset, i32& lowest, i32& top, float least) const {
        u32 some = 0;
        i32 first = top;  // of 32 tiles that are looked at together
        for (; first >= lowest; first -= 32) {
            const i32 n = first - static_cast<i32>(lane);
            some = __ballot_sync(~0u, n >= lowest && shows(offset, n, least));
            if (some != 0) break;
        }
        if (some == 0) return false;
        top = first - (__ffs(some) - 1);
        if (first - lowest < 32) return lowest = first - (31 - __clz(some)), true;
        for (;; lowest += 32) {
            const i32 n = lowest + static_cast<i32>(lane);
            some = __ballot_sync(~0u, n <= top && shows(offset, n, least));
            if (some != 0) break;
        }
        lowest += __ffs(some) - 1;
        return true;
    }

    // Narrows a row's key tiles to those of a part, of as many as make parts of p.split_tiles or a little fewer; false if the row has no such part.
    __device__ __forceinline__ bool take(Part& part, i32& lowest, i32& top) const {
        const i32 tiles = top - lowest + 1;
        if (tiles <= 1 || part.count == 0) return part.number == 0;
        part.count = min((tiles + p.split_tiles - 1) / p.split_tiles, p.splits);
        if (part.number >= part.count) return false;
        lowest = top + 1 - tiles * (part.number + 1) / part.count;
        top -= tiles * part.number / part.count;
        return true;
    }

    // Key tiles in descending order, 32 candidates at a time.  The queries follow the first list, unless they go before it.
    __device__ __forceinline__ void plan(Work work, const OrderedTile& item, Part part) {
        i64 blocks = 0;
        if constexpr (block_mask) blocks = slice_of(p.mask, work.batch, work.head);
        const Rows rows = all_rows(p, work);
        i32 lowest = band_first(p, rows) / cfg::block_n;
        i32 top = (band_end(p, rows) + cfg::block_n - 1) / cfg::block_n - 1;
        if constexpr (column_masks > 0 && !stated_mask) lowest = max(lowest, item.lowest), top = min(top, item.top);  // with more masks, no registers
        i32 hidden = 0;  // what is visited where nothing is seen: one of the part's own
        if constexpr (first_parts > 1) {
            if (part.count > 1) {
                hidden = p.key_tiles * part.number / first_parts;
                lowest = max(lowest, hidden), top = min(top, p.key_tiles * (part.number + 1) / first_parts - 1);
            }
        } else if constexpr (cfg::split) {
            if (!take(part, lowest, top)) return;
        }
        if constexpr (cfg::split && cfg::mask == kMaskNone) work.instance = max(top, 0) | lowest << 16;
        float least = 0.0f;
        if constexpr (told_bias) least = least_bias(slice_of(p.bias, work.batch, work.head), lowest, top);
        if constexpr (cfg::bias_keys && !told_bias) {
            const i64 offset = slice_of(p.bias, work.batch, work.head);
            if (!(cfg::split_bias && unmasked && trim(offset, lowest, top, sunk))) trim(offset, lowest, top, minus_infinity());
            if (!later_tiles_vary && top >= lowest) lowest = min(lowest, 127), work.instance = top | lowest << 24;
        }
        if constexpr (cfg::diagonal && !cfg::split) work.instance = max(top, 0);
        KeyTile held = KeyTile::none();
        bool first = true, some = false;
        if (queries_first && uniform(ptx::mbarrier_passed(shared.barrier(q_empty + q.stage), q.phase ^ 1))) load_queries(work, part), first = false;
        for (i32 group = top; group >= lowest; group -= 32) {
            const i32 n = group - static_cast<i32>(lane);
            const bool noticed = n >= lowest && (!told_bias || shows(slice_of(p.bias, work.batch, work.head), n, least));
            const KeyTile tile = noticed ? classify(p, work, blocks, n) : KeyTile::none();
            if (!__any_sync(~0u, tile.exists())) continue;
            if (some) {
                publish(work, held, false);
                if (first) load_queries(work, part);
                first = false;
            }
            held = tile;
            some = true;
        }
        // Rows that see nothing visit one tile all the same, and mask all of it: the consumers need no second path.
        if (!some && lane == 0) held = hidden_tile(p, work, hidden);
        if constexpr (lengths_vary) {
            const u32 left = __ballot_sync(~0u, held.exists()) >> lane;
            const bool late = __popc(left) <= tiles_left;
            if (__any_sync(~0u, held.exists() && !late)) {
                publish(work, late ? KeyTile::none() : held, false);
                if (first) load_queries(work, part);
                first = false;
                if (!late) held = KeyTile::none();
            }
        }
        publish(work, held, true);
        if (first) load_queries(work, part);
    }

    __device__ __forceinline__ void run() {
        constexpr bool split = cfg::split && first_parts == 1;
        const i32 tiles = p.batch * p.heads * (p.row_tiles + first_parts - 1), total = tiles + (split ? (tiles - p.shared_tile) * (p.splits - 1) : 0);
        for (i32 number = blockIdx.x; number < total;) {
            OrderedTile item;
            Part part{};
            const i32 beyond = split ? number - p.shared_tile : -1, divided = beyond < 0 ? 0 : beyond / p.splits;
            const Work work = row_tile<first_parts>(p, beyond < 0 ? number : p.shared_tile + divided, item, part);
            if (split && beyond >= 0) part = {beyond - divided * p.splits, 1, divided};
            plan(work, item, part);
            // The next one is drawn as late as may be, when work on this one begins or comes to an end: blocks that are behind draw less.
            ptx::mbarrier_wait(shared.barrier(list_empty), list.phase ^ 1);
            number = __shfl_sync(~0u, draw(total), 0);
        }
        ptx::mbarrier_wait(shared.barrier(list_empty), list.phase ^ 1);
        if (lane == 0) shared.list().count = -1;
        ptx::mbarrier_arrive(shared.barrier(list_full));
        load_queries({0, -1, 0, 0}, {});
    }
};

}  // namespace sm90::fwd
