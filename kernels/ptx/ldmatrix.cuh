// Shared memory to fragments (ldmatrix), 8x8 tiles of 16-bit values.
//
// ldmatrix_x4: lanes 8i..8i+7 give the addresses (bytes, 16-byte aligned) of the rows of tile i; register i of lane l then
// holds elements (l / 4, 2 (l % 4)) and the next one of tile i, or of its transpose for _trans.
#pragma once
#include "ptx/shared.cuh"

namespace ptx {

__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

}  // namespace ptx
