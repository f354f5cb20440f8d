// A consumer warpgroup of the row kernel: dQ of 64 query rows, over all key tiles that they see, in descending order.
#pragma once
#include "attn/philox.cuh"
#include "sm90/bwd_rows_producer.cuh"
#include "sm90/gradients.cuh"
#include "sm90/scores.cuh"

namespace sm90::rows {

constexpr u32 store_barrier = 1;            // + warpgroup

using Scores = float[cfg::block_n / 2];      // 64 queries x block_n keys
using Fragments = u32[cfg::block_n / 16][4]; // the same rounded
using QueryGradient = float[cfg::head_dim / 2];

struct Consumer {
    const Params& p;
    const ptx::TensorMap& dq_map;
    const Shared shared;
    const u32 warpgroup;
    Slot<cfg::stages> k;
    Slot<cfg::v_stages> v;
    u32 rows_phase = 0;
    // Byte offset of this warpgroup's rows in the slabs of q and do.  It grows by 0 with every step, which the compiler does not
    // know: it would otherwise compute all descriptors ahead, for which there are no registers.
    u32 row_offset;
    float2 stat, delta;  // of the thread's two rows, for all key tiles: beside products a load waits for hundreds of clocks
    Scores s, dp;
    Fragments ds;
    QueryGradient dq;

    __device__ __forceinline__ i32 own_row() const {
        return shared.work().tile * cfg::block_m + 64 * warpgroup + fragment_row();
    }

    // stat or delta of the thread's two rows, which lie 8 apart.
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

    // Element i belongs to row i / 2 % 2 of the thread's two, and to this key of the tile, counted from twice its place in the quad.
    __device__ __forceinline__ static constexpr int key_of(int i) { return 8 * (i >> 2) + (i & 1); }

    // Raw products to scores where there is a function or a bias: take(i, score and slope).
    template <class Take>
    __device__ __forceinline__ void find_scores(Step step, const Take& take) const {
        const Work& work = shared.work();
        const i64 offset = cfg::bias ? slice_of(p.bias, work.batch, work.head) : 0;
        const i32 row = own_row(), first = step.n() * cfg::block_n + 2 * (threadIdx.x % 4);
        const TracedHead head = TracedHead::of(p, work.batch, work.head);
        const TracedRow rows[2] = {TracedRow::of(p, head, row), TracedRow::of(p, head, row + 8)};
        unroll<cfg::block_n / 8, 2>([&](int eight, int odd) {
            const i32 key = first + key_of(4 * eight + odd);
            const TracedKey traced = TracedKey::of(p, head, key);
            unroll<2>([&](int r) {
                const int i = 4 * eight + 2 * r + odd;
                take(i, score_with_bias(p, s[i], cfg::bias ? bias_at(p, offset, row + 8 * r, key) : 0.0f, head, rows[r], traced));
            });
        });
    }

    // Lines 13 to 15 where slopes come with the scores: P times its slope in place of the products, of which hidden ones are -inf.
    __device__ __forceinline__ void weigh_apart(Step step) {
        float tops[2] = {};
        if (uniform(step.partial())) {
            mask_scores(step);
            if (uniform(step.far())) find_maxima(tops);
        }
        find_scores(step, [&](int i, const Capped& x) {
            const int r = i / 2 % 2;
            const float shift = r ? stat.y : stat.x;
            const bool hidden = s[i] == minus_infinity() || (!cfg::additive && shift == minus_infinity());
            const float score = hidden ? minus_infinity() : rounded_difference(x.score, tops[r]);
            const float weight = ptx::ex2(fmaf(score, static_cast<float>(kLog2e), shift));
            s[i] = cfg::score && weight == 0.0f ? 0.0f : weight * x.slope;
        });
    }

