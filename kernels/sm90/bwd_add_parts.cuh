// dK and dV of kernels/sm90/bwd.cu for whose key tiles there were several blocks (cfg::in_parts): their parts, added in order and rounded once; or the only
// one, to which all added theirs.
//
// dk_acc, dv_acc: [batch][kv_heads][splits][n_keys][columns].
#pragma once
#include "attn/math.cuh"
#include "attn/pack.cuh"
#include "attn/params.cuh"

namespace sm90::bwd {

constexpr i32 unit_columns = 8;  // that a thread takes at a time

__device__ __forceinline__ i64 units_of(const Params& p, i32 columns) { return i64(p.batch) * p.kv_heads * p.n_keys * (columns / unit_columns); }

// The unit with this number of one of the gradients.
__device__ __forceinline__ void add_unit(const Params& p, const void* parts, void* gradient, i32 columns, i64 unit) {
    const i64 stride = i64(p.n_keys) * (columns / unit_columns), head = unit / stride;
    const float4* from = static_cast<const float4*>(parts) + 2 * (unit + head * (p.splits - 1) * stride);
    float sum[unit_columns] = {};
#pragma unroll 4
    for (i32 part = 0; part < p.splits; ++part, from += 2 * stride) {
        const float4 low = from[0], high = from[1];
        sum[0] += low.x, sum[1] += low.y, sum[2] += low.z, sum[3] += low.w;
        sum[4] += high.x, sum[5] += high.y, sum[6] += high.z, sum[7] += high.w;
    }
    using Unit = Pack<cfg::grad, unit_columns>;
    Unit rounded;
    unroll<unit_columns>([&](int i) { rounded.x[i] = round_to<cfg::grad>(sum[i]); });
    static_cast<Unit*>(gradient)[unit] = rounded;
}

// The first blocks of a grid have a unit for each thread; true in these.
__device__ __forceinline__ bool add_parts(const Params& p) {
    const i64 keys = units_of(p, p.head_dim), all = keys + units_of(p, p.head_dim_v), unit = blockIdx.x * i64(blockDim.x) + threadIdx.x;
    if (unit < keys) add_unit(p, p.dk_acc, p.dk.data, p.head_dim, unit);
    else if (unit < all) add_unit(p, p.dv_acc, p.dv.data, p.head_dim_v, unit - keys);
    return blockIdx.x * i64(blockDim.x) < all;
}

}  // namespace sm90::bwd
