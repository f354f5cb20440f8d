// A value that the compiler must not look through, nor compute ahead of its place.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ i64 opaque(i64 value) {
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// Zero in the register that x has.  Assigned under a condition, a zero may cost a copy of x in every turn of a loop.
__device__ __forceinline__ void set_zero(double& x) { asm volatile("mov.f64 %0, 0d0000000000000000;" : "+d"(x)); }
__device__ __forceinline__ void set_zero(float& x) { asm volatile("mov.f32 %0, 0f00000000;" : "+f"(x)); }

}  // namespace ptx
