// float32 products of rows with rows (q k^T, do v^T) on halves, as the forward has its scores: attn/split_f32.cuh.
//
// The backward's exp(s - m) / l adds up to 1 over a row only if s is what m and l were made from, so s must come out of the same
// arithmetic.  Here tiles stay float32 in shared memory, and fragments are split on their way.  A power of two in front of a row changes
// no bit of a sum, so it need not be the forward's; it must only keep the halves in range.
#pragma once
#include "attn/split_f32.cuh"
#include "ptx/opaque.cuh"

namespace sm80 {

// The exponent of the largest element in each lane's row, the row being shared by lanes 4g .. 4g + 3.
template <int length>
__device__ __forceinline__ u32 row_exponent(u32 row, u32 q) {
    float top = 0;
#pragma unroll 1
    for (int chunk = 0; chunk < length / 16; ++chunk) {
        float4 x;
        ptx::load_shared(x, row + (chunk * 4 + q) * 16);
        top = fmaxf(top, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    return max(__float_as_uint(top) & 0x7f800000u, split::kLeast);
}

// Exponents in a byte each, registers being short.
template <int count>
struct Exponents {
    u32 words[(count + 3) / 4] = {};

    __device__ __forceinline__ void set(int i, u32 bits) { words[i / 4] |= bits >> 23 << i % 4 * 8; }
    __device__ __forceinline__ u32 operator[](int i) const { return (words[i / 4] >> i % 4 * 8 & 0xff) << 23; }
};

// Splits two neighbours of a row into halves.
__device__ __forceinline__ void load_split(u32& hi, u32& lo, u32 address, u32 exponent) {
    const float up = split::scale_up(exponent);
    float2 x;
    ptx::load_shared(x, address);
    split::split_pair<1 << split::kLow>(hi, lo, x.x * up, x.y * up);
}

// acc = A B^T for this warp's 16 tiles_m rows of a and 8 tiles_n rows of b, each `length` long; strides in bytes; acc must be 0.
template <int products, int length, int stride_a, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void product_of_rows(float (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
    const u32 lane = ptx::opaque(static_cast<i32>(threadIdx.x % 32)), g = lane / 4, q = lane % 4;  // no address is kept for the next tile
    Exponents<2 * tiles_m> exponent_a;
    Exponents<tiles_n> exponent_b;
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) exponent_a.set(2 * m + half, row_exponent<length>(a + (16 * m + 8 * half + g) * stride_a, q));
#pragma unroll
    for (int n = 0; n < tiles_n; ++n) exponent_b.set(n, row_exponent<length>(b + (8 * n + g) * stride_b, q));
    const u32 lane_a = a + g * stride_a + q * 8, lane_b = b + g * stride_b + q * 8;
#pragma unroll 1
    for (int column = 0; column < length; column += split::piece) {
        static_assert(split::piece == 16, "a piece is one instruction long");
        u32 hi[tiles_m][4], lo[tiles_m][4];
#pragma unroll
        for (int m = 0; m < tiles_m; ++m)
#pragma unroll
            for (int r = 0; r < 4; ++r)
                load_split(hi[m][r], lo[m][r], lane_a + (16 * m + r % 2 * 8) * stride_a + (column + r / 2 * 8) * 4, exponent_a[2 * m + r % 2]);
#pragma unroll
        for (int n = 0; n < tiles_n; ++n) {
            u32 x[4];
#pragma unroll
            for (int r = 0; r < 2; ++r) load_split(x[r], x[r + 2], lane_b + 8 * n * stride_b + (column + r * 8) * 4, exponent_b[n]);
            split::Sums<products, tiles_m> sums;
#pragma unroll
            for (int m = 0; m < tiles_m; ++m) {
                sums.add(m, hi[m], lo[m], x);
#pragma unroll
                for (int r = 0; r < 4; ++r) acc[m][n][r] += sums.total(m, r);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < tiles_n; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const u32 exponent = __shfl_sync(~0u, exponent_b[n], (2 * q + e) * 4);
            const float factor = __uint_as_float(exponent - (2 * split::kTop << 23));
#pragma unroll
            for (int m = 0; m < tiles_m; ++m)
#pragma unroll
                for (int half = 0; half < 2; ++half) acc[m][n][2 * half + e] *= factor * __uint_as_float(exponent_a[2 * m + half]);
        }
}

}  // namespace sm80
