// Scores from raw products when something other than a positive scale stands between them: softcap, function, bias, scale <= 0.
//
//   s = scale product  or  softcap tanh(scale product / softcap),   then s = traced::score(s, b, h, i, j),   then s += bias
//
// The forward and the backward make them by the same operations in the same order: the backward's exp(s - m) / l add up to 1 only if s is
// what m and l were made from.
#pragma once
#include "attn/math.cuh"
#include "attn/place.cuh"

// What the softcap, or softcap, function and bias, make of a product; and its derivative by the scaled product.
struct Capped {
    cfg::acc score, slope;
};

// 16-bit input: tanh x = 1 - 2 r with r = 1 / (1 + e^2x), to about 2^-22; its slope is 4 r (1 - r).
__device__ __forceinline__ Capped cap_product(const Params& p, cfg::acc product) {
    const cfg::acc cap = static_cast<cfg::acc>(p.softcap);
    if constexpr (sizeof(cfg::elem) == 2) {
        const float r = ptx::rcp(1.f + ptx::ex2(product * static_cast<float>(p.cap_scale * (2 * kLog2e))));
        return {fmaf(-2.f * cap, r, cap), fmaf(-4.f * r, r, 4.f * r)};
    } else {
        const cfg::acc t = tanh_of(product * static_cast<cfg::acc>(p.cap_scale));
        return {product_of(cap, t), 1 - t * t};
    }
}

// One score before function and bias.
__device__ __forceinline__ cfg::acc cap_score(const Params& p, cfg::acc product) {
    if constexpr (cfg::softcap) return cap_product(p, product).score;
    else return product_of(product, static_cast<cfg::acc>(p.scale));
}

// The bias at a row and key, or where that lies beyond the last ones, at those.
__device__ __forceinline__ cfg::acc bias_at(const Params& p, i64 offset, i32 row, i32 key) {
    const auto* bias = static_cast<const cfg::bias_elem*>(p.bias.data) + offset;
    return to_acc(bias[min(row, p.n_queries - 1) * p.bias.row + min(key, p.n_keys - 1) * p.bias.col]);
}

// A bias of -inf that is broadcast along rows hides a key from all of them, as a mask does.
__device__ __forceinline__ bool bias_hides_keys(const Params& p) { return cfg::bias && p.bias.row == 0; }
__device__ __forceinline__ bool bias_shows(const Params& p, i64 offset, i32 key) {
    return !bias_hides_keys(p) || bias_at(p, offset, 0, key) != -infinity<cfg::acc>();
}

// A score before its bias: the function of what the softcap leaves.  Of a function that adds, the scale and the addition are one operation.
template <class Head, class Row, class Key>  // TracedHead, TracedRow, TracedKey
__device__ __forceinline__ Capped function_score(const Params& p, cfg::acc product, const Head& head, const Row& row, const Key& key) {
    Capped x = {product, 1};
    if constexpr (cfg::softcap) x = cap_product(p, product);
    if constexpr (cfg::additive) {
        cfg::acc addend;
        traced::addend(p, head.made, row.made, key.made, x.score, head.b, head.h, row.i, key.j, addend);
        x.score = cfg::softcap ? sum_of(x.score, addend) : fma_of(product, static_cast<cfg::acc>(p.scale), addend);
    } else {
        cfg::acc slope;
        if constexpr (!cfg::softcap) x.score = cap_score(p, product);
        traced::score_and_slope(p, head.made, row.made, key.made, x.score, head.b, head.h, row.i, key.j, x.score, slope);
        x.slope *= slope;
    }
    return x;
}

// A score, and its slope.  bias_offset: of the head's slice; place: TracedHead, TracedRow and TracedKey for a function.  A bias of -inf hides
// whatever the product is.
template <class... Place>
__device__ __forceinline__ Capped finish_score(const Params& p, cfg::acc product, i64 bias_offset, i32 row, i32 key, const Place&... place) {
    if constexpr (cfg::score || cfg::softcap) {
        Capped x;
        if constexpr (cfg::score) x = function_score(p, product, place...);
        else x = cap_product(p, product);
        if constexpr (!cfg::bias) return x;
        const cfg::acc bias = bias_at(p, bias_offset, row, key);
        return {bias == -infinity<cfg::acc>() ? bias : sum_of(x.score, bias), x.slope};
    }
    if constexpr (!cfg::bias) return {cap_score(p, product), 1};
    const cfg::acc bias = bias_at(p, bias_offset, row, key);
    return {bias == -infinity<cfg::acc>() ? bias : fma_of(product, static_cast<cfg::acc>(p.scale), bias), 1};
}
