// The five matrix products of a step, each on one warpgroup's part.  All are asynchronous.
//
// Scores are computed transposed, keys down and queries across: a warpgroup owns 64 keys, and its P^T and dS^T are, rounded, the
// register operands of the products that accumulate dV and dK.  Only dQ, to which all keys contribute, needs dS in shared memory.
#pragma once
#include "sm90/bwd_layout.cuh"
#include "sm90/operands.cuh"

namespace sm90 {

constexpr int sign = cfg::negate ? -1 : 1;  // of the scale: raw scores are (sign * q) k^T

using Scores = float[cfg::block_m / 2];           // 64 keys x block_m queries
using Fragments = u32[cfg::block_m / 16][4];      // the same rounded, as A operands of 16 queries each
using KeyGradient = float[cfg::head_dim / 2];     // dK of 64 keys
using ValueGradient = float[cfg::head_dim_v / 2];
using QueryGradient = float[dq_columns / 2];      // dQ of 64 rows

// S^T = K Q^T.  k: this warpgroup's rows.  The caller commits.
__device__ __forceinline__ void multiply_scores(Scores& s, u32 k, u32 q) {
    ptx::wgmma_fence();
    multiply_rows<cfg::head_dim, cfg::block_n, cfg::block_m, sign>(s, k, q);
}

// Steps of V that a warpgroup keeps in registers, as many as it has: products of 64 rows and keys read as much shared memory as they
// can multiply, these half of it.
constexpr int held_steps = by_function || cfg::block_m > 64 || cfg::dropout || cfg::softcap || cfg::mask == kMaskBlock ? 0 : 2;
using HeldValues = HeldRows<held_steps>;

// dP^T = V dO^T.  v: this warpgroup's rows.
__device__ __forceinline__ void multiply_weights(Scores& dp, const HeldValues& held, u32 v, u32 dout) {
    ptx::wgmma_fence();
    held.multiply(dp, dout);
    multiply_rows<cfg::head_dim_v, cfg::block_n, cfg::block_m, 1, held_steps>(dp, v, dout);
    ptx::wgmma_commit();
}

// dV += P^T dO, or dK += dS^T Q: the fragments' queries times the tile's rows; begun = 0: instead of +=.
template <int n>
__device__ __forceinline__ void accumulate(float (&d)[n], const Fragments& a, u32 tile, u32 begun = 1) {
    ptx::wgmma_fence();
    accumulate_rows<cfg::block_m>(d, a, tile, begun);
    ptx::wgmma_commit();
}

// dQ = dS K, over all keys of the tile.  ds: this warpgroup's rows; k: its columns.
__device__ __forceinline__ void multiply_queries(QueryGradient& dq, u32 ds, u32 k) {
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < cfg::block_n / 16; ++step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 a = ptx::wgmma_descriptor(ds, 16, eight_rows) + ((slab * cfg::block_m * row_bytes + column) >> 4);
        const u64 b = ptx::wgmma_descriptor(k, cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<dq_columns>::ss<is_bfloat16, 1, 1>(dq, a, b, step > 0);
    }
    ptx::wgmma_commit();
}

}  // namespace sm90
