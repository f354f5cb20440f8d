// Which key tiles a block of the persistent grid works on, and which row tiles each of them visits.
#pragma once
#include "sm90/bwd_layout.cuh"

namespace sm90::bwd {

// Do key tiles add to dQ in a fixed order (sm90/bwd_reducer.cuh)?
constexpr bool in_order = cfg::deterministic && !by_function;

// In a section the key tiles with most work come first; neighbours share q, do and dq.
__device__ __forceinline__ Work key_tile(const Params& p, i32 number) {
    const TileRank place = rank_of(p, number, p.kv_heads, p.key_tiles);
    // Under causality the first keys are seen by most rows, without it (but with a window) the last.  A fixed order
    // is from the first to the last.
    const bool ascending = in_order || cfg::band_right || !cfg::band_left;
    return {ascending ? place.rank : p.key_tiles - 1 - place.rank, place.head, place.batch, 0};
}

// The visible row tiles of a key tile, over all query heads that share its keys.  All lanes of a warp take part; what is
// needed rarely lies in shared memory, a producer having few registers.
struct StepWalk {
    const Params& p;
    const Shared& shared;
    const Work& work;
    DirectedRowWalk<in_order> rows;
    i32 member = -1;

    __device__ __forceinline__ StepWalk(const Params& params, const Shared& memory, const Work& of)
        : p(params), shared(memory), work(of), rows(params, shared.walk()) {}

    __device__ __forceinline__ void enter_head() {
        const i32 head = work.head * p.group + member;
        const i64 offset = cfg::mask == kMaskBlock ? slice_of(p.mask, work.batch, head) : 0;
        const i64 instance = cfg::mask == kMaskColumn ? slice_of(p.table, work.batch, head) : 0;
        __syncwarp();  // the tables of the head before are no longer looked at
        if (threadIdx.x % 32 == 0) {
            const bool dead = describe_tables(shared.walk(), p, instance, offset, work.tile);
            // A key that no head sees is none that the first one sees.
            if (dead && member == 0) shared.pending().flags |= Work::dead_bit;
        }
        __syncwarp();  // the new ones are there
        rows.begin(p);
    }

    // Of a head that sees the key tile: the one before may still have a step to be loaded, whatever heads lie between them.
    __device__ __forceinline__ void note_head() {
        if (threadIdx.x % 32 == 0) {
            shared.pending().flags ^= Work::odd_bit;
            const i32 head = work.head * p.group + member;
            const i32 dq = static_cast<i32>(slice_of(p.dq, work.batch, head) / (static_cast<i64>(p.n_queries) * p.head_dim));
            shared.head(shared.pending().odd()) = {head, dq * p.row_tiles, work.batch * p.heads + head};
        }
        __syncwarp();  // all lanes may look
    }

    __device__ __forceinline__ StepCode next() {
        bool entered = false;
        while (member < 0 || !rows.next(p)) {
            if (++member == p.group) return StepCode::none();
            enter_head();
            entered = true;
        }
        if (entered) note_head();
        const bool odd = shared.pending().odd();
        StepCode step{rows.tile << 6 | (odd ? StepCode::odd_bit : 0) | (rows.partial(p) ? StepCode::partial_bit : 0)};
        const i32 flags = p.counters[shared.head(odd).flat * stat_groups(p) + rows.tile * cfg::block_m / kStatRows];
        if (may_have_empty_rows && flags & kEmptyRows) step.code |= StepCode::dirty_bit;
        if (flags & kFarRows) step.code |= StepCode::far_bit | StepCode::partial_bit;
        return step;
    }
};

}  // namespace sm90::bwd
