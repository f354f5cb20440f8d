// What happens to a tile of scores between the products: mask, softmax from the stored statistics, dropout, dS.
//
// Results of one warp, rows row0 + 16 m + g (+ 8), keys key0 + 8 n + 2q (+ 1): the layout of every accumulator.
#pragma once
#include "attn/math.cuh"
#include "attn/philox.cuh"
#include "attn/score.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_layout.cuh"
#include "sm80/bwd_product.cuh"

namespace sm80 {

constexpr int score_tiles_m = scores_rows / 16, score_tiles_n = scores_keys / 8;
using Scores = Acc[score_tiles_m][score_tiles_n][4];
using RowValues = Acc[score_tiles_m][2];

__device__ __forceinline__ void load_row_values(RowValues& values, u32 vector) {
    const u32 g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) ptx::load_shared(values[m][half], vector + (16 * m + 8 * half + g) * int(sizeof(Acc)));
}

// One bit per element of this lane: 1 = not to be seen.  Found before the product, when registers are free and the looking up of masks
// can overlap with it.
constexpr int score_elements = score_tiles_m * score_tiles_n * 4;
using Hidden = u32[(score_elements + 31) / 32];

__device__ __forceinline__ void find_hidden(Hidden& hidden, const Params& p, const Head& head, i32 row0, i32 key0) {
    const i32 lane = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32;  // the keys' masks are not kept in registers
#pragma unroll
    for (int word = 0; word < (score_elements + 31) / 32; ++word) hidden[word] = 0;
#pragma unroll
    for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const i32 key = key0 + 8 * n + lane % 4 * 2 + odd;
            const KeyMask mask(p, head.instance, head.mask_offset, key);
#pragma unroll
            for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const i32 row = min(row0 + 16 * m + 8 * half + lane / 4, p.n_queries - 1);
                    const int element = (m * score_tiles_n + n) * 4 + 2 * half + odd;
                    if (!mask.visible(p, row, key)) hidden[element / 32] |= 1u << element % 32;
                }
        }
}

// Algorithm 4 line 12: scores that may not be seen become -inf.
__device__ __forceinline__ void mask_scores(Scores& s, const Hidden& hidden) {
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int element = (m * score_tiles_n + n) * 4 + i;
                if (hidden[element / 32] >> element % 32 & 1) s[m][n][i] = -infinity<Acc>();
            }
}

// Raw products to scores in natural units: scale, softcap, bias.  What is hidden stays -inf.
__device__ __forceinline__ Acc finish_score(Acc raw, Acc& slope, const Params& p, const Head& head, i32 row, i32 key) {
    Acc s = raw * Acc(p.scale);
    if constexpr (cfg::softcap) {
        const Acc t = tanh_of<Elem>(s * Acc(1 / p.softcap));
        slope = 1 - t * t;
        s = t * Acc(p.softcap);
    }
    if constexpr (cfg::bias) {
        if (row < p.n_queries && key < p.n_keys) s += bias_at(p, head.bias, row, key);
    }
    return raw == -infinity<Acc>() ? raw : s;
}

// Algorithm 4 line 13: scores to probabilities.
__device__ __forceinline__ void probabilities(Scores& s, Scores& slope, const RowValues& stat, const RowValues& inverse, const Params& p,
                                               const Head& head, i32 row0, i32 key0) {
    const float to_log2 = static_cast<float>(cfg::prescaled ? kLog2e : p.scale * kLog2e);
    const Log2Factor<Acc> log2_e = Log2Factor<Acc>::make(kLog2e);
    const i32 lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                Acc x = s[m][n][i];
                if constexpr (cfg::prescaled)
                    x = finish_score(x, slope[m][n][i], p, head, row0 + 16 * m + lane / 4 + i / 2 * 8, key0 + 8 * n + lane % 4 * 2 + i % 2);
                if constexpr (split_stat)
                    s[m][n][i] = exp2_product((cfg::prescaled ? x : x * Acc(p.scale)) - stat[m][i / 2], log2_e) * inverse[m][i / 2];
                else
                    s[m][n][i] = ptx::ex2(fmaf(static_cast<float>(x), to_log2, static_cast<float>(stat[m][i / 2])));
            }
}

// Algorithm 4 lines 14 and 15: the sign bit marks what the forward dropped.
__device__ __forceinline__ void mark_dropped(Scores& s, const Params& p, const Head& head, i32 row0, i32 key0) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const i32 lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; n += 2) {
            u32 words[4];
            random_words(words, p.dropout, head.random, row0 + 16 * m + lane / 4, key0 + 8 * n + lane % 4 * 2);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                Acc(&tile)[4] = s[m][n + w / 2];
                if (!kept_low<threshold>(words[w])) tile[w % 2 * 2] = -tile[w % 2 * 2];
                if (!kept_high<threshold>(words[w])) tile[w % 2 * 2 + 1] = -tile[w % 2 * 2 + 1];
            }
        }
}

