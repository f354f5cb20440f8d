// A consumer warpgroup: 64 keys against all row tiles that see them, key tile after key tile.
//
// What a thread computes runs beside products, its own warpgroup's where possible: the probabilities beside dP, and writing dQ out
// beside dK.  Narrow heads, with 128 rows, do the latter beside the scores of the next row tile, which are issued before dQ is
// complete.
#pragma once
#include "sm90/bwd_worker.cuh"

namespace sm90 {

// P is rounded together with dS, and dV comes after dS, which is faster by 1-4 % and takes fewer registers; but a softcap's slope
// leaves no P to round.
constexpr bool values_first = cfg::block_m <= 64 && cfg::softcap;
// With scores ahead dK takes dS from shared memory: as registers it would have to outlive those scores.  With 64 rows, where shared
// memory nearly binds, that costs more than the scores gain.
constexpr bool scores_ahead = cfg::block_m == 128;

static_assert(cfg::stages == 2, "the buffers of dS and the phases of `taken` go by the stage");
constexpr u32 consumers = 128 * warpgroups;
constexpr u32 gradients_barrier = 1, keys_barrier = 2;

// dQ takes the place of dP where they have the same size.
__device__ __forceinline__ QueryGradient& place_of_queries(QueryGradient& dp, QueryGradient&) { return dp; }
template <int n>
__device__ __forceinline__ QueryGradient& place_of_queries(float (&)[n], QueryGradient& dq) { return dq; }

struct Consumer : Worker {
    using Numbers = Either<scores_ahead, NumbersInPlace, NumbersAhead>::type;
    const ptx::TensorMap &dk_map, &dv_map;
    const u32 warpgroup;
    Scores s, dp;
    QueryGradient dq;
    Fragments weights, ds;
    KeyGradient dk;
    ValueGradient dv;
    StepCode code;  // of the row tile whose scores were begun last
    u32 begun = 0;  // 0 in the first step of a key tile, whose products overwrite dK and dV

    __device__ __forceinline__ Consumer(const Params& p, const Shared& shared, const Maps& maps, u32 warpgroup)
        : Worker{p, shared}, dk_map(maps.dk), dv_map(maps.dv), warpgroup(warpgroup) {}

    __device__ __forceinline__ u32 own_rows(u32 tile) const { return tile + 64 * warpgroup * row_bytes; }

    __device__ __forceinline__ QueryGradient& queries() { return place_of_queries(dp, dq); }

    // Waits for the row tile in the slot and begins its scores.
    __device__ __forceinline__ void issue_scores() {
        await_queries();
        code = step();
        multiply_scores(s, own_rows(shared.k(keys.stage)), shared.q(slot.stage));
    }

    __device__ __forceinline__ void issue_weights() {
        await_douts();
        multiply_weights(dp, own_rows(shared.v()), shared.dout(slot.stage));
    }

    // Lines 11-13: probabilities, while dP is being computed.
    __device__ __forceinline__ void probabilities() {
        const Hidden hidden(*this, 64 * warpgroup, uniform(code.partial()));
        const Draws draws = take_draws(64 * warpgroup);
        const Numbers numbers(stat());
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(s);
        hidden.refine(s, p);
        weigh<values_first>(s, weights, p, numbers, draws);
    }

    // Line 20: dS, which goes to shared memory for dQ.
    __device__ __forceinline__ void gradients(const Numbers& delta) {
        differentiate<!values_first>(ds, weights, s, dp, delta);
        store_gradients(ds, shared.ds(slot.stage) + warpgroup * cfg::block_m * row_bytes);
    }

    // Line 21: dQ of this warpgroup's rows or columns of the row tile.
    __device__ __forceinline__ void issue_queries() {
        const u32 rows = shared.ds(slot.stage), columns = shared.k(keys.stage);
        if constexpr (dq_by_rows)
            multiply_queries(queries(), own_rows(rows), columns);
        else
            multiply_queries(queries(), rows, columns + (slabs == 1 ? 64 : cfg::block_n * row_bytes) * warpgroup);
    }

    // Products of a row tile, whose scores are under way on entry, and dQ and dK on exit.
    __device__ __forceinline__ void begin_step() {
        if (!scores_ahead) foretell_queries();
        issue_weights();
        if (scores_ahead) foretell_queries();
        probabilities();
        const Numbers numbers(delta());
        if constexpr (values_first) {
            accumulate(dv, weights, shared.dout(slot.stage), begun);  // line 16
            ptx::wgmma_wait<1>();
        } else {
            ptx::wgmma_wait<0>();
        }
        ptx::wgmma_pin(dp);
        if (uniform(code.last())) release(v_empty);
        gradients(numbers);
        if constexpr (!values_first) accumulate(dv, weights, shared.dout(slot.stage), begun);
        ptx::async_proxy_fence();  // of dS, beside dV
        ptx::barrier_sync(gradients_barrier, consumers);  // dS is complete
        if constexpr (scores_ahead) {
            accumulate_shared(dk, shared.ds(slot.stage) + warpgroup * cfg::block_m * row_bytes, shared.q(slot.stage), begun);  // line 22
            issue_queries();
        } else {
            issue_queries();
            ptx::wgmma_wait<1>();
            release(do_empty + slot.stage);
            accumulate(dk, ds, shared.q(slot.stage), begun);  // line 22
        }
        begun = 1;
    }

    // dQ to its buffer, once a reducer is done with what was there, and the buffer to the other.
    __device__ __forceinline__ void hand_over(u32 stage) {
        QueryGradient& dq = queries();
        ptx::wgmma_pin(dq);
        ptx::mbarrier_wait(shared.barrier(taken), stage ^ 1);
        store_registers(shared.handed_on(warpgroup), dq);
        ptx::async_proxy_fence();
        release(handed + stage);
    }

