// Combines forwards over disjoint key sets: o = sum_p (w_p / l) o_p with w_p = l_p exp(m_p - m), m = max_p m_p, l = sum_p w_p.
//
// A part without visible keys (l = 0, m = -inf) has weight 0.  No product is fused into a sum: two parts may change places, bit for bit.
// cfg::row_warps warps share a row: each takes every row_warps-th part; their sums meet in shared memory in a fixed order.
// 128 threads; lanes run along the columns.
#include "attn/math.cuh"
#include "ptx/types.cuh"

constexpr int kMaxParts = 64, kWarps = 4;
constexpr int kRows = kWarps / cfg::row_warps;  // rows per block

// Mirrored by MERGE_PARAMS in cuattn/cuda/params.py.  All arrays are contiguous.
struct MergeParams {
    const void *o[kMaxParts], *l[kMaxParts], *m[kMaxParts];
    void *o_out, *l_out, *m_out;
    i64 rows;
    i32 head_dim_v, parts;
};

using Acc = cfg::acc;

__device__ __forceinline__ Acc weight(const MergeParams& p, int part, i64 row, Acc m) {
    const Acc own = static_cast<const Acc*>(p.m[part])[row], l = static_cast<const Acc*>(p.l[part])[row];
    return own == -infinity<Acc>() ? Acc(0) : product_of(l, exp2_product(own - m, Log2Factor<Acc>::make(kLog2e)));
}

extern "C" __global__ __launch_bounds__(kWarps * 32) void attention_merge(const __grid_constant__ MergeParams p) {
    __shared__ Acc sums[kWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = warp % cfg::row_warps;
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + warp / cfg::row_warps;
    const bool live = row < p.rows;
    Acc m = -infinity<Acc>();
    for (int part = lane; live && part < p.parts; part += 32) m = max_of(m, static_cast<const Acc*>(p.m[part])[row]);
    for (int step = 16; step > 0; step /= 2) m = max_of(m, __shfl_xor_sync(~0u, m, step));
    // Every lane of every warp of the row adds up all weights in the same order.
    Acc l = 0;
    for (int part = 0; live && part < p.parts; ++part) l += weight(p, part, row, m);
    for (i32 base = 0; base < p.head_dim_v; base += 32) {
        const i32 col = base + lane;
        Acc sum = 0;
        if (live && col < p.head_dim_v) {
#pragma unroll 4
            for (int part = slot; part < p.parts; part += cfg::row_warps) {
                // Divided before the sum: a part that is alone has the share 1 and keeps its bits.
                const Acc w = weight(p, part, row, m);
                if (w != Acc(0)) sum += product_of(w / l, to_acc(static_cast<const cfg::part*>(p.o[part])[row * p.head_dim_v + col]));
            }
        }
        if constexpr (cfg::row_warps > 1) {
            sums[warp][lane] = sum;
            __syncthreads();  // all parts' sums are written
            sum = 0;
            for (int w = 0; w < cfg::row_warps; ++w) sum += sums[warp / cfg::row_warps * cfg::row_warps + w][lane];
            __syncthreads();  // sums may be written again
        }
        if (live && slot == 0 && col < p.head_dim_v) static_cast<cfg::out*>(p.o_out)[row * p.head_dim_v + col] = round_to<cfg::out>(sum);
    }
    if (live && slot == 0 && lane == 0) static_cast<Acc*>(p.l_out)[row] = l, static_cast<Acc*>(p.m_out)[row] = m;
}
