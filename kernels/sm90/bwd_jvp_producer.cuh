// The producer warp of the gradients' kernel along tangents: brings the owner's rows, walks the tiles of the other side that masks show, and keeps
// the copy engine busy.  All lanes walk, lane 0 issues.  Also the cleaner warp.
#pragma once
#include "ptx/barrier.cuh"
#include "sm90/bwd_jvp_layout.cuh"
#include "sm90/hidden.cuh"

namespace sm90::moved {

// In a section the tiles with most work come first; neighbours share what they stream.  Before them come further parts of the first tile, where there
// are any.
__device__ __forceinline__ Work own_tile(const Params& p, i32 number) {
    constexpr i32 more = cfg::first_parts - 1;
    const i32 tiles = keys_own ? p.key_tiles : p.row_tiles;
    TileRank place = rank_of(p, number, keys_own ? p.kv_heads : p.heads, tiles + more);
    place.rank -= more;
    if (more > 0 && place.rank < 0) return {0, place.head, place.batch, -place.rank};
    i32 tile = keys_own ? place.rank : tiles - 1 - place.rank;
    if constexpr (!keys_own && (column_masks > 0 || stated_mask)) {
        if (p.table.order != nullptr) tile = p.table.order[slice_of(p.table, place.batch, place.head) * tiles + place.rank].tile;
    }
    return {tile, place.head, place.batch, 0};
}

struct Producer {
    const TangentParams& p;
    const Maps& maps;
    const Shared shared;
    const Work work;
    const bool leader;  // lane 0
    Slot<cfg::stages> slot;

    // Rows of one side from a row on, with their tangents; head: of that side.
    template <bool of_keys, int rows>
    __device__ __forceinline__ void load_side(u32 to, u32 barrier, u64 policy, i32 row, i32 head) {
        using At = Side<of_keys, rows>;
        const i32 batch = work.batch;
        if constexpr (of_keys) {
            load_tile<rows, slabs>(maps.k, to, barrier, policy, row, {p.k, head, batch});
            if constexpr (cfg::tk) load_tile<rows, slabs>(maps.tk, to + At::tx_at, barrier, policy, row, {p.tk, head, batch});
            load_tile<rows, slabs_v>(maps.v, to + At::v_at, barrier, policy, row, {p.v, head, batch});
            if constexpr (cfg::tv) load_tile<rows, slabs_v>(maps.tv, to + At::tv_at, barrier, policy, row, {p.tv, head, batch});
        } else {
            load_tile<rows, slabs>(maps.q, to, barrier, policy, row, {p.q, head, batch});
            if constexpr (cfg::tq) load_tile<rows, slabs>(maps.tq, to + At::tx_at, barrier, policy, row, {p.tq, head, batch});
            load_tile<rows, slabs_v>(maps.dout, to + At::v_at, barrier, policy, row, {p.dout, head, batch});
            if constexpr (cfg::tdo) load_tile<rows, slabs_v>(maps.tdo, to + At::tv_at, barrier, policy, row, {p.tdo, head, batch});
        }
    }

    __device__ __forceinline__ void load_own() {
        if (!leader) return;
        ptx::mbarrier_arrive_expect(shared.own_raw(), OwnSide::bytes);
        load_side<keys_own, own_rows>(shared.own(), shared.own_raw(), ptx::evict_first, work.tile * own_rows, work.head);
    }

    __device__ __forceinline__ void load(const Step& step) {
        ptx::mbarrier_wait(shared.empty(slot.stage), slot.phase ^ 1);
        if (leader) {
            const u32 raw = shared.raw(slot.stage);
            shared.step(slot.stage) = step;  // told by the arrival that follows
            if (step.number < 0) {
                ptx::mbarrier_arrive(raw);
            } else {
                ptx::mbarrier_arrive_expect(raw, StreamSide::bytes + numbers_bytes);
                const i32 row = step.number * streamed;
                if constexpr (keys_own)
                    ptx::bulk_load(shared.address + numbers_at + slot.stage * numbers_bytes, numbers_of(p, work.batch * p.heads + step.head, row), numbers_bytes, raw);
                load_side<!keys_own, streamed>(shared.stage(slot.stage), raw, ptx::evict_last, row, keys_own ? step.head : step.head / p.group);
            }
        }
        slot.advance();
    }

