// dQ in a fixed order: key tiles take turns at each row tile, from the first to the last.
//
// In that order they are also handed out, so that the one whose turn it is has always begun.  All go down the rows from the last,
// where under causality, too, all begin, those with most work first: who follows another stays behind it and rarely waits.
#pragma once
#include "attn/row_walk.cuh"
#include "ptx/flag.cuh"
#include "sm90/bwd_work.cuh"

namespace sm90 {

// The first key tile that the band lets see a row tile.
__device__ __forceinline__ i32 first_key_tile(const Params& p, i32 m) {
    if constexpr (!cfg::band_left) return 0;
    const i64 first_key = static_cast<i64>(m) * cfg::block_m - p.band_left;
    return first_key > 0 ? static_cast<i32>(first_key / cfg::block_n) : 0;
}

// Does the mask show the row tile some key of key tile n?  As RowWalk has it.
__device__ __forceinline__ bool takes_turn(const Params& p, const DqPlace& place, i32 n) {
    if constexpr (cfg::mask == kMaskColumn) {
        const int4* bounds = p.table.bounds + (slice_of(p.table, place.batch, place.head) * p.key_tiles + n) * 2;
        const int4 a = __ldg(bounds), b = __ldg(bounds + 1);
        return !(place.m >= (a.x & ~kDeadTile) && place.m < a.y) && !(place.m >= b.x && place.m < b.y);
    } else {
        WalkTables tables;
        describe_tables(tables, p, 0, slice_of(p.mask, place.batch, place.head), n);
        return RowWalk(p, tables).template block_state<false>(p, place.m);
    }
}

// A turn at a row tile: it has come when the flag holds one more than the number of the key tile before, or 0.
struct Turn {
    i32* flag;
    i32 before, own;

    // All lanes of a warp take part.
    __device__ __forceinline__ Turn(const Params& p, const DqPlace& place) : flag(p.turns + place.tile), before(0), own(place.n + 1) {
        const i32 first = first_key_tile(p, place.m);
        if constexpr (cfg::mask == kMaskNone) {
            if (place.n > first) before = place.n;
        } else {
            for (i32 last = place.n - 1; last >= first && !before; last -= 32) {
                const i32 n = last - threadIdx.x % 32;
                const u32 takers = __ballot_sync(~0u, n >= first && takes_turn(p, place, n));
                if (takers) before = last - __ffs(takers) + 2;
            }
        }
    }

    __device__ __forceinline__ void await() const {
        while (ptx::load_acquire(flag) != before) {}
        ptx::proxy_fence();
    }

    // To the next, once the sum itself, not only its source, is done with.
    __device__ __forceinline__ void pass_on() const {
        ptx::bulk_wait<0>();
        ptx::proxy_fence();
        ptx::store_release(flag, own);
    }
};

// Nobody waits.
struct NoTurn {
    __device__ __forceinline__ NoTurn(const Params&, const DqPlace&) {}
    __device__ __forceinline__ void await() const {}
    __device__ __forceinline__ void pass_on() const {}
};

}  // namespace sm90
