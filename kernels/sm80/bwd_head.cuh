// What the backward kernels look up of one query head.
#pragma once
#include "attn/math.cuh"
#include "attn/params.cuh"
#include "attn/philox.cuh"
#include "attn/row_walk.cuh"
#include "sm80/bwd_layout.cuh"
#include "attn/bwd_workspace.cuh"

namespace sm80 {

// The part of the problem that one query head sees; in shared memory, registers being short.
struct Head {
    const Elem *q, *k, *v, *dout;
    const Acc *stat, *delta, *inverse;  // (padded rows)
    const Acc* m;             // as the forward left it
    Acc* dq_acc;              // this head's accumulator, in the order of add_queries
    i64 bias;                 // offset of this head's slice
    MaskSlices mask;
    RandomStream random;
    WalkTables walk;
    const i32* row_flags;     // of this head, by kStatRows rows
    bool has_empty_rows;      // does any of its rows see nothing?
    bool has_far_rows;        // see is_far_row
};

// See backward_preprocess: no p of such a row is above 0.
__device__ __forceinline__ bool is_empty_row(Acc stat) { return stat == (split_stat ? infinity<Acc>() : -infinity<Acc>()); }

// What the flags of all groups of the head's rows say together.
__device__ __forceinline__ i32 row_flags(const Params& p, i64 flat) {
    i32 flags = 0;
    for (i32 group = threadIdx.x; group < stat_groups(p); group += threads) flags |= p.counters[flat * stat_groups(p) + group];
    return all_flags(flags & kEmptyRows, flags & kFarRows);
}

// Fills in what a block needs of one query head; thread 0 writes, the block must synchronise before it reads.
__device__ __forceinline__ void describe_head(Head& h, const Params& p, i32 ib, i32 head) {
    const i64 flat = i64(ib) * p.heads + head;
    const i32 flags = row_flags(p, flat);
    if (threadIdx.x != 0) return;
    h.has_empty_rows = flags & kEmptyRows;
    h.has_far_rows = flags & kFarRows;
    h.row_flags = p.counters + flat * stat_groups(p);
    const BatchIndex index = batch_index(p, ib);
    h.q = static_cast<const Elem*>(p.q.data) + slice_offset(p.q, index, head);
    h.dout = static_cast<const Elem*>(p.dout.data) + slice_offset(p.dout, index, head);
    h.k = static_cast<const Elem*>(p.k.data) + slice_offset(p.k, index, head / p.group);
    h.v = static_cast<const Elem*>(p.v.data) + slice_offset(p.v, index, head / p.group);
    h.stat = static_cast<const Acc*>(p.stat) + stat_row(p, flat, 0);
    if constexpr (split_stat) h.inverse = h.stat + i64(p.batch) * p.heads * stat_groups(p) * kStatRows;
    h.delta = static_cast<const Acc*>(p.delta) + stat_row(p, flat, 0);
    if constexpr (!split_stat) h.m = static_cast<const Acc*>(p.m.data) + slice_offset(p.m, index, head);
    if constexpr (cfg::atomic_dq) {
        const i64 instance = slice_offset(p.dq, index, head) / (i64(p.n_queries) * p.head_dim);
        h.dq_acc = static_cast<Acc*>(p.dq_acc) + instance * p.row_tiles * cfg::block_m * cfg::head_dim;
    }
    if constexpr (cfg::bias) h.bias = slice_offset(p.bias, index, head);
    h.mask = MaskSlices::of(p, index, head);
    if constexpr (cfg::dropout) h.random = random_stream(p.dropout, ib, head);
}

// The same for its walk over the row tiles that see one key tile; called by thread 0.
__device__ __forceinline__ void describe_walk(Head& head, const Params& p, i32 key_tile) {
    describe_tables(head.walk, p, head.mask.instance, head.mask.blocks, key_tile);
}

// Where one row tile walks over key tiles; called by thread 0, which has described the head.
__device__ __forceinline__ void describe_rows(MaskPlace& place, const Params& p, const Head& head, i32 row_tile) {
    const i32 first = row_tile * cfg::block_m;
    place.rows = {first, min(first + cfg::block_m, p.n_queries), row_tile};
    place.lowest = band_first(p, place.rows) / cfg::block_n;
    place.set(head.mask);
}

}  // namespace sm80