    __device__ __forceinline__ void feed_keys() {
        __syncwarp();
        if (leader) {
            const i32 row = work.tile * cfg::block_m;
            MaskPlace place{{row, min(row + cfg::block_m, p.n_queries), work.tile}, 0, 0};
            place.set(mask_slices(p, work.batch, work.head));
            place.lowest = band_first(p, place.rows) / cfg::block_n;
            if (work.in_parts()) place.lowest = max(place.lowest, work.first_of(p.key_tiles));
            shared.place() = place;
        }
        __syncwarp();  // the place is known
        TileWalk walk(p, shared.place(), work.in_parts() ? work.first_of(p.key_tiles, 1) : p.key_tiles);
        for (Tile tile = walk.next(); tile.exists(); tile = walk.next()) load({tile.n(), work.head, tile.partial() ? Step::partial_bit : 0});
    }

    __device__ __forceinline__ void feed_rows(i32 head) {
        const MaskSlices slices = mask_slices(p, work.batch, head);
        __syncwarp();  // the last walk is done with
        if (leader) {
            describe_tables(shared.walk(), p, slices.instance, slices.blocks, work.tile);
            if (work.in_parts()) shared.walk().end = min(shared.walk().end, work.first_of(p.row_tiles, 1));
        }
        __syncwarp();  // the walk is described
        RowWalk walk(p, shared.walk());
        if (work.in_parts()) walk.tile = max(walk.tile, work.first_of(p.row_tiles) - 1);
        while (walk.next(p)) load({walk.tile, head, walk.partial(p) ? Step::partial_bit : 0});
    }

    __device__ __forceinline__ void run() {
        load_own();
        if constexpr (keys_own) {
            for (i32 member = 0; member < p.group; ++member) feed_rows(work.head * p.group + member);
        } else {
            feed_keys();
        }
        load({-1, 0, 0});
    }
};

// The cleaner: 0 * NaN must not reach a sum, so that rows that see nothing, and keys that no row sees, become zero.  Either lie in partial tiles,
// unless scores tell what is hidden.
struct Cleaner {
    const TangentParams& p;
    const Shared shared;
    const Work work;

    __device__ __forceinline__ bool lives(const Step& step, u32 stage, i32 row) const {
        if constexpr (keys_own) return shared.at<const float>(numbers_at + stage * numbers_bytes, exponent * streamed + row) != -infinity<float>();
        const i32 key = step.number * streamed + row;
        return key_lives(key, step.head) && (!cfg::bias || key >= p.n_keys || bias_shows(p, slice_of(p.bias, work.batch, step.head), key));
    }

    // Does some row of a head see the key?  Those beyond the last are zero already.
    __device__ __forceinline__ bool key_lives(i32 key, i32 head) const {
        if (key >= p.n_keys) return true;
        return band_sees(p, key) && (cfg::mask == kMaskNone || key_alive(p, slice_of(p.table, work.batch, head), key));
    }

    __device__ __forceinline__ void clear(u32 stage, u32 row) const {
        u8* tile = shared.memory + OwnSide::bytes + stage * stage_bytes;
        clear_row<streamed, slabs>(tile, row);
        if constexpr (StreamSide::moved) clear_row<streamed, slabs>(tile + StreamSide::tx_at, row);
        clear_row<streamed, slabs_v>(tile + StreamSide::v_at, row);
        if constexpr (StreamSide::moved_v) clear_row<streamed, slabs_v>(tile + StreamSide::tv_at, row);
    }

    // Keys that are hidden from every row, of all heads that share them, where they are factors of dQ.
    __device__ __forceinline__ void clear_own() const {
        const i32 first = threadIdx.x % 32;
        u32 alive = 0;  // found while the rows travel
        for (i32 member = 0; member < p.group; ++member)
            unroll<own_rows / 32>([&](int i) { alive |= static_cast<u32>(key_lives(work.tile * own_rows + first + 32 * i, work.head * p.group + member)) << i; });
        ptx::mbarrier_wait(shared.own_raw(), 0);
        unroll<own_rows / 32>([&](int i) {
            if (alive >> i & 1) return;
            clear_row<own_rows, slabs>(shared.memory, first + 32 * i);
            if constexpr (OwnSide::moved) clear_row<own_rows, slabs>(shared.memory + OwnSide::tx_at, first + 32 * i);
        });
        ptx::async_proxy_fence();
        release(shared.own_full());
    }

    __device__ __forceinline__ void run() const {
        if constexpr (one_pass) clear_own();
        for (Slot<cfg::stages> slot;; slot.advance()) {
            ptx::mbarrier_wait(shared.raw(slot.stage), slot.phase);
            const Step step = shared.step(slot.stage);
            if (step.number >= 0 && (told_by_scores || step.partial())) {
                for (u32 row = threadIdx.x % 32; row < streamed; row += 32)
                    if (!lives(step, slot.stage, row)) clear(slot.stage, row);
                ptx::async_proxy_fence();
            }
            release(shared.full(slot.stage));
            if (step.number < 0) return;
        }
    }
};

}  // namespace sm90::moved
