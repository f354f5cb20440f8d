// What all kernels make of raw products on their way to probabilities.
#pragma once
#include "attn/score.cuh"
#include "sm90/split_bias.cuh"

namespace sm90 {

constexpr bool adds_bias = cfg::bias && !cfg::split_bias;  // do threads?
constexpr int sign = cfg::negate ? -1 : 1;  // of the scale: raw scores are (sign * q) k^T

__device__ __forceinline__ float minus_infinity() { return -infinity<float>(); }

// What turns scores into powers of two.
__device__ __forceinline__ float score_scale(const Params& p) {
    return static_cast<float>((cfg::prescaled ? 1.0 : fabs(p.scale)) * kLog2e);
}

// Softcap, and scales that no maximum survives: raw products become scores before anything else.
template <int n>
__device__ __forceinline__ void prescale(float (&s)[n], const Params& p) {
    unroll<n>([&](int i) { s[i] = cap_score(p, s[i]); });
}

// A score from its raw product where there is a function or a bias, and its slope; place: TracedHead, TracedRow and TracedKey.
template <class... Place>
__device__ __forceinline__ Capped score_with_bias(const Params& p, float product, float bias, const Place&... place) {
    if constexpr (!cfg::score && !cfg::softcap) return {fmaf(product, static_cast<float>(p.scale), bias), 1.0f};
    Capped x = {product, 1.0f};
    if constexpr (cfg::score) x = function_score(p, product, place...);
    else x = cap_product(p, product);
    if constexpr (cfg::bias) x.score = sum_of(x.score, bias);
    return x;
}

// Slopes that no score tells: P is multiplied by them as soon as it is there.
constexpr bool slopes_apart = cfg::sloped && (cfg::score || cfg::bias);

// What the softcap does to gradients, from the score behind it; a hidden score must not turn into NaN.
__device__ __forceinline__ float cap_slope(const Params& p, float score) {
    const float t = fmaxf(score * static_cast<float>(1 / p.softcap), -1.0f);
    return fmaf(-t, t, 1.0f);
}

// A score of a far row less its maximum, as the forward rounded both; in the units of the scores.
__device__ __forceinline__ float subtract_far(float score, float top, float scale, float inverse) {
    return rounded_difference(natural_score(score, scale), top) * inverse;
}

}  // namespace sm90
