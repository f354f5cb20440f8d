// What each of several forwards over disjoint key sets counts in a row of their union: w_p / l with w_p = l_p exp(m_p - m), m = max_p m_p,
// l = sum_p w_p.
//
// A part without visible keys (l = 0, m = -inf) has weight 0; one that is alone has the share 1, so that its o keeps its bits.
#pragma once
#include "attn/math.cuh"
#include "ptx/types.cuh"

constexpr int kMaxParts = 64;

// All parts' shares of one row, two to a lane: every warp that asks for a row finds the same ones.
template <class Acc>
struct Shares {
    static constexpr int held = kMaxParts / 32;
    Acc w[held], m = -infinity<Acc>(), l = 0;

    // l_of(part) and m_of(part) are asked for the first `parts` parts only.
    template <class L, class M>
    __device__ __forceinline__ Shares(i32 parts, const L& l_of, const M& m_of) {
        const int lane = threadIdx.x % 32;
        Acc own[held];
        unroll<held>([&](int i) {
            const int part = lane + 32 * i;
            own[i] = part < parts ? m_of(part) : -infinity<Acc>();
            w[i] = part < parts ? l_of(part) : Acc(0);
            m = max_of(m, own[i]);
        });
#pragma unroll
        for (int step = 16; step > 0; step /= 2) m = max_of(m, __shfl_xor_sync(~0u, m, step));
        unroll<held>([&](int i) {
            w[i] = own[i] == -infinity<Acc>() ? Acc(0) : product_of(w[i], exp2_product(own[i] - m, Log2Factor<Acc>::of_e()));
            l += w[i];
        });
#pragma unroll
        for (int step = 16; step > 0; step /= 2) l += __shfl_xor_sync(~0u, l, step);
        const Acc inverse = l == Acc(0) ? Acc(0) : Acc(1) / l;
        unroll<held>([&](int i) { w[i] = w[i] == l && l != Acc(0) ? Acc(1) : product_of(w[i], inverse); });
    }
    __device__ __forceinline__ Acc operator[](int part) const {
        const Acc low = __shfl_sync(~0u, w[0], part % 32), high = __shfl_sync(~0u, w[1], part % 32);
        return part < 32 ? low : high;
    }
};
