// Two consumer warpgroups that share 64 keys and divide the work by function, for heads too wide to hold dK and dV in one:
// the weigher computes P and accumulates dV, the differentiator computes dS and accumulates dK.  P goes from the one to the
// other in float32, in the order of the registers, which is the same in both.
//
// Scores of a row tile are computed before dV of the one before, so that the exponentials run beside it; dK comes before dP, so that its q goes
// back early.  What is under way at a loop's end would be waited for product by product (C7514): each turn begins and ends with none.
#pragma once
#include "sm90/bwd_kept.cuh"
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
        write_gradient<adds_parts>(x, factor, gradient, key_slice(worker.p, work), worker.p.n_keys, columns, first_key + fragment_row());
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
    bool last;  // row tile of the key tile

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

    // Line 13, and P to the differentiator, beside what is still under way then.
    template <int under_way>
    __device__ __forceinline__ void probabilities() {
        last = uniform(step().last());
        load_bias(0);
        const Hidden hidden(*this, 0, uniform(step().partial()));
        const Draws draws = take_draws(0);
        const Numbers<slopes_apart ? 0 : cfg::block_m / 8> stat(numbers(stat_at));
        ptx::wgmma_wait<cfg::sloped ? 0 : under_way>();  // slopes leave no P to round later
        ptx::wgmma_pin(s);
        find_weights<cfg::sloped>(s, weights, hidden, stat, draws, 0, 0, [&] { return await_taken(); });
        store_registers(await_taken(), s);
        release_read(shared.barrier(handed + slot.stage));
        release_read(shared.barrier(q_empty + slot.stage));
    }

    // P as an operand, once no product reads the one before.
    __device__ __forceinline__ void round() {
        ptx::wgmma_wait<0>();
        if constexpr (cfg::sloped) return;
        unroll<cfg::block_m / 4>([&](int pair) { weights[pair / 4][pair % 4] = round_weights(s[2 * pair], s[2 * pair + 1]); });
    }

    // Line 16; on exit the slot is the next row tile's.
    __device__ __forceinline__ void accumulate_values(const Slot<cfg::stages>& of) {
        ptx::mbarrier_wait(shared.barrier(do_full + of.stage), of.phase);
        accumulate(dv, weights, shared.dout(of.stage));
    }

    __device__ __forceinline__ void accumulate_steps() {
        issue_s();
        probabilities<0>();
        round();
        while (!last) {
            const Slot<cfg::stages> before = slot;
            slot.advance();
            issue_s();
            accumulate_values(before);
            probabilities<1>();
            round();
            release_read(shared.barrier(do_empty + before.stage));
        }
        accumulate_values(slot);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dv);
        release_read(shared.barrier(do_empty + slot.stage));
        slot.advance();
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

    // Line 20, with P from the weigher; dS that is kept takes its place.
    __device__ __forceinline__ void gradients(const Work& work) {
        const Delta delta(numbers(delta_at));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        release_read(shared.barrier(do_empty + slot.stage));
        ptx::mbarrier_wait(shared.barrier(handed + slot.stage), slot.phase);
        load_registers(s, shared.handed_on(slot.stage));
        if constexpr (!cfg::keeps_ds) release_read(shared.barrier(taken + slot.stage));
        NoSums dbias;
        differentiate<false>(ds, ds, s, dp, delta, dbias);
        if constexpr (!cfg::keeps_ds) return;
        ptx::barrier_sync(store_barrier + 1, 128);  // all have read P
        store_gradients(ds, shared.handed_on(slot.stage));
        tell_keeper({0, step().m(), work.tile, step().head, work.batch});
    }

    // Tells the keeper of dS, which is there.
    __device__ __forceinline__ void tell_keeper(const DqPlace& place) const {
        if (threadIdx.x % 128 == 0) shared.dq_place(slot.stage) = place;
        release_read(shared.barrier(foretold + slot.stage));
    }

    // Line 22.
    __device__ __forceinline__ void accumulate_keys(const Slot<cfg::stages>& of) {
        ptx::mbarrier_wait(shared.barrier(q_full + of.stage), of.phase);
        accumulate(dk, ds, shared.q(of.stage));
    }

    __device__ __forceinline__ void accumulate_steps(const Work& work) {
        issue_dp();
        gradients(work);
        while (!uniform(step().last())) {
            const Slot<cfg::stages> before = slot;
            slot.advance();
            accumulate_keys(before);
            issue_dp();
            ptx::wgmma_wait<1>();
            release_read(shared.barrier(q_empty + before.stage));
            gradients(work);
        }
        accumulate_keys(slot);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        release_read(shared.barrier(q_empty + slot.stage));
        slot.advance();
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
        if constexpr (!cfg::keeps_ds) return;
        ptx::mbarrier_wait(shared.barrier(taken + slot.stage), slot.phase ^ 1);  // the keeper looks at no other place
        tell_keeper({-1, 0, 0, 0, 0});
    }
};

// A warp that brings kept dS to memory and gives its buffer back to the weigher.
__device__ __forceinline__ void keep_gradients(const Params& p, const Shared& shared) {
    for (Slot<2> slot;; slot.advance()) {
        ptx::mbarrier_wait(shared.barrier(foretold + slot.stage), slot.phase);
        const DqPlace place = shared.dq_place(slot.stage);
        if (uniform(place.tile < 0)) return;
        if (threadIdx.x % 32 != 0) continue;
        ptx::async_proxy_fence();
        ptx::bulk_store(kept_block(p, place.batch * p.heads + place.head, place.n, place.m), shared.handed_on(slot.stage), kBlockBytes);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(shared.barrier(taken + slot.stage));
    }
}

}  // namespace sm90::bwd
