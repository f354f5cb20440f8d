// A reducer warp per consumer warpgroup: adds the warpgroup's part of dQ to the accumulator in global memory.
//
// The accumulator is [instance of q][row tile][warpgroup][part], a part in the order of the registers that computed it
// (sm90/bwd_consumer.cuh); kernels/sm90/bwd_convert.cu turns it into rows.
//
// In a fixed order: key tiles take turns in descending order, in which they are also handed out, so that the one whose turn
// it is has always begun.  Under causality the last key tile that sees a row is the first to come to it, and nobody waits.
#pragma once
#include "attn/row_walk.cuh"
#include "ptx/flag.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/bwd_layout.cuh"

namespace sm90 {

// The last key tile that the band lets see a row tile.
__device__ __forceinline__ i32 last_key_tile(const Params& p, i32 m) {
    if constexpr (!cfg::band_right) return p.key_tiles - 1;
    const i64 last_key = static_cast<i64>(m + 1) * cfg::block_m - 1 + p.band_offset + p.band_right;
    return static_cast<i32>(min(last_key, static_cast<i64>(p.n_keys - 1))) / cfg::block_n;
}

// Does the mask show the row tile some key of key tile n?  As RowWalk has it.
__device__ __forceinline__ bool takes_turn(const Params& p, const DqPart& part, i32 n) {
    if constexpr (cfg::mask == kMaskColumn) {
        const int4* bounds = p.table.bounds + (slice_of(p.table, part.batch, part.head) * p.key_tiles + n) * 2;
        const int4 a = __ldg(bounds), b = __ldg(bounds + 1);
        return !(part.m >= (a.x & ~kDeadTile) && part.m < a.y) && !(part.m >= b.x && part.m < b.y);
    } else {
        WalkTables tables;
        describe_tables(tables, p, 0, slice_of(p.mask, part.batch, part.head), n);
        return RowWalk(p, tables).template block_state<false>(p, part.m);
    }
}

// How many key tiles add to the row tile before this one.
__device__ __forceinline__ i32 turn_of(const Params& p, const DqPart& part) {
    const i32 last = last_key_tile(p, part.m);
    if constexpr (cfg::mask == kMaskNone) return last - part.n;
    i32 turn = 0;
    for (i32 first = part.n + 1; first <= last; first += 32) {
        const i32 n = first + threadIdx.x % 32;
        turn += __popc(__ballot_sync(~0u, n <= last && takes_turn(p, part, n)));
    }
    return turn;
}

__device__ __forceinline__ void reduce(const Params& p, const Shared& shared, u32 warpgroup) {
    const bool leader = threadIdx.x % 32 == 0;
    for (Slot<2> slot;; slot.advance()) {
        ptx::mbarrier_wait(shared.barrier(foretold + 2 * warpgroup + slot.stage), slot.phase);
        DqPart& part = shared.dq_part(warpgroup, slot.stage);
        if (uniform(part.tile < 0)) return;
        if constexpr (cfg::deterministic) {  // while dQ is being computed
            const i32 turn = turn_of(p, part);
            if (leader) part.turn = turn;
        }
        ptx::mbarrier_wait(shared.barrier(handed + warpgroup), slot.stage);
        if (leader) {
            const i64 number = static_cast<i64>(part.tile) * warpgroups + warpgroup;
            if constexpr (cfg::deterministic) {
                while (ptx::load_acquire(p.turns + number) != part.turn) {}
                ptx::proxy_fence();
            }
            ptx::bulk_add(static_cast<float*>(p.dq_acc) + number * (dq_part_bytes / 4), shared.handed_on(warpgroup), dq_part_bytes);
            ptx::bulk_commit();
            if constexpr (cfg::deterministic) {
                ptx::bulk_wait<0>();  // the sum itself, not only its source, is done with
                ptx::proxy_fence();
                ptx::add_release(p.turns + number, 1);
            } else {
                ptx::bulk_wait_read<0>();
            }
            ptx::mbarrier_arrive(shared.barrier(taken + warpgroup));
        }
    }
}

}  // namespace sm90
