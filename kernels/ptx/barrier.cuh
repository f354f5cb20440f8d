// Named barriers (1-15; 0 is __syncthreads): `sync` waits for `threads` arrivals, `arrive` counts without waiting.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ void barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace ptx
