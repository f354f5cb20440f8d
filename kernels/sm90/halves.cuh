// The 16-bit type of the operands.
#pragma once
#include "attn/math.cuh"

namespace sm90 {

constexpr bool is_bfloat16 = same_type<cfg::elem, __nv_bfloat16>;

// Two numbers rounded to the operands' type, `low` in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    if constexpr (is_bfloat16)
        return ptx::pack_bf16(low, high);
    else
        return ptx::pack_f16(low, high);
}

// The same with negative numbers as 0.
__device__ __forceinline__ u32 pack_positive(float low, float high) {
    if constexpr (is_bfloat16)
        return ptx::pack_positive_bf16(low, high);
    else
        return ptx::pack_positive_f16(low, high);
}

}  // namespace sm90
