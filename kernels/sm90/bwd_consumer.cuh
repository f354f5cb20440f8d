// A consumer warpgroup: 64 keys against all row tiles that see them, key tile after key tile.
//
// What a thread computes runs beside products, its own warpgroup's where possible: the probabilities beside dP, and writing dQ out
// beside dK.
#pragma once
#include "sm90/bwd_factor.cuh"
#include "sm90/bwd_worker.cuh"

namespace sm90::bwd {

// P is rounded together with dS, and dV comes after dS, which is faster by 1-4 % and takes fewer registers; but a softcap's slope
// leaves no P to round.
constexpr bool values_first = cfg::block_m <= 64 && cfg::sloped;

// Beside products a load waits for hundreds of clocks; ahead of them it delays them.  With dropout at d 128 what the probabilities need is
// loaded before the two products of a row tile where nothing is masked (2.6 %, but - 2 % under causality), else behind them.
constexpr bool given_first = cfg::dropout && cfg::block_m == 64 && unmasked && !cfg::sloped && !cfg::bias && !cfg::score;

static_assert(cfg::stages == 2, "the buffers of dS and the phases of `taken` go by the stage");
constexpr u32 consumers = 128 * warpgroups;
constexpr u32 gradients_barrier = 1, keys_barrier = 2;

// dQ takes the place of dP where they have the same size.
__device__ __forceinline__ QueryGradient& place_of_queries(QueryGradient& dp, QueryGradient&) { return dp; }
template <int n>
__device__ __forceinline__ QueryGradient& place_of_queries(float (&)[n], QueryGradient& dq) { return dq; }

struct Consumer : Worker {
    // 128 rows, or a part of V, leave few registers; so do slopes, and dropout beside a bias or a function.
    static constexpr bool capped = cfg::softcap && !slopes_apart && slabs == 2;
    static constexpr bool crowded = cfg::block_m == 128 || cfg::split_delta || slopes_apart || capped || (cfg::dropout && (cfg::bias || cfg::score));
    using Ahead = Numbers<crowded ? 0 : cfg::block_m / 8>;
    static constexpr int held =  // before what is hidden is hidden
        slopes_apart ? 0 : capped ? 4 : cfg::dropout ? unmasked && !cfg::bias && !cfg::score : !cfg::split_delta ? (cfg::dbias >= kDbiasWeighted ? 0 : 2)
        : column_masks > 0 && stated_mask ? 0 : column_masks > 0 || stated_mask ? 4 : 0;
    using Stat = Numbers<crowded ? held : cfg::block_m / 8>;
    using Delta = Either<cfg::split_delta, NoNumbers, Numbers<capped ? 4 : crowded ? 0 : cfg::block_m / 8>>::type;
    const ptx::TensorMap &dk_map, &dv_map, &dbias_map;
    const u32 warpgroup;
    Scores s, dp;
    QueryGradient dq;
    Fragments weights, ds;
    KeyGradient dk;
    ValueGradient dv;
    Either<cfg::split_delta, HeldValues, ReadValues>::type values;
    StepCode code;  // of the row tile whose scores were begun last
    u32 begun = 0;  // 0 in the first step of a key tile, whose products overwrite dK and dV
    KeySums key_sums;
#ifdef WEIGHTED_SUMS
    WeightedSums weighted_sums;
#endif

    __device__ __forceinline__ Consumer(const Params& p, const Shared& shared, const Maps& maps, u32 warpgroup)
        : Worker{p, shared}, dk_map(maps.dk), dv_map(maps.dv), dbias_map(maps.dbias), warpgroup(warpgroup)
#ifdef WEIGHTED_SUMS
          , weighted_sums{p}
#endif
    {}

    __device__ __forceinline__ u32 own_rows(u32 tile) const { return tile + 64 * warpgroup * row_bytes; }

    // This warpgroup's slab of a buffer of dS.
    __device__ __forceinline__ u32 own_gradients(u32 buffer) const { return shared.ds(buffer) + warpgroup * cfg::block_m * row_bytes; }

    __device__ __forceinline__ QueryGradient& queries() { return place_of_queries(dp, dq); }

    // Begins the scores of the row tile in the slot, which is there, and tells of its dQ.
    __device__ __forceinline__ void issue_s() {
        code = step();
        compute_s(s, own_rows(shared.k(keys.stage)), shared.q(slot.stage));
        if constexpr (splits_rows) bias.add_parts(s, shared.halves(), code.far() ? 0.0f : split_score().of_row(code.m() * cfg::block_m));
        else if constexpr (splits) bias.add_parts(s, shared.halves(), shared.parts(warpgroup));
        ptx::wgmma_commit();
        foretell_dq();
    }

