// Loads a 16 x 16 block of 16-bit values as a tensor-core A fragment; each lane names one 16-byte row segment.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ void ldmatrix_x4(u32 (&a)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace ptx
