// Moves registers between warpgroups: the giver calls `release`, the taker blocks in `claim` until the pool has them.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

template <u32 registers>
__device__ __forceinline__ void registers_release() {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <u32 registers>
__device__ __forceinline__ void registers_claim() {
    static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace ptx
