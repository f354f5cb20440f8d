// Stores a 16 x 16 block of 16-bit values held as a tensor-core A fragment; each lane names one 16-byte row segment.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ void stmatrix_x4(u32 address, u32 a0, u32 a1, u32 a2, u32 a3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), "r"(a1),
                 "r"(a2), "r"(a3)
                 : "memory");
}

// The same block transposed: the lanes name row segments of the transpose.
__device__ __forceinline__ void stmatrix_x4_trans(u32 address, u32 a0, u32 a1, u32 a2, u32 a3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0),
                 "r"(a1), "r"(a2), "r"(a3)
                 : "memory");
}

}  // namespace ptx
