// Combines forwards over disjoint key sets: o = sum_p (w_p / l) o_p with w_p = l_p exp(m_p - m), m = max_p m_p, l = sum_p w_p.
//
// A part without visible keys (l = 0, m = -inf) has weight 0.  No product is fused into a sum: two parts may change places, bit for bit.
// cfg::row_warps warps share a row: each takes every row_warps-th part; their sums meet in shared memory in a fixed order.
// 128 threads; lanes run along the parts for the weights, then along the columns.
// Grid: rows, and groups of 32 columns (a block takes every gridDim.y-th).
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

// All parts' shares w / l of one row, two to a lane: every warp of the row finds the same ones.
struct Shares {
    static constexpr int held = kMaxParts / 32;
    Acc w[held], m = -infinity<Acc>(), l = 0;

    __device__ __forceinline__ Shares(const MergeParams& p, i64 row, bool live) {
        const int lane = threadIdx.x % 32;
        Acc own[held];
#pragma unroll
        for (int i = 0; i < held; ++i) {
            const int part = lane + 32 * i;
            const bool exists = live && part < p.parts;
            own[i] = exists ? static_cast<const Acc*>(p.m[part])[row] : -infinity<Acc>();
            w[i] = exists ? static_cast<const Acc*>(p.l[part])[row] : Acc(0);
            m = max_of(m, own[i]);
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) m = max_of(m, __shfl_xor_sync(~0u, m, step));
#pragma unroll
        for (int i = 0; i < held; ++i) {
            w[i] = own[i] == -infinity<Acc>() ? Acc(0) : product_of(w[i], exp2_product(own[i] - m, Log2Factor<Acc>::of_e()));
            l += w[i];
        }
#pragma unroll
        for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(~0u, l, step);
        // Divided before the sum: a part that is alone has the share 1 and keeps its bits.
        const Acc inverse = l == Acc(0) ? Acc(0) : Acc(1) / l;
#pragma unroll
        for (int i = 0; i < held; ++i) w[i] = w[i] == l && l != Acc(0) ? Acc(1) : product_of(w[i], inverse);
    }
    __device__ __forceinline__ Acc operator[](int part) const {
        const Acc low = __shfl_sync(~0u, w[0], part % 32), high = __shfl_sync(~0u, w[1], part % 32);
        return part < 32 ? low : high;
    }
};

extern "C" __global__ __launch_bounds__(kWarps * 32) void attention_merge(const __grid_constant__ MergeParams p) {
    __shared__ Acc sums[kWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = warp % cfg::row_warps;
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + warp / cfg::row_warps;
    const bool live = row < p.rows;
    const Shares shares(p, row, live);
    for (i32 base = blockIdx.y * 32; base < p.head_dim_v; base += gridDim.y * 32) {
        const i32 col = base + lane;
        const bool inside = live && col < p.head_dim_v;
        Acc sum = 0;
#pragma unroll 4
        for (int part = slot; part < p.parts; part += cfg::row_warps) {
            const Acc x = inside ? to_acc(static_cast<const cfg::part*>(p.o[part])[row * p.head_dim_v + col]) : Acc(0);
            const Acc w = shares[part];
            if (w != Acc(0)) sum += product_of(w, x);
        }
        if constexpr (cfg::row_warps > 1) {
            sums[warp][lane] = sum;
            __syncthreads();  // all parts' sums are written
            sum = 0;
            for (int w = 0; w < cfg::row_warps; ++w) sum += sums[warp / cfg::row_warps * cfg::row_warps + w][lane];
            __syncthreads();  // sums may be written again
        }
        if (inside && slot == 0) static_cast<cfg::out*>(p.o_out)[row * p.head_dim_v + col] = round_to<cfg::out>(sum);
    }
    if (live && slot == 0 && lane == 0 && blockIdx.y == 0) {
        static_cast<Acc*>(p.l_out)[row] = shares.l;
        static_cast<Acc*>(p.m_out)[row] = shares.m;
    }
}
