// The two matrix products of a step, on one warpgroup's 64 rows.
#pragma once
#include "sm90/scores.cuh"
#include "sm90/fwd_layout.cuh"

namespace sm90::fwd {

using Scores = float[cfg::block_n / 2];
using Output = float[cfg::head_dim_v / 2];
using Weights = u32[cfg::block_n / 16][4];          // P as A fragments, one per 16 keys

// Both products call `beside` after each of their instructions: a warp is held up while it issues them, until the tensor
// cores have come that far, and other work costs nothing there.
constexpr int score_steps = cfg::head_dim / 16, value_steps = cfg::block_n / 16;

// S = Q K^T, asynchronous.  q is the address of this warpgroup's rows.
template <class Beside>
__device__ __forceinline__ void compute_s(Scores& s, u32 q, u32 k, const Beside& beside) {
    ptx::wgmma_fence();
    unroll<score_steps>([&](int step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 a = ptx::wgmma_descriptor(q, 16, eight_rows) + ((slab * cfg::block_m * row_bytes + column) >> 4);
        const u64 b = ptx::wgmma_descriptor(k, 16, eight_rows) + ((slab * cfg::block_n * row_bytes + column) >> 4);
        ptx::Product<cfg::block_n>::ss<is_bfloat16, sign, 0>(s, a, b, step > 0);
        beside(step);
    });
    ptx::wgmma_commit();
}

// O += P V, asynchronous.
template <class Beside>
__device__ __forceinline__ void compute_o(Output& o, const Weights& p, u32 v, const Beside& beside) {
    ptx::wgmma_fence();
    unroll<value_steps>([&](int step) {
        const u64 b = ptx::wgmma_descriptor(v, cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<cfg::head_dim_v>::rs<is_bfloat16, 1, 1>(o, p[step], b, 1);
        beside(step);
    });
    ptx::wgmma_commit();
}

}  // namespace sm90::fwd
