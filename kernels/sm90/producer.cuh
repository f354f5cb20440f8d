// The producer warp: walks the visible key tiles and keeps the copy engine busy.  All lanes walk, lane 0 issues.
#pragma once
#include "ptx/mbarrier.cuh"
#include "ptx/tma.cuh"
#include "sm90/work.cuh"

namespace sm90 {

constexpr bool may_have_dead_keys = cfg::mask != kMaskNone || cfg::band_left || cfg::band_right;

struct Maps {
    const ptx::TensorMap &q, &k, &v;
};

// What is constant while a row tile is worked on.
struct Sources {
    Place k, v;
    i64 instance;  // of the mask
};

struct Producer {
    const Params& p;
    const Maps& maps;
    const Shared shared;
    const bool leader;  // lane 0
    Slot<cfg::stages> k, v;
    Slot<cfg::q_stages> q;
    u32 raw_phase = 1;

    // Tiles are handed out in order by a ticket that returns to 0 by itself after the last one.  The leader alone has it.
    __device__ __forceinline__ i32 draw(i32 total) const {
        return leader ? gridDim.x + static_cast<i32>(atomicInc(reinterpret_cast<u32*>(p.counters), total - 1)) : 0;
    }

    // Loads the queries of the row tile that the ticket names, or announces that there is none.
    __device__ __forceinline__ Work announce(i32 ticket, i32 total) {
        const i32 number = __shfl_sync(~0u, ticket, 0);
        Work work{-1, 0, 0, 0};
        if (number < total) work = row_tile(p, number);
        const u32 full = shared.barrier(q_full + q.stage);
        ptx::mbarrier_wait(shared.barrier(q_empty + q.stage), q.phase ^ 1);
        if (leader) {
            shared.work(q.stage) = work;
            if (work.row < 0) {
                ptx::mbarrier_arrive(full);
            } else {
                ptx::mbarrier_arrive_expect(full, q_bytes);
                load_tile<cfg::block_m, slabs>(maps.q, shared.q(q.stage), full, ptx::evict_first, work.row,
                                               {p.q, work.head, work.batch});
            }
        }
        q.advance();
        return work;
    }

    __device__ __forceinline__ void load_keys(const Sources& from, KeyTile tile) {
        const u32 full = shared.barrier(k_full + k.stage);
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        if (leader) {
            shared.code(k.stage) = tile;
            const bool with_cols = cfg::mask == kMaskColumn && tile.partial();
            ptx::mbarrier_arrive_expect(full, k_bytes + (with_cols ? cols_bytes : 0));
            const i32 key = tile.n() * cfg::block_n;
            load_tile<cfg::block_n, slabs>(maps.k, shared.k(k.stage), full, ptx::evict_last, key, from.k);
            if (with_cols)
                ptx::bulk_load(shared.address + cols_at + k.stage * cols_bytes,
                               p.table.cols + from.instance * p.table.keys_padded + key, cols_bytes, full);
        }
        k.advance();
    }

    __device__ __forceinline__ void load_values(const Sources& from, KeyTile tile) {
        u32 full = shared.barrier(v_full + v.stage);
        ptx::mbarrier_wait(shared.barrier(v_empty + v.stage), v.phase ^ 1);
        if (may_have_dead_keys && tile.dead()) {
            // The bytes arrive at the cleaner, who passes the tile on.
            ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
            raw_phase ^= 1;
            full = shared.barrier(raw_full);
            if (leader) shared.mail() = {static_cast<i32>(v.stage), tile.n(), static_cast<i32>(from.instance)};
        }
        if (leader) {
            ptx::mbarrier_arrive_expect(full, v_bytes);
            const i32 key = tile.n() * cfg::block_n;
            load_tile<cfg::block_n, slabs_v>(maps.v, shared.v(v.stage), full, ptx::evict_last, key, from.v);
        }
        v.advance();
    }

    __device__ __forceinline__ void run();
};

__device__ __forceinline__ void Producer::run() {
    const i32 total = p.batch * p.heads * p.row_tiles;
    Work work = announce(blockIdx.x, total);
    while (work.row >= 0) {
        const i32 ticket = draw(total);  // on its way while this row tile is worked on
        Work next;
        bool asked = false;
        const MaskPlace place = mask_place(p, work);
        const i32 head = work.head / p.group;
        const Sources from{{p.k, head, work.batch}, {p.v, head, work.batch}, place.instance};
        TileWalk walk(p, place, p.key_tiles);
        KeyTile tile = next_key_tile(walk), before = KeyTile::none();
        // Rows that see nothing visit one tile all the same, and mask all of it: the consumers need no second path.
        if (!tile.exists()) tile = KeyTile::make(0, true, false);
        while (tile.exists()) {
            const KeyTile after = next_key_tile(walk);
            if (!after.exists()) tile.code |= KeyTile::last_bit;
            load_keys(from, tile);
            if (before.exists()) {  // v of a tile is needed one step after its k
                load_values(from, before);
                // The next queries are asked for when the first tiles of this row are on their way.
                if (cfg::q_stages > 1 && !asked) {
                    next = announce(ticket, total);
                    asked = true;
                }
            }
            before = tile;
            tile = after;
        }
        if (before.exists()) load_values(from, before);
        if (!asked) next = announce(ticket, total);
        work = next;
    }
    if (may_have_dead_keys) {
        ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
        if (leader) {
            shared.mail() = {-1, 0, 0};
            ptx::mbarrier_arrive(shared.barrier(raw_full));
        }
    }
}

// The cleaner warp: rows of v that belong to keys no query sees become zero, since 0 * NaN would reach the output.
__device__ __forceinline__ void clean(const Params& p, const Shared& shared) {
    const u32 lane = threadIdx.x % 32;
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(raw_full), phase);
        const Mail mail = shared.mail();
        if (mail.stage < 0) return;
        for (u32 row = lane; row < cfg::block_n; row += 32) {
            const i32 key = mail.n * cfg::block_n + row;
            if (key >= p.n_keys || (band_sees(p, key) && key_alive(p, mail.instance, key))) continue;
            clear_row<cfg::block_n, slabs_v>(shared.memory + v_at + mail.stage * v_bytes, row);
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(shared.barrier(v_full + mail.stage));
            ptx::mbarrier_arrive(shared.barrier(raw_empty));
        }
    }
}

}  // namespace sm90
