// What the kernels of pairwise/near.cu and far.cu share: rows of a warp, tiles of keys.
#pragma once
#include "attn/math.cuh"
#include "ptx/types.cuh"

namespace pairwise {

// A tile of keys: the range of its coordinates, and of its logarithms.
struct Box {
    float least[3], least_log, most[3], most_log;
};

// Mirrored by PARAMS in cuattn/pairwise/near.py.
struct NearParams {
    const float4 *rows, *keys;  // (batch, rows): coordinates, place of the result; (batch, padded keys): coordinates, logarithm
    const double* factors;      // the factor of z if it lies on the device, else null
    Box* boxes;                 // (batch, tiles)
    float* floors;              // (batch, warps' rows, 2): what sums are at least, NaN where a key has NaN; tiles whose terms are all below may be left out
    float *of_parts, *logs;     // to base 2, (parts, batch, rows); natural, (batch, rows)
    double factor;
    i32 n_rows, tiles, of_warps, parts;
};

constexpr int kTiles = cfg::tiles, kOwn = 2 * kTiles;  // 16 rows each; rows of a thread
constexpr int kFew = 64;                               // keys of a tile
constexpr float kHidden = -1e30f;                      // the logarithm of a key that is not there; the greatest is that without its sign

__device__ __forceinline__ float warp_max(float x) {
    unroll<5>([&](int n) { x = ptx::max_nan(x, __shfl_xor_sync(~0u, x, 1 << n)); });
    return x;
}

__device__ __forceinline__ float factor_of(const NearParams& p) { return static_cast<float>(p.factors == nullptr ? p.factor : *p.factors); }

// The square of the distance along one axis between a range and another, at least (greatest 0) or at most.
template <bool greatest>
__device__ __forceinline__ float apart(float least, float most, float other_least, float other_most) {
    const float a = other_most - least, b = most - other_least;
    const float d = greatest ? fmaxf(a, b) : fmaxf(fmaxf(-a, -b), 0.f);
    return d * d;
}

// A term is at most, or the greatest at least, the logarithm less this times the factor.
template <bool greatest>
__device__ __forceinline__ float between(const float (&least)[3], const float (&most)[3], const Box& box) {
    float sum = 0;
    unroll<3>([&](int c) { sum += apart<greatest>(least[c], most[c], box.least[c], box.most[c]); });
    return sum;
}

// The ranges of coordinates of a warp's rows, but for NaN.
__device__ __forceinline__ void range_of_rows(const float4* rows, i32 first, i32 n_rows, float (&least)[3], float (&most)[3]) {
    unroll<3>([&](int c) { most[c] = least[c] = -infinity<float>(); });
    for (int n = threadIdx.x % 32; n < 16 * kTiles; n += 32) {
        const float4 x = rows[min(first + n, n_rows - 1)];
        const float at[3] = {x.x, x.y, x.z};
        unroll<3>([&](int c) {
            most[c] = fmaxf(most[c], at[c]);
            least[c] = fmaxf(least[c], -at[c]);
        });
    }
    unroll<3>([&](int c) {
        most[c] = warp_max(most[c]);
        least[c] = -warp_max(least[c]);
    });
}

}  // namespace pairwise
