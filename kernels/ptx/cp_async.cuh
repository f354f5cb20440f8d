// Asynchronous copies from global to shared memory (cp.async), in groups.
//
// The copy moves `bytes` (<= size) bytes and fills the rest of the `size` bytes at `dst` with zeros; with bytes = 0 the source is
// not read, but it must still be a valid address.  Size 16 goes past the L1 cache.  Both addresses are aligned to the size.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

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