    // When a key tile begins, or a head, or far rows, to which they add nothing but keys' parts, or others: what products add from then on.
    __device__ __forceinline__ void split_keys() {
        const bool far = splits_rows && step().far();
        if (!uniform(step().first() || step().odd() != code.odd() || (splits_rows && far != code.far()))) return;
        const TilePlace at = place(64 * warpgroup);
        float x[2];
        if constexpr (cfg::split_score) {
            bias.set_head(TracedHead::of(p, at.batch, at.head));
            const SplitScore score = split_score();
            unroll<2>([&](int r) { x[r] = score.of_key(at.key + 8 * r); });
            if constexpr (splits_rows) return bias.split_keys_and_rows(x, far ? 0.0f : (score.of(cfg::block_m, 0) - score.of(0, 0)) / cfg::block_m);
        } else {
            bias.find_bias(x, p, at);
        }
        bias.split_keys(at, shared.parts(warpgroup), x);
        if constexpr (parts_held) return;
        ptx::async_proxy_fence();
        ptx::barrier_sync(store_barrier + warpgroup, 128);  // they are there
    }

    __device__ __forceinline__ void issue_dp() {
        await_douts();
        values.multiply(dp, own_rows(shared.v()), shared.dout(slot.stage), shared.delta(slot.stage));
    }

    __device__ __forceinline__ Hidden find_hidden() const { return Hidden(*this, 64 * warpgroup, uniform(code.partial())); }

    // Read by threads where they hold a part of V.
    __device__ __forceinline__ void release_values() const {
        if constexpr (cfg::split_delta)
            release_read(shared.barrier(v_empty));
        else
            release(shared.barrier(v_empty));
    }

    // What probabilities need beside the scores.
    struct Given {
        Draws draws;
        Ahead stat;
    };
    __device__ __forceinline__ Given load_given() const { return {take_draws(64 * warpgroup), Ahead(numbers(stat_at))}; }

    // Lines 11-13: probabilities, while dP is being computed.
    __device__ __forceinline__ void probabilities(const Hidden& hidden, const Given& given) {
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(s);
        const Stat stat(given.stat);
        find_weights<values_first>(s, weights, hidden, stat, given.draws, 64 * warpgroup, own_gradients(slot.stage),
                                   [&] { return await_taken(slot.stage); });
    }

    // dS leaves as it is, which is the gradient of a bias of its own.
    __device__ __forceinline__ void store_bias_gradient() const {
        if (cfg::dbias != kDbiasStored || threadIdx.x % 128 != 0) return;
        ptx::tensor_store(dbias_map, own_gradients(slot.stage), work().tile * cfg::block_n + 64 * warpgroup, step().m() * cfg::block_m,
                          step().head, work().batch);
        ptx::bulk_commit();
    }

    // Lines 18 and 20: dS, which goes to shared memory for dQ.
    __device__ __forceinline__ void gradients(const Delta& delta) {
#ifdef WEIGHTED_SUMS
        if constexpr (cfg::apart != 0) {
            WeightedSums::Step step(weighted_sums, place(64 * warpgroup));
            differentiate<!values_first>(ds, weights, s, dp, delta, step);
        } else
#endif
        if constexpr (cfg::dbias == kDbiasOfKeys) {
            differentiate<!values_first>(ds, weights, s, dp, delta, key_sums);
        } else {
            NoSums dbias;
            differentiate<!values_first>(ds, weights, s, dp, delta, dbias);
        }
        await_added(slot);
        if constexpr (ds_stages == 1) ptx::barrier_sync(keys_barrier, consumers);  // nobody reads the last dS any more
        store_gradients(ds, own_gradients(slot.stage));
    }

    // Until nobody adds up dS of the buffer's last step any more.
    __device__ __forceinline__ void await_added(const Slot<cfg::stages>& slot) const {
        if constexpr (sums_diagonals) ptx::mbarrier_wait(shared.barrier(ds_empty + slot.stage), slot.phase ^ 1);
    }

    // Line 21: dQ of this warpgroup's rows or columns of the row tile.
    __device__ __forceinline__ void issue_dq() {
        const u32 rows = shared.ds(slot.stage), columns = shared.k(keys.stage);
        if constexpr (dq_by_rows)
            compute_dq(queries(), own_rows(rows), columns);
        else
            compute_dq(queries(), rows, columns + (slabs == 1 ? 64 : cfg::block_n * row_bytes) * warpgroup);
    }

