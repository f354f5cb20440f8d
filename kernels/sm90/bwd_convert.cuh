// The dQ accumulator of kernels/sm90/bwd.cu to rows: scaled, rounded and put in order by way of shared memory.
//
// Grid: row tiles * instances of q, tiles fastest, from the last to the first: the L2 cache holds what was added up last.  A warpgroup
// takes the part that its namesake there added up.  With cfg::tail a block for each slab of dK and dV of the key tiles
// that several blocks shared comes first, with cfg::in_parts those of sm90/bwd_add_parts.cuh.
#pragma once
#include "attn/params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/bwd_add_parts.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/gradients.cuh"

namespace sm90::bwd {

// A slab of dK or dV of a key tile that several blocks shared (cfg::tail); number: of those.  padded: columns of the slices.
template <int padded>
__device__ __forceinline__ void add_slices(const Params& p, u8* tile, const void* slices, void* gradient, i32 number, i32 slab, i32 columns) {
    const i32 warpgroup = threadIdx.x / 128, key_tile = p.shared_tile + number, instance = key_tile / p.key_tiles;
    const float4* part = static_cast<const float4*>(slices) + (static_cast<i64>(number) * p.split_tiles * warpgroups + warpgroup) * (16 * padded) +
                         1024 * slab + threadIdx.x % 128;
    float sum[32] = {};
#pragma unroll 1
    for (i32 slice = 0; slice < p.split_tiles; ++slice, part += warpgroups * 16 * padded) {
        unroll<8>([&](int i) {
            const float4 four = padded % 64 == 0 || 8 * slab + i < padded / 8 ? part[128 * i] : float4{};
            sum[4 * i] += four.x, sum[4 * i + 1] += four.y, sum[4 * i + 2] += four.z, sum[4 * i + 3] += four.w;
        });
    }
    const i32 first = (key_tile - instance * p.key_tiles) * cfg::block_n, rows = min(cfg::block_n, p.n_keys - first), chunks = columns / 8;
    if constexpr (unrounded)
        return write_gradient(sum, 1.0f, gradient, instance, p.n_keys, columns, first + 64 * warpgroup + fragment_row(), 64 * slab);
    stage_gradient(sum, 1.0f, ptx::shared_address(tile) + 64 * warpgroup * row_bytes, 0);
    __syncthreads();  // the rows are complete
    uint4* out = static_cast<uint4*>(gradient) + (static_cast<i64>(instance) * p.n_keys + first) * chunks + 8 * slab;
    for (i32 i = threadIdx.x; i < 8 * rows; i += 128 * warpgroups) {
        const i32 row = i / 8, chunk = i % 8;
        if (8 * slab + chunk < chunks) out[row * chunks + chunk] = *reinterpret_cast<const uint4*>(tile + row * row_bytes + 16 * (chunk ^ row % 8));
    }
}

// factor(instance): what the gradients of an instance of q are multiplied by.
template <class Factor>
__device__ __forceinline__ void convert_queries(const Params& p, const Factor& factor_of) {
    constexpr int tile_rows = slabs * cfg::block_m, shared_rows = cfg::tail && cfg::block_n > tile_rows ? cfg::block_n : tile_rows;
    __shared__ __align__(128) u8 tile[shared_rows * row_bytes];
    if constexpr (cfg::tail) {
        const i32 number = static_cast<i32>(blockIdx.x) / (slabs + slabs_v), slab = static_cast<i32>(blockIdx.x) % (slabs + slabs_v);
        if (number < p.batch * p.kv_heads * p.key_tiles - p.shared_tile) {
            if (slab < slabs) return add_slices<cfg::head_dim>(p, tile, p.dk_acc, p.dk.data, number, slab, p.head_dim);
            return add_slices<cfg::head_dim_v>(p, tile, p.dv_acc, p.dv.data, number, slab - slabs, p.head_dim_v);
        }
    }
    if constexpr (cfg::in_parts) {
        if (add_parts(p)) return;
    }
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