    // Tells a reducer where the step's dQ will belong; after a step's end, when the entry before the last is free.
    __device__ __forceinline__ void foretell(const DqPlace& place) const {
        if (warpgroup != 0 || threadIdx.x % 128 != 0) return;
        shared.dq_place(slot.stage) = place;
        ptx::mbarrier_arrive(shared.barrier(foretold + slot.stage));
    }

    // Narrow heads issue dP first, which is 2-3 % faster there and 2-3 % slower at 128.
    __device__ __forceinline__ void foretell_queries() const {
        foretell({step().dq_tile, step().m(), work().tile, step().head, work().batch});
    }

    // Waits for the key tile in the slot; false when there is none.  Its first scores begin, if they go ahead and some row sees it.
    __device__ __forceinline__ bool begin_keys() {
        const bool some = await_keys();
        if (scores_ahead && some && uniform(work().seen())) issue_scores();
        return some;
    }

    // The rest of a step with scores ahead: those of the next row tile, or after a last step of the next key tile; false when there
    // is none.
    __device__ __forceinline__ bool end_step_ahead(bool last) {
        const u32 stage = slot.stage;
        bool some = true;
        slot.advance();
        if (last) {
            keys.advance();
            some = begin_keys();
        } else {
            issue_scores();
        }
        ptx::wgmma_commit();  // perhaps of nothing
        ptx::wgmma_wait<1>();
        release_read(q_empty + stage);
        release(do_empty + stage);
        hand_over(stage);
        return some;
    }

    // And of one without.
    __device__ __forceinline__ bool end_step(bool last) {
        ptx::wgmma_wait<1>();
        hand_over(slot.stage);
        ptx::wgmma_wait<0>();
        release_read(q_empty + slot.stage);
        slot.advance();
        if (!last) return true;
        keys.advance();
        return begin_keys();
    }

    // All row tiles of the key tile in the slot.  On exit the slot is the next key tile's; true when there is one.  With scores
    // ahead the first are under way on entry, and the next complete on exit.
    __device__ __forceinline__ bool accumulate_steps() {
        await_stores();
        await_values();
        begun = 0;
#pragma unroll 1
        for (;;) {
            if constexpr (!scores_ahead) {
                issue_scores();
                ptx::wgmma_commit();
            }
            begin_step();
            const bool last = uniform(code.last());
            const bool some = scores_ahead ? end_step_ahead(last) : end_step(last);
            if (last) {
                ptx::wgmma_wait<0>();
                ptx::wgmma_pin(s);
                ptx::wgmma_pin(dk);
                ptx::wgmma_pin(dv);
                return some;
            }
        }
    }

    // Line 24, of the key tile in another slot.  dV leaves through this warpgroup's part of the buffers of dS, dK through its
    // buffer of dQ.
    __device__ __forceinline__ void write(u32 keys_stage) {
        const float factor_v = static_cast<float>(p.dropout_scale), factor_k = static_cast<float>(p.scale * p.dropout_scale);
        const bool leader = threadIdx.x % 128 == 0;
        const Work work = shared.work(keys_stage);
        const i32 first_key = work.tile * cfg::block_n + 64 * warpgroup;
        release_read(k_empty + keys_stage);
        ptx::barrier_sync(keys_barrier, consumers);  // nobody reads dS any more
        if constexpr (cfg::sum_dv) {
            write_float(dv, factor_v, p.dv_acc, p, p.head_dim_v, work, first_key + thread_key());
        } else {
            const u32 staged = shared.ds(0) + warpgroup * cfg::block_m * row_bytes;
            stage_gradient(dv, factor_v, staged, ds_bytes);
            ptx::barrier_sync(store_barrier + warpgroup, 128);  // dV is staged
            if (leader) store_gradient<slabs_v>(dv_map, staged, ds_bytes, work, first_key);
        }
        if constexpr (cfg::sum_dk) {
            write_float(dk, factor_k, p.dk_acc, p, p.head_dim, work, first_key + thread_key());
        } else {
            ptx::mbarrier_wait(shared.barrier(taken), slot.stage ^ 1);
            stage_gradient(dk, factor_k, shared.handed_on(warpgroup), 64 * row_bytes);
            ptx::barrier_sync(store_barrier + warpgroup, 128);  // dK is staged
            if (leader) store_gradient<slabs>(dk_map, shared.handed_on(warpgroup), 64 * row_bytes, work, first_key);
        }
    }

    // Before dS and dQ are written again.
    __device__ __forceinline__ void await_stores() const {
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
        ptx::barrier_sync(store_barrier + warpgroup, 128);  // the gradients have left their buffers
    }

    // A key tile that no row sees: its gradients are 0.
    __device__ __forceinline__ bool skip_keys() {
        await_stores();
        await_values();
        release(v_empty);
        clear(dk);
        clear(dv);
        keys.advance();
        return begin_keys();
    }

    __device__ __forceinline__ void run() {
        bool some = begin_keys();
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        while (some) {
            const u32 keys_stage = keys.stage;
            if (uniform(work().seen())) {
                some = accumulate_steps();
            } else {
                some = skip_keys();
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
            }
            write(keys_stage);
        }
        ptx::wgmma_wait<0>();
        ptx::mbarrier_wait(shared.barrier(taken), slot.stage ^ 1);  // both reducers have read their last place
        for (u32 reducer = 0; reducer < 2; ++reducer, slot.advance()) foretell({-1, 0, 0, 0, 0});
        await_stores();
    }
};

}  // namespace sm90