    // Sums of dS for arrays, beside dV and added beside dQ; or, where rows are short, beside dQ and added beside dK.
    template <bool long_rows>
    __device__ __forceinline__ void count() {
#ifdef WEIGHTED_SUMS
        if constexpr (long_rows == (slabs > 1 || slabs_v > 1)) weighted_sums.count(ds, shared.counting());
#endif
    }
    template <bool long_rows>
    __device__ __forceinline__ void add_counted() {
#ifdef WEIGHTED_SUMS
        if constexpr (long_rows == (slabs > 1 || slabs_v > 1)) weighted_sums.add(place(64 * warpgroup));
#endif
    }

    // Products of a row tile; dQ and dK are under way on exit.
    __device__ __forceinline__ void begin_step() {
        await_queries();
        if constexpr (given_first) {
            const Given given = load_given();
            issue_s();
            issue_dp();
            load_bias(64 * warpgroup);
            probabilities(find_hidden(), given);
        } else {
            if constexpr (splits) split_keys();
            issue_s();
            issue_dp();
#ifdef WEIGHTED_SUMS
            weighted_sums.store(work(), step().head, warpgroup);
#endif
            if constexpr (!splits) load_bias(64 * warpgroup);
            const Hidden hidden = find_hidden();
            probabilities(hidden, load_given());
        }
        const Delta delta(numbers(delta_at));
        if constexpr (values_first) {
            accumulate(dv, weights, shared.dout(slot.stage), begun);  // line 16
            ptx::wgmma_wait<1>();
        } else {
            ptx::wgmma_wait<0>();
        }
        ptx::wgmma_pin(dp);
        if (uniform(code.last())) release_values();
        gradients(delta);
        if constexpr (!values_first) accumulate(dv, weights, shared.dout(slot.stage), begun);
        count<true>();
        ptx::async_proxy_fence();  // of dS, beside dV
        ptx::barrier_sync(gradients_barrier, consumers);  // dS is complete
        store_bias_gradient();
        issue_dq();
        ptx::wgmma_wait<1>();
        release(shared.barrier(do_empty + slot.stage));
        count<false>();
        accumulate(dk, ds, shared.q(slot.stage), begun);  // line 22
        add_counted<true>();
        begun = 1;
    }

    // The buffer of dQ, once a reducer is done with what was there; or that of dS in its place.
    __device__ __forceinline__ u32 await_taken(u32 stage) const {
        if constexpr (ds_stages == 1) {
            ptx::barrier_sync(keys_barrier, consumers);  // nobody reads dS any more
            return own_gradients(stage);
        }
        if constexpr (!dq_whole) ptx::mbarrier_wait(shared.barrier(taken), stage ^ 1);
        else if constexpr (!dq_held) ptx::barrier_sync(store_barrier + warpgroup, 128);  // its rows have left
        return shared.handed_on(warpgroup);
    }

    // dQ to its buffer, and that to the next reducer.
    __device__ __forceinline__ void hand_over(u32 stage) {
        QueryGradient& dq = queries();
        ptx::wgmma_pin(dq);
        if constexpr (dq_held) return hold(dq, work().tile);
        if constexpr (dq_whole) return write_queries(dq, shared.handed_on(warpgroup), work().batch * p.heads + step().head, step().m());
        store_registers(await_taken(stage), dq, own_dq_columns(warpgroup) / 2);
        if constexpr (!reducer_fences) ptx::async_proxy_fence();
        release(shared.barrier(handed + stage));
    }

    // dQ to the sum that the thread holds of the row tile.  Where each key tile meets all rows the first begins the sum, the last ends it.
    static constexpr bool meets_all = unmasked && !cfg::bias && !cfg::score;
    __device__ __forceinline__ void hold(QueryGradient& dq, i32 tile) const {
        const u32 held = shared.held(step().m(), warpgroup);
        if (!meets_all || uniform(tile > 0)) {
            QueryGradient sum;
            load_registers(sum, held);
            unroll<dq_columns / 2>([&](int i) { dq[i] += sum[i]; });
        }
        if (meets_all && uniform(tile == p.key_tiles - 1)) return end_sum(dq, held, step().m());
        store_registers(held, dq);
    }

    // Writes a sum by way of its own place, once all have read theirs.
    __device__ __forceinline__ void end_sum(const QueryGradient& sum, u32 held, i32 m) const {
        ptx::barrier_sync(store_barrier + warpgroup, 128);
        write_queries(sum, held, work().batch * p.heads + work().head, m);
    }

