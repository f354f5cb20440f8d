// Two 16-bit numbers in one register.  The instructions on integers exist from sm_90 on.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ u32 mul_f16x2(u32 a, u32 b) {
    u32 r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ u32 min_u16x2(u32 a, u32 b) {
    u32 r;
    asm("min.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 max_u16x2(u32 a, u32 b) {
    u32 r;
    asm("max.u16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 max_s16x2(u32 a, u32 b) {
    u32 r;
    asm("max.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

__device__ __forceinline__ u32 add_s16x2(u32 a, u32 b) {
    u32 r;
    asm("add.s16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
#endif

}  // namespace ptx
