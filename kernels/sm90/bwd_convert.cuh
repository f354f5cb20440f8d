// The dQ accumulator of kernels/sm90/bwd.cu to rows: scaled, rounded and put in order by way of shared memory.
//
// Grid: row tiles * instances of q, tiles fastest, from the last to the first: the L2 cache holds what was added up last.  A warpgroup
// takes the part that its namesake there added up.  Behind these come key tiles * heads of k, of which two blocks had halves (cfg::halved).
#pragma once
#include "attn/params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/gradients.cuh"

namespace sm90::bwd {

// What both halves of a key tile's rows gave.
__device__ __forceinline__ void add_halves(const Params& p, i32 number) {
    const i32 head = number / p.split_tiles, tile = number % p.split_tiles, warpgroup = threadIdx.x / 128;
    const float4 *first = half_of_keys(p, head, tile, 0, warpgroup) + threadIdx.x % 128, *second = half_of_keys(p, head, tile, 1, warpgroup) + threadIdx.x % 128;
    const i32 key = tile * cfg::block_n + 64 * warpgroup + fragment_row();
    const auto add = [&](float factor, void* to, i32 width, i32 columns) {
#pragma unroll 1
        for (i32 column = 0; column < width; column += 16, first += 2 * 128, second += 2 * 128) {
            float x[8];
            unroll<2>([&](int i) {
                const float4 a = first[i * 128], b = second[i * 128];
                x[4 * i] = a.x + b.x, x[4 * i + 1] = a.y + b.y, x[4 * i + 2] = a.z + b.z, x[4 * i + 3] = a.w + b.w;
            });
            write_gradient(x, factor, to, head, p.n_keys, columns, key, column);
        }
    };
    add(static_cast<float>(p.scale * p.dropout_scale), p.dk.data, cfg::head_dim, p.head_dim);
    add(static_cast<float>(p.dropout_scale), p.dv.data, cfg::head_dim_v, p.head_dim_v);
}

// factor(instance): what the gradients of an instance of q are multiplied by.
template <class Factor>
__device__ __forceinline__ void convert_queries(const Params& p, const Factor& factor_of) {
    __shared__ __align__(128) u8 tile[slabs * cfg::block_m * row_bytes];
    const i32 blocks = gridDim.x - (cfg::halved ? p.batch * p.kv_heads * p.split_tiles : 0);
    if (cfg::halved && blockIdx.x >= blocks) return add_halves(p, blockIdx.x - blocks);
    const i32 block = blocks - 1 - static_cast<i32>(blockIdx.x), row_tile = block % p.row_tiles, instance = block / p.row_tiles;
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