// Where p is 0, dP may be anything (a hidden key's v); it must not turn 0 * dP into NaN.
__device__ __forceinline__ void mask_gradients(Scores& dp, const Scores& prob) {
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dp[m][n][i] = prob[m][n][i] == 0 ? Acc(0) : dp[m][n][i];
}

// Algorithm 4 line 20, in place of dP: dS = P (dP - D), all divided by the scale of dropout; a dropped element's dP is 0.
__device__ __forceinline__ void score_gradients(Scores& dp, const Scores& prob, const RowValues& delta) {
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const Acc x = prob[m][n][i];
                const Acc d = delta[m][i / 2];
                dp[m][n][i] = x * (cfg::dropout && x < 0 ? d : dp[m][n][i] - d);
            }
}

// P times the slope of the softcap, which dS needs.
__device__ __forceinline__ void scale_by(Scores& prob, const Scores& slope) {
#pragma unroll
    for (int m = 0; m < score_tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < score_tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) prob[m][n][i] *= slope[m][n][i];
}

// Shared addresses of a tile's operands and results; numbers: stat, delta, 1 / l of its rows.
struct TileAddresses {
    u32 q, k, dout, v, numbers, p, ds;
};

// Where this warp's part of a tile starts.
__device__ __forceinline__ i32 warp_score_row() { return threadIdx.x / 32 % scores_m * scores_rows; }
__device__ __forceinline__ i32 warp_score_key() { return threadIdx.x / 32 / scores_m * scores_keys; }

// Algorithm 4 lines 11-15, 17-20 for this warp's part of a tile.  P goes to shared memory if asked for.  ds: the gradient by what enters
// the softcap, or (behind_cap) by what leaves it, which is the gradient by the bias.
template <bool keep_p, bool behind_cap>
__device__ __forceinline__ void find_ds(Scores& ds, const TileAddresses& at, const Params& p, const Head& head, i32 first_row, i32 first_key,
                                         bool partial) {
    const i32 row = warp_score_row(), key = warp_score_key();
    const u32 p_shared = at.p + row * p_stride + key * int(sizeof(Elem));
    const u32 numbers = at.numbers + row * int(sizeof(Acc));
    RowValues stat, delta, inverse;
    load_row_values(stat, numbers);
    if constexpr (split_stat) load_row_values(inverse, numbers + 2 * stat_bytes);
    Hidden hidden;
    if (partial) find_hidden(hidden, p, head, first_row + row, first_key + key);
    Scores s, slope;
    clear(s);
    product<cfg::head_dim, Along::columns, qk_stride, Along::columns, qk_stride>(  // line 11
        s, at.q + row * qk_stride, at.k + key * qk_stride);
    if (partial) mask_scores(s, hidden);
    probabilities(s, slope, stat, inverse, p, head, first_row + row, first_key + key);
    if constexpr (cfg::dropout) mark_dropped(s, p, head, first_row + row, first_key + key);
    if constexpr (cfg::softcap && !behind_cap) {  // P makes room for P times the slope of the cap
        if constexpr (keep_p) store_rounded<p_stride, cfg::dropout != 0>(p_shared, s);
        scale_by(s, slope);
    }
    clear(ds);
    product<cfg::head_dim_v, Along::columns, v_stride, Along::columns, v_stride>(  // line 17
        ds, at.dout + row * v_stride, at.v + key * v_stride);
    // Only after the product: its loads would have to wait for the stores.
    if constexpr (keep_p && !cfg::softcap) store_rounded<p_stride, cfg::dropout != 0>(p_shared, s);
    load_row_values(delta, numbers + stat_bytes);
    if (partial) mask_gradients(ds, s);
    score_gradients(ds, s, delta);
}

// The same with dS to shared memory.
template <bool keep_p>
__device__ __forceinline__ void scores_to_shared(const TileAddresses& at, const Params& p, const Head& head, i32 first_row, i32 first_key,
                                                  bool partial) {
    if (threadIdx.x / 32 >= scores_warps) return;
    Scores ds;
    find_ds<keep_p, false>(ds, at, p, head, first_row, first_key, partial);
    store_rounded<p_stride, false>(at.ds + warp_score_row() * p_stride + warp_score_key() * int(sizeof(Elem)), ds);
}

}  // namespace sm80
