// Combines forwards over disjoint key sets: o = sum_p (w_p / l) o_p, the shares as in attn/merge.cuh.
//
// cfg::tangents: jvps, too: lse. = sum_p (w_p / l) lse._p and, since each part's tangent of o is relative to its own tangent of lse,
// o. = sum_p (w_p / l) (o._p + (lse._p - lse.) o_p).
//
// No product is fused into a sum: two parts may change places, bit for bit.
// cfg::row_warps warps share a row: each takes every row_warps-th part; their sums meet in shared memory in a fixed order.
// cfg::width columns, neighbours, belong to a lane.  Without tangents the arrays of one of two parts may be the merged ones: a warp
// writes what it alone has read.
// 128 threads; lanes run along the parts for the weights, then along the columns.
// Grid: rows, and groups of 32 lanes' columns (a block takes every gridDim.y-th).
#include "attn/merge.cuh"
#include "attn/pack.cuh"
#include "ptx/barrier.cuh"

constexpr int kWarps = 4;
constexpr int kRows = kWarps / cfg::row_warps;  // rows per block

// Mirrored by MERGE_PARAMS and MERGE_JVP_PARAMS in cuattn/cuda/params.py.  All arrays are contiguous; cfg::stacked: the first holds all parts, one
// after another.
struct MergeParams {
    const void *o[kMaxParts], *l[kMaxParts], *m[kMaxParts];
    void *o_out, *l_out, *m_out;  // l_out, m_out: null where nobody asks for them
    i64 rows;
    i32 head_dim_v, parts;
};
struct MergeJvpParams : MergeParams {
    const void *to[kMaxParts], *tlse[kMaxParts];
    void *to_out, *tlse_out;
};

using Acc = cfg::acc;
constexpr int kWidth = cfg::width;
static_assert(kWidth == 1 || cfg::row_warps == 1);
template <class T>
using Columns = Pack<T, kWidth>;

// Where element `index` is of the `size` ones that each part has.
template <class T>
__device__ __forceinline__ const T* element(const void* const* parts, int part, i64 index, i64 size) {
    return cfg::stacked ? static_cast<const T*>(parts[0]) + part * size + index : static_cast<const T*>(parts[part]) + index;
}

// The sum of all warps that share a row.
__device__ __forceinline__ Acc sum_of_warps(Acc sum) {
    if constexpr (cfg::row_warps == 1) return sum;
    __shared__ Acc sums[kWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums[warp][lane] = sum;
    __syncthreads();  // all parts' sums are written
    sum = 0;
    for (int w = 0; w < cfg::row_warps; ++w) sum += sums[warp / cfg::row_warps * cfg::row_warps + w][lane];
    __syncthreads();  // sums may be written again
    return sum;
}

template <class Params>
__device__ __forceinline__ void merge(const Params& p) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = warp % cfg::row_warps;
    const i64 row = static_cast<i64>(blockIdx.x) * kRows + warp / cfg::row_warps, size = p.rows * p.head_dim_v;
    const bool live = row < p.rows;
    ptx::await_launch_before();  // which makes the parts
    const auto number = [&](const void* const* parts, int part) { return *element<Acc>(parts, part, row, p.rows); };
    const Shares<Acc> shares(live ? p.parts : 0, [&](int part) { return number(p.l, part); }, [&](int part) { return number(p.m, part); });
    Acc tlse = 0;
    if constexpr (cfg::tangents) {
        for (int part = 0; part < p.parts; ++part) {
            const Acc w = shares[part];
            if (w != Acc(0)) tlse += product_of(w, number(p.tlse, part));
        }
    }
    for (i32 base = blockIdx.y * 32 * kWidth; base < p.head_dim_v; base += gridDim.y * 32 * kWidth) {
        const i32 col = base + lane * kWidth;
        const i64 at = row * p.head_dim_v + col;
        const bool inside = live && col < p.head_dim_v;
        Acc sum[kWidth] = {}, tsum[kWidth] = {};
#pragma unroll 4
        for (int part = slot; part < p.parts; part += cfg::row_warps) {
            const auto load = [&](const void* const* parts) {
                return inside ? *reinterpret_cast<const Columns<cfg::part>*>(element<cfg::part>(parts, part, at, size)) : Columns<cfg::part>{};
            };
            const Columns<cfg::part> x = load(p.o);
            const Acc w = shares[part];
            if (w != Acc(0)) unroll<kWidth>([&](int i) { sum[i] += product_of(w, to_acc(x.x[i])); });
            if constexpr (cfg::tangents) {
                if (w == Acc(0)) continue;
                const Columns<cfg::part> tx = load(p.to);
                const Acc tl = number(p.tlse, part) - tlse;
                unroll<kWidth>([&](int i) { tsum[i] += product_of(w, fma_of(tl, to_acc(x.x[i]), to_acc(tx.x[i]))); });
            }
        }
        const auto store = [&](void* out, const Acc* sums) {
            Columns<cfg::out> rounded;
            unroll<kWidth>([&](int i) { rounded.x[i] = round_to<cfg::out>(sum_of_warps(sums[i])); });
            if (inside && slot == 0) *reinterpret_cast<Columns<cfg::out>*>(static_cast<cfg::out*>(out) + at) = rounded;
        };
        store(p.o_out, sum);
        if constexpr (cfg::tangents) store(p.to_out, tsum);
    }
    if (p.l_out == nullptr || !live || slot != 0 || lane != 0 || blockIdx.y != 0) return;
    static_cast<Acc*>(p.l_out)[row] = shares.l;
    static_cast<Acc*>(p.m_out)[row] = shares.m;
    if constexpr (cfg::tangents) static_cast<Acc*>(p.tlse_out)[row] = tlse;
}

extern "C" __global__ __launch_bounds__(kWarps * 32) void attention_merge(const __grid_constant__ Either<cfg::tangents, MergeJvpParams, MergeParams>::type p) {
    merge(p);
}
