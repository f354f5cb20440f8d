// Sums of many terms: each tile's are summed first, and what a total loses by rounding is carried along (Kahan).
#pragma once
#include "attn/math.cuh"

namespace pairwise {

template <class Acc>
struct Total {
    Acc sum = 0, lost = 0;

    __device__ __forceinline__ void add(Acc x) {
        const Acc term = x - lost, next = sum + term;
        lost = (next - sum) - term;
        sum = next;
    }
    __device__ __forceinline__ void scale(Acc factor) {
        sum *= factor;
        lost *= factor;
    }
};

// References of exponents: one below all others, and the greatest sum relative to one that is not yet too large for it.
template <class Acc>
struct Range {
    static constexpr Acc lowest = same_type<Acc, double> ? Acc(-1e300) : Acc(-1e30f), most = same_type<Acc, double> ? Acc(1e250) : Acc(1e30f);
};

}  // namespace pairwise
