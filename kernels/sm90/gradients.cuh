// Gradients of a warpgroup's 64 rows (queries or keys) leave the registers: rounded through shared memory, or unrounded.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/global.cuh"
#include "ptx/shared.cuh"
#include "sm90/operands.cuh"

namespace sm90 {

constexpr bool unrounded = sizeof(cfg::grad) == 4;

// Rounds 64 rows into slabs, the first at `tile`, `stride` bytes apart; from this unit of 16 bytes of the first slab on.
template <int n>
__device__ __forceinline__ void stage_gradient(const float (&x)[n], float factor, u32 tile, u32 stride, u32 first_chunk = 0) {
    const u32 lane = threadIdx.x % 32, row = 16 * (threadIdx.x % 128 / 32) + lane % 16;
    unroll<n / 8>([&](int block) {
        const u32 chunk = (first_chunk + 2 * (block % 4) + lane / 16) ^ (row % 8);
        u32 packed[4];
        unroll<4>([&](int w) { packed[w] = pack(x[8 * block + 2 * w] * factor, x[8 * block + 2 * w + 1] * factor); });
        ptx::stmatrix_x4(tile + block / 4 * stride + row * row_bytes + 16 * chunk, packed[0], packed[1], packed[2], packed[3]);
    });
    ptx::async_proxy_fence();
}

// Hands staged slabs to the copy engine; one thread.
template <int slab_count>
__device__ __forceinline__ void store_gradient(const ptx::TensorMap& map, u32 tile, u32 stride, i32 row, i32 head, i32 batch) {
    unroll<slab_count>([&](int slab) { ptx::tensor_store(map, tile + slab * stride, 64 * slab, row, head, batch); });
    ptx::bulk_commit();
}

// Writes a thread's two rows, from a column on, or adds them to what is there.  out: [slice][rows][columns]; row: the thread's first.
template <bool adds = false, int n>
__device__ __forceinline__ void write_gradient(const float (&x)[n], float factor, void* out, i32 slice, i32 rows, i32 columns, i32 row,
                                               i32 first_column = 0) {
    cfg::grad* base = static_cast<cfg::grad*>(out) + static_cast<i64>(slice) * rows * columns;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const i32 at = row + 8 * (i / 2 % 2), column = first_column + 8 * (i / 4) + 2 * (threadIdx.x % 4);
        if (at >= rows || column >= columns) continue;
        cfg::grad* to = base + static_cast<i64>(at) * columns + column;
        if constexpr (adds) ptx::red_add_x2(to, x[i] * factor, x[i + 1] * factor);
        else if constexpr (unrounded) *reinterpret_cast<float2*>(to) = make_float2(x[i] * factor, x[i + 1] * factor);
        else *reinterpret_cast<u32*>(to) = pack(x[i] * factor, x[i + 1] * factor);
    }
}

}  // namespace sm90