    // Calls work(row tile) for all that a head's dQ is held of, if the key tile is its first or (last) its last.
    template <class Work>
    __device__ __forceinline__ void at_end_of_head(bool last, const Work& work) const {
        if constexpr (!dq_held || meets_all) return;
        if (uniform(this->work().tile != (last ? p.key_tiles - 1 : 0))) return;
#pragma unroll 1
        for (i32 m = 0; m < p.row_tiles; ++m) work(m);
    }

    __device__ __forceinline__ void begin_queries() const {
        at_end_of_head(false, [&](i32 m) {
            const QueryGradient zeros = {};
            store_registers(shared.held(m, warpgroup), zeros);
        });
    }

    __device__ __forceinline__ void write_queries() const {
        at_end_of_head(true, [&](i32 m) {
            QueryGradient sum;
            const u32 held = shared.held(m, warpgroup);
            load_registers(sum, held);
            end_sum(sum, held, m);
        });
    }

    // This warpgroup's part of a row tile's dQ, by way of a buffer of its own, each warp its rows.
    __device__ __forceinline__ void write_queries(const QueryGradient& dq, u32 buffer, i32 head, i32 m) const {
        const float factor = static_cast<float>(p.scale * p.dropout_scale);
        const i32 rows = 64 * warpgroup, first_row = m * cfg::block_m + (dq_by_rows ? rows : 0), first_column = dq_by_rows ? 0 : dq_columns * warpgroup;
        if constexpr (unrounded && !cfg::in_parts)
            return write_gradient(dq, factor, p.dq.data, head, p.n_queries, p.head_dim, first_row + fragment_row(), first_column);
        stage_gradient(dq, factor, buffer, 0);
        __syncwarp();  // the warp's rows are there
        constexpr u32 units = dq_columns / 8;  // of a row
        const u32 lane = threadIdx.x % 32;
        cfg::elem* to = static_cast<cfg::elem*>(p.dq.data) + static_cast<i64>(head) * p.n_queries * p.head_dim;
        unroll<units / 2>([&](int pass) {
            const u32 row = 16 * (threadIdx.x % 128 / 32) + pass * (32 / units) + lane / units, unit = lane % units;
            const i32 at = first_row + row, column = first_column + 8 * unit;
            float4 eight;
            ptx::load_shared(eight, buffer + row * row_bytes + 16 * (unit ^ row % 8));
            if (at < p.n_queries && column < p.head_dim) *reinterpret_cast<float4*>(to + static_cast<i64>(at) * p.head_dim + column) = eight;
        });
        __syncwarp();  // before others are
    }

    // Tells a reducer where the step's dQ will belong; after a step's end, when the entry before the last is free.
    __device__ __forceinline__ void foretell(const DqPlace& place) const {
        if (dq_whole || warpgroup != 0 || threadIdx.x % 128 != 0) return;
        shared.dq_place(slot.stage) = place;
        ptx::mbarrier_arrive(shared.barrier(foretold + slot.stage));
    }

    __device__ __forceinline__ void foretell_dq() const {
        foretell({step().dq_tile, step().m(), work().tile, step().head, work().batch});
    }

