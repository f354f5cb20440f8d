// Additions in global memory that return nothing (red): the memory does the sum, in no particular order.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ void red_add(float* at, float value) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

__device__ __forceinline__ void red_add(double* at, double value) {
    asm volatile("red.relaxed.gpu.global.add.f64 [%0], %1;" ::"l"(at), "d"(value) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Four neighbours, 16-byte aligned, in one access.
__device__ __forceinline__ void red_add_x4(float* at, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
#endif

}  // namespace ptx
