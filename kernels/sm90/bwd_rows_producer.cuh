// The producer warp of the row kernel: walks the visible key tiles of a row tile and keeps the copy engine busy.  All lanes
// walk, lane 0 issues.  Also the cleaner warp.
#pragma once
#include "ptx/barrier.cuh"
#include "attn/bwd_workspace.cuh"
#include "attn/score.cuh"
#include "sm90/bwd_rows_layout.cuh"
#include "sm90/hidden.cuh"

namespace sm90::rows {

struct Maps {
    const ptx::TensorMap &q, &k, &v, &dout, &dq;
};

// In a section the row tiles with most work come first; neighbours share k and v.
__device__ __forceinline__ Work row_tile(const Params& p, i32 number) {
    const TileRank place = rank_of(p, number, p.heads, p.row_tiles);
    i32 tile = p.row_tiles - 1 - place.rank;
    if constexpr (column_masks > 0 || stated_mask) {
        if (p.table.order != nullptr) tile = p.table.order[slice_of(p.table, place.batch, place.head) * p.row_tiles + place.rank].tile;
    }
    return {tile, place.head, place.batch, 0};
}

struct Producer {
    const Params& p;
    const Maps& maps;
    const Shared shared;
    const bool leader;  // lane 0
    Slot<cfg::stages> k;
    Slot<cfg::v_stages> v;
    u32 rows_phase = 1, raw_phase = 1;

    // Row tiles are handed out in order by a ticket that starts at 0, the second of two.
    __device__ __forceinline__ i32 draw() const {
        return __shfl_sync(~0u, leader ? gridDim.x + atomicAdd(p.ticket + 1, 1) : 0, 0);
    }

    __device__ __forceinline__ void load_rows(const Work& work) {
        ptx::mbarrier_wait(shared.barrier(rows_empty), rows_phase);
        rows_phase ^= 1;
        if (!leader) return;
        const u32 full = shared.barrier(rows_full);
        const i32 row = work.tile * cfg::block_m;
        shared.work() = work;
        const i64 at = stat_row(p, work.batch * p.heads + work.head, row);
        ptx::mbarrier_arrive_expect(full, q_bytes + do_bytes + 2 * numbers_bytes);
        ptx::bulk_load(shared.address + stat_at, static_cast<const float*>(p.stat) + at, numbers_bytes, full);
        ptx::bulk_load(shared.address + delta_at, static_cast<const float*>(p.delta) + at, numbers_bytes, full);
        load_tile<cfg::block_m, slabs>(maps.q, shared.q(), full, ptx::evict_first, row, {p.q, work.head, work.batch});
        load_tile<cfg::block_m, slabs_v>(maps.dout, shared.dout(), full, ptx::evict_first, row, {p.dout, work.head, work.batch});
    }

    // Tiles with keys that no row sees go through the cleaner.
    __device__ __forceinline__ void load_keys(const Work& work, Step step, bool dead, i64 instance) {
        const i32 head = work.head / p.group, key = step.n() * cfg::block_n;
        u32 full = shared.barrier(k_full + k.stage), full_v = shared.barrier(v_full + v.stage);
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        if (leader) shared.step(k.stage) = step;
        if (may_hide_keys && dead) {
            ptx::mbarrier_wait(shared.barrier(v_empty + v.stage), v.phase ^ 1);
            ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
            raw_phase ^= 1;
            full = full_v = shared.barrier(raw_full);
            if (leader) {
                shared.mail() = {static_cast<i32>(k.stage), static_cast<i32>(v.stage), step.n(), instance};
                ptx::mbarrier_arrive_expect(full, k_bytes + v_bytes);
            }
        } else if (leader) {
            ptx::mbarrier_arrive_expect(full, k_bytes);
        }
        if (leader) load_tile<cfg::block_n, slabs>(maps.k, shared.k(k.stage), full, ptx::evict_last, key, {p.k, head, work.batch});
        if (!(may_hide_keys && dead)) {
            ptx::mbarrier_wait(shared.barrier(v_empty + v.stage), v.phase ^ 1);
            if (leader) ptx::mbarrier_arrive_expect(full_v, v_bytes);
        }
        if (leader) load_tile<cfg::block_n, slabs_v>(maps.v, shared.v(v.stage), full_v, ptx::evict_last, key, {p.v, head, work.batch});
        k.advance();
        v.advance();
    }