    // The rest of a step.
    __device__ __forceinline__ void end_step() {
        ptx::wgmma_wait<1>();
        add_counted<false>();
        hand_over(slot.stage);
        ptx::wgmma_wait<0>();
        if (cfg::dbias == kDbiasStored && threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
        release_read(shared.barrier(q_empty + slot.stage));
        slot.advance();
    }

    // All row tiles of the key tile in the slot.  On exit the slot is the next key tile's.
    __device__ __forceinline__ void accumulate_steps() {
        begun = 0;
        bool last;
#pragma unroll 1
        do {
            begin_step();
            last = uniform(code.last());
            end_step();
        } while (!last);
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(dv);
    }

    // A slice's part of a gradient to the workspace.
    template <int n>
    __device__ __forceinline__ void store_slice(const float (&x)[n], float factor, const Work& work, void* to) const {
        const i64 slice = static_cast<i64>(tile_number(p, work) - p.shared_tile) * p.split_tiles + work.slice();
        float4* out = static_cast<float4*>(to) + (slice * warpgroups + warpgroup) * (32 * n) + threadIdx.x % 128;
        unroll<n / 4>([&](int i) { out[128 * i] = make_float4(x[4 * i] * factor, x[4 * i + 1] * factor, x[4 * i + 2] * factor, x[4 * i + 3] * factor); });
    }

    // A gradient of the warpgroup's keys leaves, by way of slabs at `staged`, `stride` bytes apart.
    template <int slab_count, int n>
    __device__ __forceinline__ void leave(const float (&x)[n], float factor, const Work& work, const ptx::TensorMap& map, void* to,
                                          i32 columns, u32 staged, u32 stride) const {
        const i32 first_key = work.tile * cfg::block_n + 64 * warpgroup;
        if (work.sliced()) return store_slice(x, factor, work, to);
        if constexpr (unrounded)
            return write_gradient<adds_parts>(x, factor, to, key_slice(p, work), p.n_keys, columns, first_key + fragment_row());
        stage_gradient(x, factor, staged, stride);
        ptx::barrier_sync(store_barrier + warpgroup, 128);  // it is staged
        if (threadIdx.x % 128 == 0) store_gradient<slab_count>(map, staged, stride, first_key, work.head, work.batch);
    }

    // Line 24.  dV leaves through this warpgroup's part of the buffers of dS; so does dK,
    // if each has room for 128 rows, else through the buffer of dQ.
    __device__ __forceinline__ void write() {
        Work work = this->work();
        if constexpr (cfg::tail) work.flags = __shfl_sync(~0u, work.flags, 0);  // the same in all lanes
        if constexpr (cfg::dbias == kDbiasOfKeys) key_sums.store(p, work, work.tile * cfg::block_n + 64 * warpgroup + fragment_row());
#ifdef WEIGHTED_SUMS
        weighted_sums.add_products(dk, own_rows(shared.k(keys.stage)), work, warpgroup);
        weighted_sums.store(work, (work.head + 1) * p.group, warpgroup);
#endif
        if constexpr (cfg::bias_tiles) return write_beside_biases(work);
        release_read(shared.barrier(k_empty + keys.stage));
        if constexpr (sums_diagonals) {
            Slot<cfg::stages> other = slot;
            other.advance();
            await_added(slot);
            await_added(other);
        }
        ptx::barrier_sync(keys_barrier, consumers);  // nobody reads dS any more
        leave<slabs_v>(dv, static_cast<float>(p.dropout_scale), work, dv_map, key_gradient(p.dv, p.dv_acc, work), p.head_dim_v, own_gradients(0), ds_bytes);
        if constexpr (!dq_by_rows && !unrounded) await_taken(slot.stage);
        leave<slabs>(dk, score_factor(p, work.batch, work.head), work, dk_map, key_gradient(p.dk, p.dk_acc, work), p.head_dim,
                     dq_by_rows ? own_gradients(0) + 64 * row_bytes : shared.handed_on(warpgroup), 64 * row_bytes);
    }

    // The same where the buffers of dS have begun to take the next key tile's biases: dK leaves through this warpgroup's rows of k.
    __device__ __forceinline__ void write_beside_biases(const Work& work) {
        static_assert(!cfg::bias_tiles || slabs_v * 64 * row_bytes <= handed_bytes);
        ptx::barrier_sync(keys_barrier, consumers);  // nobody reads k any more
        leave<slabs>(dk, score_factor(p, work.batch, work.head), work, dk_map, key_gradient(p.dk, p.dk_acc), p.head_dim, own_rows(shared.k(keys.stage)),
                     cfg::block_n * row_bytes);
        if constexpr (!unrounded) await_taken(slot.stage);
        leave<slabs_v>(dv, static_cast<float>(p.dropout_scale), work, dv_map, key_gradient(p.dv, p.dv_acc), p.head_dim_v, shared.handed_on(warpgroup), 64 * row_bytes);
        await_stores();
        release_read(shared.barrier(k_empty + keys.stage));
    }

    // Before dS and dQ are written again.
    __device__ __forceinline__ void await_stores() const {
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
        ptx::barrier_sync(store_barrier + warpgroup, 128);  // the gradients have left their buffers
    }

    // A key tile that no row sees: its gradients are 0.
    __device__ __forceinline__ void skip_keys() {
        release_values();
        clear(dk);
        clear(dv);
    }

    __device__ __forceinline__ void run() {
        for (; await_keys(); keys.advance()) {
            await_stores();
            await_values();
            values.load(own_rows(shared.v()));
            if constexpr (cfg::dbias == kDbiasOfKeys) clear(key_sums.sums);
#ifdef WEIGHTED_SUMS
            weighted_sums.begin(work());
#endif
            begin_queries();
            if (uniform(work().seen()))
                accumulate_steps();
            else
                skip_keys();
            write_queries();
            write();
        }
        if constexpr (!dq_whole) await_taken(slot.stage);  // both reducers have read their last place
        for (u32 reducer = 0; reducer < 2; ++reducer, slot.advance()) foretell({-1, 0, 0, 0, 0});
        await_stores();
    }
};

}  // namespace sm90::bwd
