// Scores of a warpgroup's 64 query rows against a tile of keys, to P, to dS: for kernels whose warpgroups own rows.
#pragma once
#include "attn/bwd_workspace.cuh"
#include "attn/mask.cuh"
#include "attn/philox.cuh"
#include "sm90/scores.cuh"

namespace sm90 {

// Self has work() with the rows' head and batch, own_row(), the thread's first row, and takes_slopes, whether dS is the gradient by what enters softcap
// and function or by what leaves them; it may have a bias_of() and mask_scores() of its own.  A step says n(), which tile of `keys` keys it is, partial(),
// whether elements must be tested, and far(), whether some row is (attn/bwd_workspace.cuh).
template <class Self, int keys = cfg::block_n>
struct RowScores {
    using Scores = float[keys / 2];  // 64 queries x that many keys

    const Params& p;
    float2 stat, delta;  // of the thread's two rows, which lie 8 apart
    Scores s, dp;

    __device__ __forceinline__ const Self& self() const { return static_cast<const Self&>(*this); }
    __device__ __forceinline__ Self& self() { return static_cast<Self&>(*this); }

    // Element i belongs to row i / 2 % 2 of the thread's two, and to this key of the tile, counted from twice its place in the quad.
    __device__ __forceinline__ static constexpr int key_of(int i) { return 8 * (i >> 2) + (i & 1); }

    __device__ __forceinline__ float bias_of(int, i64 offset, i32 row, i32 key) const { return bias_at(p, offset, row, key); }

    // Raw products to scores where there is a function or a bias: take(i, score and slope).
    template <class Step, class Take>
    __device__ __forceinline__ void find_scores(Step step, const Take& take) const {
        const auto& work = self().work();
        const i64 offset = cfg::bias ? slice_of(p.bias, work.batch, work.head) : 0;
        const i32 row = self().own_row(), first = step.n() * keys + 2 * (threadIdx.x % 4);
        const TracedHead head = TracedHead::of(p, work.batch, work.head);
        const TracedRow rows[2] = {TracedRow::of(p, head, row), TracedRow::of(p, head, row + 8)};
        unroll<keys / 8, 2>([&](int eight, int odd) {
            const i32 key = first + key_of(4 * eight + odd);
            const TracedKey traced = TracedKey::of(p, head, key);
            unroll<2>([&](int r) {
                const int i = 4 * eight + 2 * r + odd;
                take(i, score_with_bias(p, s[i], cfg::bias ? self().bias_of(i, offset, row + 8 * r, key) : 0.0f, head, rows[r], traced));
            });
        });
    }

    // Lines 13 to 15 where slopes come with the scores: P, times its slope, in place of the products, of which hidden ones are -inf.
    template <class Step>
    __device__ __forceinline__ void weigh_apart(Step step) {
        float tops[2] = {};
        if (uniform(step.partial())) {
            self().mask_scores(step);
            if (uniform(step.far())) find_maxima(tops);
        }
        find_scores(step, [&](int i, const Capped& x) {
            const int r = i / 2 % 2;
            const float shift = r ? stat.y : stat.x;
            const bool hidden = s[i] == minus_infinity() || (!cfg::additive && shift == minus_infinity());
            const float score = hidden ? minus_infinity() : rounded_difference(x.score, tops[r]);
            const float weight = ptx::ex2(fmaf(score, static_cast<float>(kLog2e), shift));
            s[i] = !Self::takes_slopes ? weight : cfg::score && weight == 0.0f ? 0.0f : weight * x.slope;
        });
    }

    __device__ __forceinline__ MaskSlices mask_slices() const {
        const auto& work = self().work();
        return {column_masks > 0 || boolean_mask ? slice_of(p.table, work.batch, work.head) : 0, block_mask ? slice_of(p.mask, work.batch, work.head) : 0, 0,
                function_mask ? static_cast<i32>(slice_of(p.function, work.batch, work.head)) : 0};
    }

