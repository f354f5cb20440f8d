// Shared memory by 32-bit address: plain accesses, fragments of tensor cores, asynchronous copies from global memory.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, float value) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

__device__ __forceinline__ void store_shared(u32 address, double value) {
    asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(value) : "memory");
}

__device__ __forceinline__ void store_shared_v4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_shared_v2(u32 address, float a, float b) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a), "f"(b) : "memory");
}

__device__ __forceinline__ void store_shared_v2(u32 address, double a, double b) {
    asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(address), "d"(a), "d"(b) : "memory");
}

__device__ __forceinline__ void load_shared(float& value, u32 address) {
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(double& value, u32 address) {
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(u32& value, u32 address) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(float2& value, u32 address) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(float4& value, u32 address) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void load_shared(double2& value, u32 address) {
    asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(value.x), "=d"(value.y) : "r"(address) : "memory");
}

__device__ __forceinline__ void load_shared(int4& value, u32 address) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address)
                 : "memory");
}

// ldmatrix, 8x8 tiles of 16-bit values: lanes 8i..8i+7 give the addresses (bytes, 16-byte aligned) of the rows of tile i; register i of lane l
// then holds elements (l / 4, 2 (l % 4)) and the next one of tile i, or of its transpose for _trans.
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

// Stores a 16 x 16 block of 16-bit values held as a tensor-core A fragment; each lane names one 16-byte row segment.
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

// Asynchronous copies from global to shared memory (cp.async), in groups.
//
// The copy moves `bytes` (<= size) bytes and fills the rest of the `size` bytes at `dst` with zeros; with bytes = 0 the source is
// not read, but it must still be a valid address.  Size 16 goes past the L1 cache.  Both addresses are aligned to the size.
template <int size>
__device__ __forceinline__ void cp_async(u32 dst, const void* src, u32 bytes) {
    static_assert(size == 4 || size == 8 || size == 16, "cp.async copies 4, 8 or 16 bytes");
    if constexpr (size == 16) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(size), "r"(bytes) : "memory");
    }
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `pending` of this thread's groups are still under way.  A barrier must follow before other threads' data is read.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

}  // namespace ptx
