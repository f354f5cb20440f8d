// The five matrix products of a step of algorithm 4, each on one warpgroup's part.  All are asynchronous.
//
// Scores are computed transposed, keys down and queries across: a warpgroup owns 64 keys, and its P^T and dS^T are, rounded, the
// register operands of the products that accumulate dV and dK.  Only dQ, to which all keys contribute, needs dS in shared memory.
#pragma once
#include "sm90/bwd_layout.cuh"
#include "sm90/scores.cuh"

namespace sm90::bwd {

using Scores = float[cfg::block_m / 2];           // 64 keys x block_m queries
using Fragments = u32[cfg::block_m / 16][4];      // the same rounded, as A operands of 16 queries each
using KeyGradient = float[cfg::head_dim / 2];     // dK of 64 keys
using ValueGradient = float[cfg::head_dim_v / 2];
using QueryGradient = float[dq_columns / 2];      // dQ of 64 rows

// Line 11: S^T = K Q^T.  k: this warpgroup's rows.  The caller commits.
__device__ __forceinline__ void compute_s(Scores& s, u32 k, u32 q) {
    ptx::wgmma_fence();
    multiply_rows<cfg::head_dim, cfg::block_n, cfg::block_m, sign>(s, k, q);
}

// Line 17: dP^T = V dO^T.  v: this warpgroup's rows.
__device__ __forceinline__ void compute_dp(Scores& dp, u32 v, u32 dout) {
    ptx::wgmma_fence();
    multiply_rows<cfg::head_dim_v, cfg::block_n, cfg::block_m, 1>(dp, v, dout);
    ptx::wgmma_commit();
}

// A key tile's V as the consumers multiply it: out of shared memory.
struct ReadValues {
    __device__ __forceinline__ void load(u32) const {}
    __device__ __forceinline__ void multiply(Scores& dp, u32 v, u32 dout, u32) const { compute_dp(dp, v, dout); }
};

// With a split delta (attn/bwd_workspace.cuh): dP less D, so that no thread loads or subtracts it.  The registers that this saves keep a
// part of V, since a product of 64 rows and keys reads as much shared memory as it can multiply, and then half as much.
struct HeldValues {
    // Of 16 columns.  The assembler grants no more; a key tile under a column mask meets too few rows for as many.
    static constexpr int steps = cfg::mask == kMaskColumn ? 2 : 4;
    HeldRows<steps> rows;
    u32 minus_half[4];  // A: -1/2 where B has a part of D; both halves of B's 16 rows are the same 8

    __device__ __forceinline__ HeldValues() {
        const u32 column = 2 * (threadIdx.x % 4), pair = column == 0 ? 0xBF00BF00 : column == 2 ? 0xBF00 : 0;
#pragma unroll
        for (u32& columns : minus_half) columns = pair;
    }

    // v: this warpgroup's rows.
    __device__ __forceinline__ void load(u32 v) { rows.load(v); }

    __device__ __forceinline__ void multiply(Scores& dp, u32 v, u32 dout, u32 delta) const {
        ptx::wgmma_fence();
        ptx::Product<cfg::block_m>::rs<true, 1, 1>(dp, minus_half, ptx::wgmma_descriptor(delta, 16, 0), 0);
        rows.multiply(dp, dout);
        multiply_rows<cfg::head_dim_v, cfg::block_n, cfg::block_m, 1, steps>(dp, v, dout, 1);
        ptx::wgmma_commit();
    }
};

// Lines 16 and 22: dV += P^T dO, or dK += dS^T Q: the fragments' queries times the tile's rows; begun = 0: instead of +=.
template <int n>
__device__ __forceinline__ void accumulate(float (&d)[n], const Fragments& a, u32 tile, u32 begun = 1) {
    ptx::wgmma_fence();
    accumulate_rows<cfg::block_m>(d, a, tile, begun);
    ptx::wgmma_commit();
}

// Line 21: dQ = dS K, over all keys of the tile.  ds: this warpgroup's rows; k: its columns.
__device__ __forceinline__ void compute_dq(QueryGradient& dq, u32 ds, u32 k) {
    ptx::wgmma_fence();
    unroll<cfg::block_n / 16>([&](int step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 a = ptx::wgmma_descriptor(ds, 16, eight_rows) + ((slab * cfg::block_m * row_bytes + column) >> 4);
        const u64 b = ptx::wgmma_descriptor(k, cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<dq_columns>::ss<is_bfloat16, 1, 1>(dq, a, b, step > 0);
    });
    ptx::wgmma_commit();
}

}  // namespace sm90::bwd
