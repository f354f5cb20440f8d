// Two consumer warpgroups that share 64 keys and divide the work by function, for heads too wide to hold dK and dV in one:
// the weigher computes P and accumulates dV, the differentiator computes dS and accumulates dK.  P goes from the one to the
// other in float32, in the order of the registers, which is the same in both.
#pragma once
#include "sm90/bwd_worker.cuh"

namespace sm90::bwd {

// dK or dV through the buffer of k or v, which goes back when the gradient has left.
template <int slab_count, int n>
__device__ __forceinline__ void write_keys(const Worker& worker, const Work& work, const float (&x)[n], float factor,
                                               const ptx::TensorMap& map, void* gradient, i32 columns, u32 tile,
                                               int empty, u32 warpgroup) {
    const i32 first_key = work.tile * cfg::block_n + (by_function ? 0 : 64 * warpgroup);
    constexpr u32 stride = cfg::block_n * row_bytes;
    if constexpr (unrounded)
        write_gradient(x, factor, gradient, key_slice(worker.p, work), worker.p.n_keys, columns, first_key + fragment_row());
    else
        stage_gradient(x, factor, tile, stride);
    ptx::barrier_sync(store_barrier + warpgroup, 128);  // the gradient is staged, and nobody needs to know the key tile any more
    if (!unrounded && threadIdx.x % 128 == 0) {
        store_gradient<slab_count>(map, tile, stride, first_key, work.head, work.batch);
        ptx::bulk_wait_read<0>();
    }
    release_read(worker.shared.barrier(empty));
}

struct Weigher : Worker {
    Scores s;
    Fragments weights;
    ValueGradient dv;

    __device__ __forceinline__ void issue_s() {
        await_queries();
        compute_s(s, shared.k(0), shared.q(slot.stage));
        ptx::wgmma_commit();
    }

    // The buffer that P goes through.
    __device__ __forceinline__ u32 await_taken() const {
        ptx::mbarrier_wait(shared.barrier(taken + slot.stage), slot.phase ^ 1);
        return shared.handed_on(slot.stage);
    }

    // Line 13, and P to the differentiator.
    __device__ __forceinline__ void hand_on() {
        store_registers(await_taken(), s);
        release_read(shared.barrier(handed + slot.stage));
    }

    __device__ __forceinline__ void accumulate_steps() {
        issue_s();
        for (i32 before = -1;;) {
            load_bias(0);
            const Hidden hidden(*this, 0, uniform(step().partial()));
            const Draws draws = take_draws(0);
            const Numbers<slopes_apart ? 0 : cfg::block_m / 8> stat(numbers(stat_at));
            const u32 stage = slot.stage;
            const bool last = uniform(step().last());
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(s);
            if (before >= 0) release_read(shared.barrier(do_empty + before));
            find_weights<true>(s, weights, hidden, stat, draws, 0, 0, [&] { return await_taken(); });
            release_read(shared.barrier(q_empty + stage));
            hand_on();
            await_douts();
            accumulate(dv, weights, shared.dout(stage));  // line 16
            before = stage;
            slot.advance();
            if (last) break;
            issue_s();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dv);
        release_read(shared.barrier(do_empty + (slot.stage ^ 1)));
    }

    __device__ __forceinline__ void run(const Maps& maps) {
        for (; await_keys(); keys.advance()) {
            clear(dv);
            ptx::wgmma_pin(dv);  // before any product is under way
            if (uniform(work().seen())) accumulate_steps();
            write_keys<slabs_v>(*this, work(), dv, static_cast<float>(p.dropout_scale), maps.dv, key_gradient(p.dv, p.dv_acc), p.head_dim_v, shared.k(0),
                                    k_empty, 0);
        }
    }
};

struct Differentiator : Worker {
    using Delta = Numbers<cfg::block_m / 8>;
    Scores s, dp;
    Fragments ds;
    KeyGradient dk;

    __device__ __forceinline__ void issue_dp() {
        await_douts();
        compute_dp(dp, shared.v(), shared.dout(slot.stage));
    }

    // Line 20, with P from the weigher.
    __device__ __forceinline__ void gradients(const Delta& delta) {
        ptx::mbarrier_wait(shared.barrier(handed + slot.stage), slot.phase);
        load_registers(s, shared.handed_on(slot.stage));
        if constexpr (!cfg::keeps_ds) release_read(shared.barrier(taken + slot.stage));
        NoSums dbias;
        differentiate<false>(ds, ds, s, dp, delta, dbias);
        if constexpr (!cfg::keeps_ds) return;
        ptx::barrier_sync(store_barrier + 1, 128);  // all have read P, in whose place dS leaves
        store_gradients(ds, shared.handed_on(slot.stage));
    }

    // dS to memory, beside dK.
    __device__ __forceinline__ void keep(const Work& work) const {
        if constexpr (!cfg::keeps_ds) return;
        ptx::async_proxy_fence();
        ptx::barrier_sync(store_barrier + 1, 128);  // it is complete
        if (threadIdx.x % 128 != 0) return;
        ptx::bulk_store(kept_block(p, work.batch * p.heads + step().head, work.tile, step().m(), p.row_tiles), shared.handed_on(slot.stage), kBlockBytes);
        ptx::bulk_commit();
    }

    // The buffer goes back to the weigher, once dS has left it.
    __device__ __forceinline__ void give_back(u32 stage) const {
        if constexpr (!cfg::keeps_ds) return;
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
        release_read(shared.barrier(taken + stage));
    }

    __device__ __forceinline__ void accumulate_steps(const Work& work) {
        issue_dp();
        for (i32 before = -1;;) {
            const u32 stage = slot.stage;
            const bool last = uniform(step().last());
            const Delta delta(numbers(delta_at));
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(dp);
            if (before >= 0) {
                release_read(shared.barrier(q_empty + before));
                give_back(before);
            }
            gradients(delta);
            release_read(shared.barrier(do_empty + stage));
            await_queries();
            accumulate(dk, ds, shared.q(stage));  // line 22
            keep(work);
            before = stage;
            slot.advance();
            if (last) break;
            issue_dp();
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        release_read(shared.barrier(q_empty + (slot.stage ^ 1)));
        give_back(slot.stage ^ 1);
    }

    __device__ __forceinline__ void run(const Maps& maps) {
        for (; await_keys(); keys.advance()) {
            const Work work = this->work();  // the weigher may be done with it before
            release_read(shared.barrier(k_empty));
            await_values();
            clear(dk);
            ptx::wgmma_pin(dk);  // before any product is under way
            if (uniform(work.seen())) accumulate_steps(work);
            write_keys<slabs>(*this, work, dk, static_cast<float>(p.scale * p.dropout_scale), maps.dk, key_gradient(p.dk, p.dk_acc), p.head_dim, shared.v(),
                                  v_empty, 1);
        }
    }
};

}  // namespace sm90::bwd
