// float32 products by three of TF32: x = hi + lo, and x y = lo_x hi_y + hi_x lo_y + hi_x hi_y (the smallest first).  What the split
// leaves out is 2^-22 of a product.
#pragma once
#include "ptx/mma.cuh"

struct Split {
    u32 hi, lo;

    __device__ __forceinline__ Split() {}
    // Rounded to nearest by hand; of lo the tensor core ignores the last 13 bits itself.
    __device__ __forceinline__ explicit Split(u32 x)
        : hi((x + 0x1000) & 0xffffe000), lo(__float_as_uint(__uint_as_float(x) - __uint_as_float(hi)) + 0x1000) {}
};

template <int products>
struct Tf32Products {
    // The small products of d += a b, and the large one; b is given as two columns.
    static __device__ __forceinline__ void mma_small(float (&d)[4], const u32 (&hi)[4], const u32 (&lo)[4], const Split& b0, const Split& b1) {
        if constexpr (products == 3) {
            ptx::mma_m16n8k8_tf32(d, lo, b0.hi, b1.hi);
            ptx::mma_m16n8k8_tf32(d, hi, b0.lo, b1.lo);
        }
    }
    static __device__ __forceinline__ void mma_large(float (&d)[4], const u32 (&hi)[4], const Split& b0, const Split& b1) {
        ptx::mma_m16n8k8_tf32(d, hi, b0.hi, b1.hi);
    }

    static __device__ __forceinline__ void split(u32 (&hi)[4], u32 (&lo)[4]) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const Split x(hi[r]);
            hi[r] = x.hi;
            lo[r] = x.lo;
        }
    }
};
