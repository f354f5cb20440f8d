// A consumer warpgroup of the row kernel: dQ of 64 query rows, over all key tiles that they see, in descending order.
#pragma once
#include "sm90/bwd_row_scores.cuh"
#include "sm90/bwd_rows_producer.cuh"
#include "sm90/gradients.cuh"

namespace sm90::rows {

constexpr u32 store_barrier = 1;            // + warpgroup

using Fragments = u32[cfg::block_n / 16][4]; // dS of 64 queries x block_n keys, rounded
using QueryGradient = float[cfg::head_dim / 2];

struct Consumer : RowScores<Consumer> {
    static constexpr bool takes_slopes = true;
    const ptx::TensorMap& dq_map;
    const Shared shared;
    const u32 warpgroup;
    Slot<cfg::stages> k;
    Slot<cfg::v_stages> v;
    u32 rows_phase = 0;
    // Byte offset of this warpgroup's rows in the slabs of q and do.  It grows by 0 with every step, which the compiler does not
    // know: it would otherwise compute all descriptors ahead, for which there are no registers.
    u32 row_offset;
    Fragments ds;
    QueryGradient dq;

    __device__ __forceinline__ const Work& work() const { return shared.work(); }
    __device__ __forceinline__ i32 own_row() const {
        return shared.work().tile * cfg::block_m + 64 * warpgroup + fragment_row();
    }

    // stat or delta of the thread's two rows, for all key tiles: beside products a load waits for hundreds of clocks.
    __device__ __forceinline__ float2 own_numbers(const float* numbers) const {
        const float* own = numbers + 64 * warpgroup + fragment_row();
        return make_float2(own[0], own[8]);
    }

    __device__ __forceinline__ void issue_s() {
        ptx::mbarrier_wait(shared.barrier(k_full + k.stage), k.phase);
        ptx::wgmma_fence();
        multiply_rows<cfg::head_dim, cfg::block_m, cfg::block_n, sign>(s, shared.q() + row_offset, shared.k(k.stage));
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void issue_dp() {
        ptx::mbarrier_wait(shared.barrier(v_full + v.stage), v.phase);
        ptx::wgmma_fence();
        multiply_rows<cfg::head_dim_v, cfg::block_m, cfg::block_n, 1>(dp, shared.dout() + row_offset, shared.v(v.stage));
        ptx::wgmma_commit();
    }

    // Lines 18 and 20, rounded.
    __device__ __forceinline__ void round_gradients() {
        differentiate<may_hide_rows>();
#pragma unroll
        for (int i = 0; i < cfg::block_n / 2; i += 2) ds[i / 8][i / 2 % 4] = pack(s[i], s[i + 1]);
    }

    __device__ __forceinline__ void accumulate_steps() {
        row_offset = 64 * warpgroup * row_bytes;
        stat = own_numbers(shared.stat());
        delta = own_numbers(shared.delta());
        issue_s();
        issue_dp();
        for (i32 before = -1;;) {
            const u32 stage = k.stage;
            const Step step = shared.step(stage);
            const bool last = uniform(step.last());
            ptx::wgmma_wait<1>();
            ptx::wgmma_pin(s);
            if (before >= 0) release_read(shared.barrier(k_empty + before));
            weigh(step);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dp);
            release(shared.barrier(v_empty + v.stage));
            v.advance();
            round_gradients();
            ptx::wgmma_fence();
            // Line 21, key by key from the last, as tiles are walked: how many keys a tile has changes no bit.
            accumulate_rows<cfg::block_n, true>(dq, ds, shared.k(stage));
            ptx::wgmma_commit();
            before = stage;
            k.advance();
            row_offset += p.splits;
            if (last) break;
            issue_s();
            issue_dp();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dq);
        release_read(shared.barrier(k_empty + (k.stage ^ 1)));
    }

    // Line 21, done: dQ leaves through this warpgroup's rows of q.
    __device__ __forceinline__ void write() {
        const Work& work = shared.work();
        const float factor = static_cast<float>(p.scale * p.dropout_scale);
        const u32 staged = shared.q() + 64 * warpgroup * row_bytes;
        if constexpr (unrounded)
            write_gradient(dq, factor, p.dq.data, work.batch * p.heads + work.head, p.n_queries, p.head_dim, own_row());
        else
            stage_gradient(dq, factor, staged, cfg::block_m * row_bytes);
        ptx::barrier_sync(store_barrier + warpgroup, 128);  // dQ is staged, and nobody needs to know the row tile any more
        if (threadIdx.x % 128 != 0) return;
        if constexpr (!unrounded) {
            store_gradient<slabs>(dq_map, staged, cfg::block_m * row_bytes, work.tile * cfg::block_m + 64 * warpgroup, work.head, work.batch);
            ptx::bulk_wait_read<0>();
        }
        ptx::mbarrier_arrive(shared.barrier(rows_empty));
    }

    __device__ __forceinline__ void run() {
        for (;; rows_phase ^= 1) {
            ptx::mbarrier_wait(shared.barrier(rows_full), rows_phase);
            if (uniform(shared.work().tile < 0)) break;
            unroll<cfg::head_dim / 2>([&](int i) { dq[i] = 0.0f; });
            ptx::wgmma_pin(dq);  // before any product is under way
            if (uniform(shared.work().steps)) accumulate_steps();
            write();
        }
    }
};

}  // namespace sm90::rows
