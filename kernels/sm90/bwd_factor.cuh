// What joins dQ and dK last.
#pragma once
#include "attn/score.cuh"

namespace sm90::bwd {

// The slope of all scores of a head (cfg::slopes_of_heads), without which dS is left.
template <class Head>  // TracedHead
__device__ __forceinline__ float slope_of_head(const Params& p, const Head& head) {
    if constexpr (cfg::slopes_of_heads) return function_score(p, 0.0f, head, TracedRow::of(p, head, 0), TracedKey::of(p, head, 0)).slope;
    else return 1.0f;
}

// The scale, and that of dropout; and the slope.
__device__ __forceinline__ float score_factor(const Params& p, i32 batch, i32 head) {
    const float factor = static_cast<float>(p.scale * p.dropout_scale);
    return cfg::slopes_of_heads ? factor * slope_of_head(p, TracedHead::of(p, batch, head)) : factor;
}

}  // namespace sm90::bwd
