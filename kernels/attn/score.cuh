// Scores from raw products when something other than a positive scale stands between them: softcap, bias, scale <= 0.
#pragma once
#include "attn/math.cuh"
#include "attn/params.cuh"

// One score before its bias.
__device__ __forceinline__ cfg::acc cap_score(const Params& p, cfg::acc product) {
    const cfg::acc s = product * static_cast<cfg::acc>(p.scale);
    if constexpr (cfg::softcap) {
        const cfg::acc cap = static_cast<cfg::acc>(p.softcap);
        return cap * tanh_of<cfg::elem>(s / cap);
    } else {
        return s;
    }
}

__device__ __forceinline__ cfg::acc bias_at(const Params& p, i64 offset, i32 row, i32 key) {
    const auto* bias = static_cast<const cfg::bias_elem*>(p.bias.data) + offset;
    return to_acc(bias[row * p.bias.row + key * p.bias.col]);
}