    // Where the row tile's masks lie, kept in shared memory.
    __device__ __forceinline__ const MaskPlace& describe(const Work& work) {
        const i32 row = work.tile * cfg::block_m;
        __syncwarp();  // the row tile before is no longer looked at
        if (leader) {
            MaskPlace place{{row, min(row + cfg::block_m, p.n_queries), work.tile}, 0, 0};
            place.lowest = band_first(p, place.rows) / cfg::block_n;
            if constexpr (cfg::mask != kMaskNone) place.instance = slice_of(p.table, work.batch, work.head);
            if constexpr (block_mask) place.offset = slice_of(p.mask, work.batch, work.head);
            shared.place() = place;
        }
        __syncwarp();  // the place is known
        return shared.place();
    }

    // Does the bias hide some key of the tile, as far as this lane looks?
    __device__ __forceinline__ bool bias_hides(const Work& work, i32 n) const {
        bool hides = false;
        for (i32 key = threadIdx.x % 32; key < cfg::block_n; key += 32)
            hides |= !bias_shows(p, slice_of(p.bias, work.batch, work.head), n * cfg::block_n + key);
        return hides;
    }

    __device__ __forceinline__ void feed(Work work) {
        const MaskPlace& place = describe(work);
        TileWalk walk(p, place, p.key_tiles);
        Tile tile = walk.next();
        work.steps = tile.exists();
        load_rows(work);
        const i32 flags = p.counters[(work.batch * p.heads + work.head) * stat_groups(p) + work.tile * cfg::block_m / kStatRows];
        const i32 far = flags & kFarRows ? Step::far_bit | Step::partial_bit : 0;
        while (tile.exists()) {
            const Tile after = walk.next();
            const Step step{tile.n() << 3 | far | (after.exists() ? 0 : Step::last_bit) | (tile.partial() ? Step::partial_bit : 0)};
            if constexpr (cfg::bias_keys)
                load_keys(work, step, uniform(tile.dead() || band_hides(p, tile.n()) || bias_hides(work, tile.n())),
                          static_cast<i64>(work.batch * p.heads + work.head) << 32 | place.instance);
            else
                load_keys(work, step, uniform(tile.dead() || band_hides(p, tile.n())), place.instance);
            tile = after;
        }
    }

    __device__ __forceinline__ void run() {
        const i32 total = p.batch * p.heads * p.row_tiles;
        for (i32 number = blockIdx.x; number < total; number = draw()) feed(row_tile(p, number));
        ptx::mbarrier_wait(shared.barrier(rows_empty), rows_phase);
        if (leader) {
            shared.work() = {-1, 0, 0, 0};
            ptx::mbarrier_arrive(shared.barrier(rows_full));
        }
        if (may_hide_keys) {
            ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
            if (leader) {
                shared.mail().k_stage = -1;
                ptx::mbarrier_arrive(shared.barrier(raw_full));
            }
        }
    }
};

// Do masks and a bias show the key?
__device__ __forceinline__ bool key_lives(const Params& p, i64 instance, i32 key) {
    if constexpr (!cfg::bias_keys) {
        return key_alive(p, instance, key);
    } else {
        const i32 flat = instance >> 32, batch = flat / p.heads;
        return key_alive(p, static_cast<i32>(instance), key) && bias_shows(p, slice_of(p.bias, batch, flat - batch * p.heads), key);
    }
}

// The cleaner: 0 * NaN must not reach dQ, so that keys no row sees become zero.
__device__ __forceinline__ void clean(const Params& p, const Shared& shared) {
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(raw_full), phase);
        const Mail mail = shared.mail();
        if (mail.k_stage < 0) return;
        for (u32 row = threadIdx.x % 32; row < cfg::block_n; row += 32) {
            const i32 key = mail.n * cfg::block_n + row;
            if (key >= p.n_keys || (band_sees(p, key) && key_lives(p, mail.instance, key))) continue;
            clear_row<cfg::block_n, slabs>(shared.memory + k_at + mail.k_stage * k_bytes, row);
            clear_row<cfg::block_n, slabs_v>(shared.memory + v_at + mail.v_stage * v_bytes, row);
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            ptx::mbarrier_arrive(shared.barrier(k_full + mail.k_stage));
            ptx::mbarrier_arrive(shared.barrier(v_full + mail.v_stage));
        }
        ptx::mbarrier_arrive(shared.barrier(raw_empty));  // each lane for itself
    }
}

}  // namespace sm90::rows
