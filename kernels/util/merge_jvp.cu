// Combines jvps over disjoint key sets: o and l, m as kernels/util/merge.cu; lse. = sum_p (w_p / l) lse._p and, since each part's tangent of o is
// relative to its own tangent of lse, o. = sum_p (w_p / l) (o._p + (lse._p - lse.) o_p).
//
// No product is fused into a sum: two parts may change places, bit for bit.
// 128 threads, a warp to a row; lanes run along the parts for the weights, then along the columns.
#include "attn/merge.cuh"

// Mirrored by MERGE_JVP_PARAMS in cuattn/cuda/params.py.  All arrays are contiguous.
struct MergeJvpParams {
    const void *o[kMaxParts], *l[kMaxParts], *m[kMaxParts], *to[kMaxParts], *tlse[kMaxParts];
    void *o_out, *l_out, *m_out, *to_out, *tlse_out;
    i64 rows;
    i32 head_dim_v, parts;
};

using Acc = cfg::acc;

extern "C" __global__ __launch_bounds__(128) void merge_jvp(const __grid_constant__ MergeJvpParams p) {
    const i32 lane = threadIdx.x % 32;
    const i64 row = static_cast<i64>(blockIdx.x) * 4 + threadIdx.x / 32;
    if (row >= p.rows) return;
    const auto number = [&](const void* const* parts, int part) { return static_cast<const Acc*>(parts[part])[row]; };
    const Shares<Acc> shares(p.parts, [&](int part) { return number(p.l, part); }, [&](int part) { return number(p.m, part); });
    Acc tlse = 0;
    for (int part = 0; part < p.parts; ++part) {
        const Acc w = shares[part];
        if (w != Acc(0)) tlse += product_of(w, number(p.tlse, part));
    }
    for (i32 base = 0; base < p.head_dim_v; base += 32) {
        const i64 at = row * p.head_dim_v + base + lane;
        const bool inside = base + lane < p.head_dim_v;
        Acc o = 0, to = 0;
        for (int part = 0; part < p.parts; ++part) {
            const Acc w = shares[part];
            if (w == Acc(0) || !inside) continue;
            const Acc x = to_acc(static_cast<const cfg::part*>(p.o[part])[at]), y = to_acc(static_cast<const cfg::part*>(p.to[part])[at]);
            o += product_of(w, x);
            to += product_of(w, fma_of(number(p.tlse, part) - tlse, x, y));
        }
        if (!inside) continue;
        static_cast<cfg::out*>(p.o_out)[at] = round_to<cfg::out>(o);
        static_cast<cfg::out*>(p.to_out)[at] = round_to<cfg::out>(to);
    }
    if (lane == 0) {
        static_cast<Acc*>(p.l_out)[row] = shares.l;
        static_cast<Acc*>(p.m_out)[row] = shares.m;
        static_cast<Acc*>(p.tlse_out)[row] = tlse;
    }
}
