// The dQ accumulator of kernels/sm90/bwd.cu to rows: scaled, rounded and put in order by way of shared memory.
//
// Grid: row tiles * instances of q, tiles fastest, from the last to the first: the L2 cache holds what was added up last.  A warpgroup
// takes the part that its namesake there added up.
#include "attn/params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/gradients.cuh"

namespace sm90::bwd {

// Rounds a part into rows of slabs at `tile`.
__device__ __forceinline__ void part_to_rows(const float4* part, u32 tile, float factor) {
    const u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const u32 row = (dq_by_rows ? 64 * warpgroup : 0) + 16 * (threadIdx.x % 128 / 32) + lane % 16;
    unroll<dq_columns / 16>([&](int block) {
        const float4 a = part[2 * block * 128], b = part[(2 * block + 1) * 128];
        const u32 chunk = (dq_by_rows ? 0 : warpgroup * (dq_columns / 8)) + 2 * block + lane / 16;
        ptx::stmatrix_x4(tile + (chunk / 8 * cfg::block_m + row) * row_bytes + 16 * (chunk % 8 ^ row % 8),
                         pack(a.x * factor, a.y * factor), pack(a.z * factor, a.w * factor), pack(b.x * factor, b.y * factor),
                         pack(b.z * factor, b.w * factor));
    });
}

// A part's rows as they are, scaled: two neighbours of a thread's two rows of 8 columns at a time.
__device__ __forceinline__ void write_part(const Params& p, const float4* part, i32 instance, i32 first, float factor) {
    const u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    const i32 row = first + (dq_by_rows ? 64 * warpgroup : 0) + 16 * (threadIdx.x % 128 / 32) + lane / 4;
    const i32 column = (dq_by_rows ? 0 : warpgroup * dq_columns) + 2 * (lane % 4);
    float* out = static_cast<float*>(p.dq.data) + (static_cast<i64>(instance) * p.n_queries + row) * p.head_dim + column;
#pragma unroll
    for (int block = 0; block < dq_columns / 8; ++block) {
        if (column + 8 * block >= p.head_dim) break;
        const float4 x = part[block * 128];
        if (row < p.n_queries) *reinterpret_cast<float2*>(out + 8 * block) = make_float2(x.x * factor, x.y * factor);
        if (row + 8 < p.n_queries)
            *reinterpret_cast<float2*>(out + 8 * p.head_dim + 8 * block) = make_float2(x.z * factor, x.w * factor);
    }
}

}  // namespace sm90::bwd

extern "C" __global__ void __launch_bounds__(128 * sm90::bwd::warpgroups) backward_convert(const __grid_constant__ Params p) {
    using namespace sm90;
    using namespace sm90::bwd;
    __shared__ __align__(128) u8 tile[slabs * cfg::block_m * row_bytes];
    const i32 block = gridDim.x - 1 - blockIdx.x, row_tile = block % p.row_tiles, instance = block / p.row_tiles;
    const i32 first = row_tile * cfg::block_m;
    const float4* part = static_cast<const float4*>(p.dq_acc) +
                         (static_cast<i64>(block) * warpgroups + threadIdx.x / 128) * (dq_part_bytes / 16) + threadIdx.x % 128;
    const float factor = static_cast<float>(p.scale * p.dropout_scale);
    if constexpr (unrounded) return write_part(p, part, instance, first, factor);
    part_to_rows(part, ptx::shared_address(tile), factor);
    __syncthreads();  // the rows are complete
    const i32 rows = min(cfg::block_m, p.n_queries - first), chunks = p.head_dim / 8;
    uint4* out = static_cast<uint4*>(p.dq.data) + (static_cast<i64>(instance) * p.n_queries + first) * chunks;
    for (i32 i = threadIdx.x; i < rows * chunks; i += 128 * warpgroups) {
        const i32 row = i / chunks, chunk = i % chunks;
        out[i] = *reinterpret_cast<const uint4*>(tile + (chunk / 8 * cfg::block_m + row) * row_bytes + 16 * (chunk % 8 ^ row % 8));
    }
}
