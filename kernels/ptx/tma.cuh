// The bulk tensor copy engine: whole tiles between global and shared memory, described by a tensor map.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// Opaque to us; the driver encodes it and a kernel takes it by value as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    u64 opaque[16];
};

// Cache policies, as encoded by createpolicy.fractional for a fraction of 1.
constexpr u64 evict_first = 0x12F0000000000000ull;
constexpr u64 evict_last = 0x14F0000000000000ull;
constexpr u64 evict_normal = 0x1000000000000000ull;

__device__ __forceinline__ void tensor_map_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the box at element coordinates (column, row, head, batch) to `destination`; its bytes count on `barrier`.
__device__ __forceinline__ void tensor_load(u32 destination, const TensorMap& map, u32 barrier, u64 policy,
                                            i32 column, i32 row, i32 head, i32 batch) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(destination),
        "l"(&map), "r"(barrier), "l"(policy), "r"(column), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Copies a tile from shared to global memory; elements outside the tensor are dropped.
__device__ __forceinline__ void tensor_store(const TensorMap& map, u32 source, i32 column, i32 row, i32 head,
                                             i32 batch) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(source), "r"(column), "r"(row), "r"(head), "r"(batch)
                 : "memory");
}

// True in one lane of a warp.  Copies behind this condition are issued one after the other; behind any other one the assembler puts each of
// them into a loop over the lanes that might be there.
__device__ __forceinline__ bool elected() {
    u32 chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
}

// `bytes` (a multiple of 16) of consecutive memory, counted on `barrier`.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same with a cache policy.
__device__ __forceinline__ void bulk_load(u32 destination, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(destination),
        "l"(source), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

// The other way, in a group that must be committed.
__device__ __forceinline__ void bulk_store(void* destination, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}

// Adds `bytes` (a multiple of 16) of float32 from shared memory to global memory.
__device__ __forceinline__ void bulk_add(float* destination, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination),
                 "r"(source), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until the sources of all but the newest `pending` store groups of this thread may be overwritten.
template <int pending>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Waits until all but the newest `pending` store groups of this thread are complete, their results visible to the thread.
template <int pending>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(pending) : "memory");
}

// Orders this thread's ordinary shared-memory writes before reads by the copy engine and the tensor cores.
__device__ __forceinline__ void async_proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders this thread's ordinary accesses and those of the copy engine, to any memory, both ways.
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace ptx
