// Sums of many terms: each tile's are summed first, and what a total loses by rounding is carried along (Kahan).  What a block sums.
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
    // By a factor, given its root: the factor may be 0 where the product is not.
    __device__ __forceinline__ void scale(Acc root) {
        sum = sum * root * root;
        lost = lost * root * root;
    }
};

// References of exponents: one below all others, and the greatest sum relative to one that is not yet too large for it.
template <class Acc>
struct Range {
    static constexpr Acc lowest = same_type<Acc, double> ? Acc(-1e300) : Acc(-1e30f), most = same_type<Acc, double> ? Acc(1e250) : Acc(1e30f);
};

// A block's keys [start, stop) and columns: the grid's second axis has parts of the keys, times groups of cfg::width columns.
struct Share {
    i64 batch;
    i32 part, column, start, stop;

    template <class Params>
    __device__ __forceinline__ explicit Share(const Params& p) : batch(blockIdx.z), part(blockIdx.y % p.parts), column(blockIdx.y / p.parts * cfg::width) {
        start = part * p.keys_per_part;
        stop = min(start + p.keys_per_part, p.n_keys);
    }

    // Which of the stacked results is its own: of all blocks, or of parts alone, whose groups have different columns.
    __device__ __forceinline__ i64 of_blocks() const { return static_cast<i64>(blockIdx.y) * gridDim.z + batch; }
    __device__ __forceinline__ i64 of_parts() const { return static_cast<i64>(part) * gridDim.z + batch; }
};

}  // namespace pairwise
