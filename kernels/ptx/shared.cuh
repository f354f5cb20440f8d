// Shared memory by 32-bit address: plain accesses, fragments of tensor cores, asynchronous copies from global memory.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// store_shared and load_shared of one number; store_shared_v2 and load_shared of two; load_shared of four.  r: kind of register.
#define PTX_SHARED(Type, type, r)                                                                              \
    __device__ __forceinline__ void store_shared(u32 address, Type value) {                                    \
        asm volatile("st.shared." type " [%0], %1;" ::"r"(address), r(value) : "memory");                      \
    }                                                                                                          \
    __device__ __forceinline__ void load_shared(Type& value, u32 address) {                                    \
        asm volatile("ld.shared." type " %0, [%1];" : "=" r(value) : "r"(address) : "memory");                 \
    }
#define PTX_SHARED_V2(Type, Pair, type, r)                                                                     \
    __device__ __forceinline__ void store_shared_v2(u32 address, Type a, Type b) {                             \
        asm volatile("st.shared.v2." type " [%0], {%1, %2};" ::"r"(address), r(a), r(b) : "memory");           \
    }                                                                                                          \
    __device__ __forceinline__ void load_shared(Pair& value, u32 address) {                                    \
        asm volatile("ld.shared.v2." type " {%0, %1}, [%2];" : "=" r(value.x), "=" r(value.y) : "r"(address) : "memory"); \
    }
#define PTX_LOAD_V4(Four, type, r)                                                                             \
    __device__ __forceinline__ void load_shared(Four& value, u32 address) {                                    \
        asm volatile("ld.shared.v4." type " {%0, %1, %2, %3}, [%4];"                                           \
                     : "=" r(value.x), "=" r(value.y), "=" r(value.z), "=" r(value.w)                          \
                     : "r"(address)                                                                            \
                     : "memory");                                                                              \
    }
PTX_SHARED(u32, "b32", "r")
PTX_SHARED(float, "f32", "f")
PTX_SHARED(double, "f64", "d")
PTX_SHARED_V2(u32, uint2, "b32", "r")
PTX_SHARED_V2(float, float2, "f32", "f")
PTX_SHARED_V2(double, double2, "f64", "d")
PTX_LOAD_V4(float4, "f32", "f")
PTX_LOAD_V4(int4, "s32", "r")

__device__ __forceinline__ void store_shared_v4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Four 8x8 tiles of 16-bit values, or (_trans) their transposes: lanes 8i..8i+7 give the addresses (bytes, 16-byte aligned) of the rows of tile i
// in memory; register i of lane l holds elements (l / 4, 2 (l % 4)) and the next one of tile i.
#define PTX_MATRIX(suffix, kind)                                                                               \
    __device__ __forceinline__ void ldmatrix_x4##suffix(u32 (&r)[4], u32 address) {                            \
        asm volatile("ldmatrix.sync.aligned.m8n8.x4." kind " {%0,%1,%2,%3}, [%4];"                             \
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                          \
                     : "r"(address)                                                                            \
                     : "memory");                                                                              \
    }                                                                                                          \
    __device__ __forceinline__ void stmatrix_x4##suffix(u32 address, u32 a0, u32 a1, u32 a2, u32 a3) {         \
        asm volatile("stmatrix.sync.aligned.m8n8.x4." kind " [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a0), \
                     "r"(a1), "r"(a2), "r"(a3)                                                                 \
                     : "memory");                                                                              \
    }
PTX_MATRIX(, "shared.b16")
PTX_MATRIX(_trans, "trans.shared.b16")

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
