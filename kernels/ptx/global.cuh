// Global memory: additions, and flags by which blocks wait for one another.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// Additions that return nothing (red): the memory does the sum, in no particular order.
__device__ __forceinline__ void red_add(float* at, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

__device__ __forceinline__ void red_add(double* at, double value) {
    asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(at), "d"(value) : "memory");
}

// Two of them, 8-byte aligned.
template <class Float>
__device__ __forceinline__ void red_add_x2(Float* at, Float a, Float b) {
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(a), "f"(b) : "memory");
}

// Asks for a cache line near this multiprocessor, ahead of a load.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

// Flags.  What follows sees what the writer of the value did before it.
__device__ __forceinline__ i32 load_acquire(const i32* at) {
    i32 value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(i32* at, i32 value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

}  // namespace ptx