    // Hidden scores become -inf, whatever they were; so do those of rows that see nothing.
    __device__ __forceinline__ void mask_scores(Step step) {
        const Work& work = shared.work();
        const MaskSlices slices{column_masks > 0 ? slice_of(p.table, work.batch, work.head) : 0, block_mask ? slice_of(p.mask, work.batch, work.head) : 0,
                                boolean_mask ? slice_of(p.boolean, work.batch, work.head) : 0,
                                function_mask ? static_cast<i32>(slice_of(p.function, work.batch, work.head)) : 0};
        const i32 row = own_row(), first = step.n() * cfg::block_n + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < cfg::block_n / 2; i += 4)
            unroll<2>([&](int e) {
                const i32 key = first + key_of(i + e);
                const KeyMask mask(p, slices, key);
                if (!mask.visible(p, min(row, p.n_queries - 1), key)) s[i + e] = minus_infinity();
                if (!mask.visible(p, min(row + 8, p.n_queries - 1), key)) s[i + e + 2] = minus_infinity();
            });
    }

    // Of far rows; else 0.
    __device__ __forceinline__ void find_maxima(float (&top)[2]) const {
        const Work& work = shared.work();
        const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, work.batch, work.head);
        unroll<2>([&](int r) {
            top[r] = maxima[min(own_row() + 8 * r, p.n_queries - 1) * p.m.row];
            if (!is_far_row(top[r])) top[r] = 0.0f;
        });
    }

    // Takes the maximum from the scores of far rows.
    __device__ __forceinline__ void subtract_maxima() {
        const float scale = cfg::prescaled ? 1.0f : fabsf(static_cast<float>(p.scale)), inverse = __fdividef(1.0f, scale);
        float top[2];
        find_maxima(top);
        unroll<cfg::block_n / 2>([&](int i) { s[i] = subtract_far(s[i], top[i / 2 % 2], scale, inverse); });
    }

    __device__ __forceinline__ void weigh_plain(Step step) {
        const float scale = score_scale(p);
        if constexpr (cfg::bias || cfg::score) find_scores(step, [&](int i, const Capped& x) { s[i] = x.score; });
        else if constexpr (cfg::prescaled) prescale(s, p);
        if (uniform(step.partial())) {
            mask_scores(step);
            if (uniform(step.far())) subtract_maxima();
        }
        unroll<cfg::block_n / 2>([&](int i) {
            const float score = s[i];
            s[i] = ptx::ex2(fmaf(score, scale, i / 2 % 2 ? stat.y : stat.x));
            if constexpr (cfg::softcap) s[i] *= cap_slope(p, score);
        });
    }

    // Algorithm 4, lines 13 to 15: P in place of the scores; what dropout drops is marked by its sign.  With a softcap, `dp` of line 17 is still to
    // come, and the slope of the cap joins P at once: P itself is needed no more.
    __device__ __forceinline__ void weigh(Step step) {
        if constexpr (slopes_apart) weigh_apart(step);
        else weigh_plain(step);
        if constexpr (cfg::dropout) mark_dropped(step);
    }

    __device__ __forceinline__ void mark_dropped(Step step) {
        constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
        const Work& work = shared.work();
        const RandomStream stream = random_stream(p.dropout, work.batch, work.head);
        unroll<cfg::block_n / 16>([&](int block) {
            u32 words[4];
            random_words(words, p, stream, own_row(), step.n() * cfg::block_n + 16 * block + 2 * (threadIdx.x % 4));
            unroll<4>([&](int w) {
                float &low = s[8 * block + 2 * w], &high = s[8 * block + 2 * w + 1];
                if (!kept_low<threshold>(words[w])) low = -low;
                if (!kept_high<threshold>(words[w])) high = -high;
            });
        });
    }

    // Lines 18 and 20, rounded.  A row that sees nothing may hold NaN.
    __device__ __forceinline__ void differentiate() {
        unroll<cfg::block_n / 2>([&](int i) {
            const float d = i / 2 % 2 ? delta.y : delta.x;
            s[i] *= cfg::dropout && s[i] < 0 ? d : dp[i] - d;
        });
        if constexpr (may_hide_rows) {
            const bool empty[2] = {stat.x == minus_infinity(), stat.y == minus_infinity()};
            if (uniform(empty[0] || empty[1])) {
                unroll<cfg::block_n / 2>([&](int i) { s[i] = empty[i / 2 % 2] ? 0.0f : s[i]; });
            }
        }
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
            differentiate();
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