    // Hidden scores become -inf, whatever they were; so do those of rows that see nothing.
    template <class Step>
    __device__ __forceinline__ void mask_scores(Step step) {
        const MaskSlices slices = mask_slices();
        const i32 row = self().own_row(), first = step.n() * keys + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < keys / 2; i += 4)
            unroll<2>([&](int e) {
                const i32 key = first + key_of(i + e);
                const KeyMaskOf<true> mask(p, slices, key);
                if (!mask.visible(p, min(row, p.n_queries - 1), key)) s[i + e] = minus_infinity();
                if (!mask.visible(p, min(row + 8, p.n_queries - 1), key)) s[i + e + 2] = minus_infinity();
            });
    }

    // Of far rows; else 0.
    __device__ __forceinline__ void find_maxima(float (&top)[2]) const {
        const auto& work = self().work();
        const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, work.batch, work.head);
        unroll<2>([&](int r) {
            top[r] = maxima[min(self().own_row() + 8 * r, p.n_queries - 1) * p.m.row];
            if (!is_far_row(top[r])) top[r] = 0.0f;
        });
    }

    // Takes the maximum from the scores of far rows.
    __device__ __forceinline__ void subtract_maxima() {
        const float scale = cfg::prescaled ? 1.0f : fabsf(static_cast<float>(p.scale)), inverse = __fdividef(1.0f, scale);
        float top[2];
        find_maxima(top);
        unroll<keys / 2>([&](int i) { s[i] = subtract_far(s[i], top[i / 2 % 2], scale, inverse); });
    }

    template <class Step>
    __device__ __forceinline__ void weigh_plain(Step step) {
        const float scale = score_scale(p);
        if constexpr (cfg::bias || cfg::score) find_scores(step, [&](int i, const Capped& x) { s[i] = x.score; });
        else if constexpr (cfg::prescaled) prescale(s, p);
        if (uniform(step.partial())) {
            self().mask_scores(step);
            if (uniform(step.far())) subtract_maxima();
        }
        unroll<keys / 2>([&](int i) {
            const float score = s[i];
            s[i] = ptx::ex2(fmaf(score, scale, i / 2 % 2 ? stat.y : stat.x));
            if constexpr (cfg::softcap && Self::takes_slopes) s[i] *= cap_slope(p, score);
        });
    }

    // Algorithm 4, lines 13 to 15: P in place of the scores; what dropout drops is marked by its sign.  With a softcap, `dp` of line 17 is still to
    // come, and the slope of the cap joins P at once: P itself is needed no more.
    template <class Step>
    __device__ __forceinline__ void weigh(Step step) {
        if constexpr (slopes_apart) weigh_apart(step);
        else weigh_plain(step);
        if constexpr (cfg::dropout) mark_dropped(step);
    }

    template <class Step>
    __device__ __forceinline__ void mark_dropped(Step step) {
        constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
        const auto& work = self().work();
        const RandomStream stream = random_stream(p.dropout, work.batch, work.head);
        unroll<keys / 16>([&](int block) {
            u32 words[4];
            random_words(words, p, stream, self().own_row(), step.n() * keys + 16 * block + 2 * (threadIdx.x % 4));
            unroll<4>([&](int w) {
                float &low = s[8 * block + 2 * w], &high = s[8 * block + 2 * w + 1];
                if (!kept_low<threshold>(words[w])) low = -low;
                if (!kept_high<threshold>(words[w])) high = -high;
            });
        });
    }

    // Lines 18 and 20, in place of P.  A row that sees nothing may hold NaN.
    template <bool may_hide_rows>
    __device__ __forceinline__ void differentiate() {
        unroll<keys / 2>([&](int i) {
            const float d = i / 2 % 2 ? delta.y : delta.x;
            s[i] *= cfg::dropout && s[i] < 0 ? d : dp[i] - d;
        });
        if constexpr (may_hide_rows) {
            const bool empty[2] = {stat.x == minus_infinity(), stat.y == minus_infinity()};
            if (uniform(empty[0] || empty[1])) {
                unroll<keys / 2>([&](int i) { s[i] = empty[i / 2 % 2] ? 0.0f : s[i]; });
            }
        }
    }
};

}  // namespace sm90
