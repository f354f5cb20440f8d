// The block that is the last to finish its part of a row tile's keys merges all parts: no second kernel, and the parts are still in the cache.
//
// Which block that is differs from run to run; what it adds up, and in which order, does not.
#pragma once
#include "sm80/config.cuh"
#include "attn/merge.cuh"

// Whether the other blocks of this row tile are done, and what they wrote to memory may be read.  The row tile's counter goes
// back to 0 by itself.  All threads of the block call this after their last store.
__device__ __forceinline__ bool last_of_parts(const Params& p) {
    __shared__ bool last;
    __threadfence();  // what this thread stored comes before the count
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 top = gridDim.y - 1;
        last = atomicInc(reinterpret_cast<u32*>(p.counters) + blockIdx.x, top) == top;
    }
    __syncthreads();
    __threadfence();  // and the count before what is read
    return last;
}

// Adds up one row of o over all parts, a warp together; `row` counts the rows of o, l and m.
template <class Acc>
__device__ __forceinline__ void merge_row(const Params& p, i64 row) {
    constexpr int held = (cfg::head_dim_v + 31) / 32;
    const int lane = threadIdx.x % 32;
    const i64 rows = static_cast<i64>(p.batch) * p.heads * p.n_queries;  // of a part
    // Other multiprocessors wrote the parts: they are read past this one's cache.
    const Shares<Acc> shares(
        p.splits, [&](int part) { return __ldcg(static_cast<const Acc*>(p.l_part) + part * rows + row); },
        [&](int part) { return __ldcg(static_cast<const Acc*>(p.m_part) + part * rows + row); });
    Acc sum[held] = {};
    const Acc* o = static_cast<const Acc*>(p.o_part) + row * p.head_dim_v + lane;
#pragma unroll 8
    for (i32 part = 0; part < p.splits; ++part) {
        const Acc w = shares[part];
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const Acc x = lane + 32 * i < p.head_dim_v ? __ldcg(o + 32 * i) : Acc(0);
            sum[i] += w == Acc(0) ? Acc(0) : product_of(w, x);
        }
        o += rows * p.head_dim_v;
    }
#pragma unroll
    for (int i = 0; i < held; ++i) {
        if (lane + 32 * i < p.head_dim_v) static_cast<cfg::out*>(p.o.data)[row * p.head_dim_v + lane + 32 * i] = round_to<cfg::out>(sum[i]);
    }
    if (cfg::statistics && lane == 0) static_cast<Acc*>(p.l.data)[row] = shares.l, static_cast<Acc*>(p.m.data)[row] = shares.m;
}
