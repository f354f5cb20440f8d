// The dQ accumulator of kernels/sm90/bwd.cu to rows: scaled, rounded and put in order by way of shared memory.
//
// Grid: row tiles * instances of q, tiles fastest, from the last to the first: the L2 cache holds what was added up last.  A warpgroup
// takes the part that its namesake there added up.
#pragma once
#include "attn/params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/gradients.cuh"

namespace sm90::bwd {

// factor(instance): what the gradients of an instance of q are multiplied by.
template <class Factor>
__device__ __forceinline__ void convert_queries(const Params& p, const Factor& factor_of) {
    __shared__ __align__(128) u8 tile[slabs * cfg::block_m * row_bytes];
    const i32 block = gridDim.x - 1 - blockIdx.x, row_tile = block % p.row_tiles, instance = block / p.row_tiles;
    const i32 first = row_tile * cfg::block_m;
    const i32 warpgroup = threadIdx.x / 128, first_row = dq_by_rows ? 64 * warpgroup : 0, first_column = dq_by_rows ? 0 : dq_columns * warpgroup;
    constexpr int left_out = warpgroups * dq_part_bytes - dq_bytes;  // of a row tile
    const float4* part = static_cast<const float4*>(p.dq_acc) +
                         (static_cast<i64>(block) * warpgroups + warpgroup) * (dq_part_bytes / 16) - static_cast<i64>(block) * (left_out / 16) +
                         threadIdx.x % 128;
    float x[dq_columns / 2];
    unroll<dq_columns / 8>([&](int i) {
        const float4 four = 8 * i < own_dq_columns(warpgroup) ? part[i * 128] : float4{};
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    });
    const float factor = factor_of(instance);
    if constexpr (unrounded)
        return write_gradient(x, factor, p.dq.data, instance, p.n_queries, p.head_dim, first + first_row + fragment_row(), first_column);
    stage_gradient(x, factor, ptx::shared_address(tile) + (first_column / 64 * cfg::block_m + first_row) * row_bytes,
                   cfg::block_m * row_bytes, first_column / 8 % 8);
    __syncthreads();  // the rows are complete
    const i32 rows = min(cfg::block_m, p.n_queries - first), chunks = p.head_dim / 8;
    uint4* out = static_cast<uint4*>(p.dq.data) + (static_cast<i64>(instance) * p.n_queries + first) * chunks;
    for (i32 i = threadIdx.x; i < rows * chunks; i += 128 * warpgroups) {
        const i32 row = i / chunks, chunk = i % chunks;
        out[i] = *reinterpret_cast<const uint4*>(tile + (chunk / 8 * cfg::block_m + row) * row_bytes + 16 * (chunk % 8 ^ row % 8));
    }
}

}  // namespace sm90::bwd
