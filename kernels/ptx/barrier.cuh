// How the warps of a block wait for each other and for the copy engine.
#pragma once
#include "ptx/shared.cuh"

namespace ptx {

// Named barriers (1-15; 0 is __syncthreads): `sync` waits for `threads` arrivals, `arrive` counts without waiting.
__device__ __forceinline__ void barrier_sync(u32 id, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits as `sync` does, and says whether it holds for any of the threads.
__device__ __forceinline__ bool barrier_any(u32 id, u32 threads, bool condition) {
    u32 any;
    asm volatile(
        "{\n.reg .pred mine, some;\nsetp.ne.u32 mine, %1, 0;\nbar.red.or.pred some, %2, %3, mine;\nselp.u32 %0, 1, 0, some;\n}"
        : "=r"(any)
        : "r"(static_cast<u32>(condition)), "r"(id), "r"(threads)
        : "memory");
    return any != 0;
}

__device__ __forceinline__ void barrier_arrive(u32 id, u32 threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// mbarrier: a shared-memory barrier that counts both arriving threads and bytes delivered by the copy engine.
__device__ __forceinline__ void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine and to the other CTAs of a cluster.
__device__ __forceinline__ void mbarrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// One arrival that also announces `bytes` still to be delivered before the phase may complete.
__device__ __forceinline__ void mbarrier_arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Blocks until the phase of the given parity has completed; a fresh barrier counts as having completed parity 1.
__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// Has the phase of the given parity completed?  Does not wait.
__device__ __forceinline__ bool mbarrier_passed(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}

// Lets the next launch begin, if it may before this one has ended, where multiprocessors have no more blocks of this one.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits for the end of the launch before, if this one began before.
__device__ __forceinline__ void await_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
