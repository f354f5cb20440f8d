// The reducers: two warps that take every other row tile and add its dQ to the accumulator in global memory.  While one waits for
// its addition to complete, where the next key tile must know, the other already waits for its place in the order.
//
// The accumulator is [instance of q][row tile][warpgroup][part], a part in the order of the registers that computed it
// (sm90/bwd_consumer.cuh); kernels/sm90/bwd_convert.cu turns it into rows.
//
// In a fixed order key tiles add to each row tile from the first to the last.  In that order they are also handed out, to blocks that
// run, so that the one that comes next has always begun.  All go down the rows from the last, where under causality, too, all begin,
// those with most work first: who follows another stays behind it and rarely waits.
#pragma once
#include "attn/row_walk.cuh"
#include "ptx/global.cuh"
#include "ptx/barrier.cuh"
#include "sm90/bwd_diagonals.cuh"
#include "sm90/bwd_producer.cuh"

namespace sm90::bwd {

// The first key tile that the band lets see a row tile.
__device__ __forceinline__ i32 first_key_tile(const Params& p, i32 m) {
    if constexpr (!cfg::band_left) return 0;
    const i64 first_key = static_cast<i64>(m) * cfg::block_m - p.band_left;
    return first_key > 0 ? static_cast<i32>(first_key / cfg::block_n) : 0;
}

// Do the masks show the row tile some key of key tile n?  As RowWalk has it.
__device__ __forceinline__ bool adds_to(const Params& p, const DqPlace& place, i32 n) {
    bool seen = true;
    if constexpr (stated_mask) seen = tile_state(p, slice_of(p.table, place.batch, place.head), place.m, n) & kSomeSeen;
    if constexpr (column_masks > 0) {
        const int4* bounds = p.table.bounds + (slice_of(p.table, place.batch, place.head) * p.key_tiles + n) * 2;
        const int4 a = __ldg(bounds), b = __ldg(bounds + 1);
        seen = seen && !(place.m >= (a.x & ~kDeadTile) && place.m < a.y) && !(place.m >= b.x && place.m < b.y);
    }
    if constexpr (block_mask) {
        WalkTables tables;
        describe_tables(tables, p, slice_of(p.table, place.batch, place.head), slice_of(p.mask, place.batch, place.head), n);
        seen = RowWalk(p, tables).template block_state<false>(p, place.m);
    }
    return seen;
}

// A key tile's place in a row tile's sum: it has come when the flag holds one more than the number of the key tile before, or 0.
struct OrderedSum {
    i32* flag;
    i32 before, own;

    // All lanes of a warp take part.
    __device__ __forceinline__ OrderedSum(const Params& p, const DqPlace& place) : flag(p.turns + place.tile), before(0), own(place.n + 1) {
        const i32 first = first_key_tile(p, place.m);
        if constexpr (cfg::mask == kMaskNone) {
            if (place.n > first) before = place.n;
        } else {
            for (i32 last = place.n - 1; last >= first && !before; last -= 32) {
                const i32 n = last - threadIdx.x % 32;
                const u32 takers = __ballot_sync(~0u, n >= first && adds_to(p, place, n));
                if (takers) before = last - __ffs(takers) + 2;
            }
        }
    }

    __device__ __forceinline__ void await() const {
        while (ptx::load_acquire(flag) != before) {}
        ptx::proxy_fence();
    }

    // On to the next, once the sum itself, not only its source, is done with.
    __device__ __forceinline__ void release() const {
        ptx::bulk_wait<0>();
        ptx::proxy_fence();
        ptx::store_release(flag, own);
    }
};

// Nobody waits.
struct UnorderedSum {
    __device__ __forceinline__ UnorderedSum(const Params&, const DqPlace&) {}
    __device__ __forceinline__ void await() const {}
    __device__ __forceinline__ void release() const {}
};

__device__ __forceinline__ void reduce(const Params& p, const Shared& shared, u32 stage) {
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(foretold + stage), phase);
        const DqPlace place = shared.dq_place(stage);
        if (uniform(place.tile < 0)) return;
        const typename Either<in_order, OrderedSum, UnorderedSum>::type sum(p, place);
        __syncwarp();  // all lanes know the place
        if (threadIdx.x % 32 == 0) {
            sum.await();  // while dQ is being computed
            ptx::mbarrier_wait(shared.barrier(handed + stage), phase);
            if constexpr (reducer_fences) ptx::async_proxy_fence();
            ptx::bulk_add(static_cast<float*>(p.dq_acc) + static_cast<i64>(place.tile) * (dq_bytes / 4), shared.handed_on(0), dq_bytes);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
            ptx::mbarrier_arrive(shared.barrier(taken));
            sum.release();
        }
        if constexpr (sums_diagonals) {
            __syncwarp();  // all lanes know that dS is there
            add_diagonals(p, shared, stage, place);
        }
    }
}

}  // namespace sm90::bwd
