// End of a row tile: l, m and the normalised output leave the registers.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "sm90/fwd_softmax.cuh"

namespace sm90::fwd {

constexpr u32 store_barrier = 5;  // + warpgroup: its 128 threads around the output tile

// Row tiles reach beyond both ends of the queries.
__device__ __forceinline__ bool is_query(const Params& p, i32 row) {
    return static_cast<u32>(row) < static_cast<u32>(p.n_queries);
}

// A row's l, of its sum relative to the lazy reference.
__device__ __forceinline__ float sum_at_maximum(const Softmax& state, int r, float top, float sum) {
    const float above = fmaf(top, state.scale, state.shift[r]);  // the reference, in powers of two; of a far row it is the maximum
    return top == minus_infinity() ? 0.0f : sum * ptx::ex2(fabsf(above) < far / 2 ? -above : 0.0f);
}

// Algorithm 2, line 16: writes l and m of the thread's rows; `sum` is l relative to the lazy reference.  Comes after the output, whose fence
// would wait for these writes.
__device__ __forceinline__ void write_statistics(const Params& p, const Work& work, i32 row, const Softmax& state,
                                                 const float (&sum)[2]) {
    if constexpr (!cfg::statistics) return;
    float* l = static_cast<float*>(p.l.data) + slice_of(p.l, work.batch, work.head);
    float* m = static_cast<float*>(p.m.data) + slice_of(p.m, work.batch, work.head);
    unroll<2>([&](int r) {
        const float top = quad_max(state.top[r]);
        const i32 i = row + 8 * r;
        if (threadIdx.x % 4 == 0 && is_query(p, i)) {
            const bool empty = top == minus_infinity();
            l[i * p.l.row] = sum_at_maximum(state, r, top, sum[r]);
            m[i * p.m.row] = empty ? minus_infinity() : cfg::prescaled ? top : natural_score(top, fabsf(static_cast<float>(p.scale)));
        }
    });
}

// Rounds 16 columns of the warpgroup's rows into shared memory at `tile`.
__device__ __forceinline__ void stage_columns(const Output& o, u32 tile, u32 warpgroup, int block) {
    const u32 thread = place_of_thread(), lane = thread % 32;
    const u32 row = 64 * warpgroup + 16 * (thread / 32) + lane % 16;
    const u32 chunk = (2 * (block % 4) + lane / 16) ^ (row % 8);
    const float* x = o + 8 * block;
    ptx::stmatrix_x4(tile + ((block / 4) * cfg::block_m + row) * row_bytes + 16 * chunk, pack(x[0], x[1]),
                     pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// Hands the warpgroup's staged rows to the copy engine.
__device__ __forceinline__ void store_output(const ptx::TensorMap& map, u32 tile, u32 warpgroup, const Work& work) {
    ptx::async_proxy_fence();
    ptx::barrier_sync(store_barrier + warpgroup, 128);
    const i32 row = work.row + 64 * static_cast<i32>(warpgroup);
    // Rows past the end are left out by the copy engine; it must not begin before the first.
    if (place_of_thread() == 0 && row >= 0) {
        unroll<slabs_v>([&](int slab) {
            ptx::tensor_store(map, tile + (slab * cfg::block_m + 64 * warpgroup) * row_bytes, 64 * slab, row, work.head,
                              work.batch);
        });
        ptx::bulk_commit();
    }
}

// Writes the thread's two rows as they are, without shared memory: four lanes fill a 32-byte sector.
__device__ __forceinline__ void write_float(const Output& o, const Params& p, const Operand& array, const Work& work, i32 row) {
    float* base = static_cast<float*>(array.data) + slice_of(array, work.batch, work.head);
    unroll<cfg::head_dim_v / 4>([&](int i) {
        const i32 at = row + 8 * (i % 2), column = 8 * (i / 2) + 2 * (threadIdx.x % 4);
        if (is_query(p, at) && column < p.head_dim_v)
            *reinterpret_cast<float2*>(base + at * array.row + column) = make_float2(o[2 * i], o[2 * i + 1]);
    });
}

}  // namespace sm90::fwd
