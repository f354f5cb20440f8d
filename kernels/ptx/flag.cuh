// Flags in global memory by which blocks wait for one another.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// What follows sees what the writer of the value did before it.
__device__ __forceinline__ i32 load_acquire(const i32* at) {
    i32 value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(i32* at, i32 value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Orders this thread's ordinary accesses and those of the copy engine, to any memory, both ways.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ptx
