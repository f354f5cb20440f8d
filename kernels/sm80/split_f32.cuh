// float32 tiles as pairs of float16, for products of float32 accuracy on the 16-bit tensor cores:
//
//   x = (hi + 2^-11 lo) 2^(e - 14),   e = exponent of the largest |x| of the row, so that |hi| <= 2^15
//
// hi and lo carry 11 bits each; x keeps all 22 when it is within 2^-28 of its row's largest.  A product is then three:
// hi hi + 2^-11 (hi lo + lo hi), 2^-22 lo lo being beneath the rounding.  Rows are at most 128 columns to this: longer ones have an
// exponent for each segment of 128.
//
// The split is made in place: eight float32 (two chunks of 16 bytes) become a chunk of eight hi and a chunk of eight lo.  Behind the tile
// lie the exponents, as one float per row and segment.  inf becomes NaN.
#pragma once
#include "sm80/tile.cuh"
#include "ptx/registers.cuh"
#include "ptx/mma.cuh"

namespace split {

constexpr int kTop = 14;          // |hi| <= 2^(kTop + 1)
constexpr int kLow = 11;          // bits of hi, and the exponent between hi and lo
constexpr u32 kLeast = 40 << 23;  // exponents are not taken below 2^-87: factors with two of them must not vanish
constexpr float kLowUnit = 1.f / (1 << kLow);

template <int columns>
constexpr int segments = (columns + 127) / 128;

template <int rows, int columns>
constexpr int exponent_bytes = rows * segments<columns> * 4;

// Splits x and y into pairs of halves; lo is held times `low_scale`.
template <int low_scale>
__device__ __forceinline__ void split_pair(u32& hi, u32& lo, float x, float y) {
    hi = ptx::pack_f16(x, y);
    lo = ptx::pack_f16((x - ptx::low_f16(hi)) * low_scale, (y - ptx::high_f16(hi)) * low_scale);
}

// 2^(kTop - e), from the bits of 2^e.
__device__ __forceinline__ float scale_up(u32 exponent) { return __uint_as_float((static_cast<u32>(254 + kTop) << 23) - exponent); }

// Sums of 16 terms for 16 m_tiles rows and eight columns: of hi hi, and of the products with one lo.
template <int products, int m_tiles>
struct Sums {
    float high[m_tiles][4] = {}, low[m_tiles][4] = {};

    // b: two registers of hi, two of lo.
    __device__ __forceinline__ void add(int mt, const u32 (&hi)[4], const u32 (&lo)[4], const u32 (&b)[4]) {
        if constexpr (products == 3) {
            ptx::mma_m16n8k16_f16(low[mt], lo, b[0], b[1]);
            ptx::mma_m16n8k16_f16(low[mt], hi, b[2], b[3]);
        }
        ptx::mma_m16n8k16_f16(high[mt], hi, b[0], b[1]);
    }
    __device__ __forceinline__ float total(int mt, int r) const { return products == 3 ? fmaf(low[mt][r], kLowUnit, high[mt][r]) : high[mt][r]; }
};

// Largest bit pattern over the lanes that hold a row, or a segment of it.
template <int lanes>
__device__ __forceinline__ u32 largest(u32 bits) {
    if constexpr (lanes == 32) {
        return __reduce_max_sync(~0u, bits);
    } else {
#pragma unroll
        for (int distance = lanes / 2; distance > 0; distance /= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, distance));
        return bits;
    }
}

template <int rows, int columns, int threads>
constexpr int steps = (rows * columns / 4 + threads - 1) / threads;

// Splits one of the chunks that this thread has copied into a tile (load_tile, gather_tile), which nobody else waits for yet: the other
// chunk of the eight is its neighbour's.  `thread` is threadIdx.x.  The exponents are stored as 2^(e - shift).
template <int rows, int columns, int threads, i32 shift>
__device__ __forceinline__ void split_step(u32 shared, i32 thread, int step) {
    constexpr int chunks = columns / 4, lanes = chunks < 32 ? chunks : 32, total = rows * chunks, stride = threads / chunks;
    constexpr bool even = threads % chunks == 0 && stride % 8 == 0;  // then every step has the same swizzle
    static_assert((chunks & (chunks - 1)) == 0 || chunks % 32 == 0, "a row is a power of two of chunks, or segments of 32");
    static_assert(total % 32 == 0 && chunks >= 4, "warps work on whole rows or segments");
    const int index = thread + step * threads;
    if (total % threads != 0 && index >= total) return;
    const bool odd = thread % 2 != 0;
    const int row = even ? thread / chunks + step * stride : index / chunks, chunk = (even ? thread : index) % chunks;
    const u32 address = shared + (even ? swizzle<columns * 4>(thread / chunks, chunk) + step * stride * columns * 4 : swizzle<columns * 4>(row, chunk));
    float4 x;
    ptx::load_shared(x, address);
    const float top = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
    const u32 exponent = max(largest<lanes>(__float_as_uint(top)) & 0x7f800000u, kLeast);
    const float up = scale_up(exponent);
    u32 hi[2], lo[2];
    split_pair<1 << kLow>(hi[0], lo[0], x.x * up, x.y * up);
    split_pair<1 << kLow>(hi[1], lo[1], x.z * up, x.w * up);
    // Of two neighbouring lanes the even one gets both hi, the odd one both lo.
    const u32 a = __shfl_xor_sync(~0u, odd ? hi[0] : lo[0], 1), b = __shfl_xor_sync(~0u, odd ? hi[1] : lo[1], 1);
    ptx::store_shared_v4(address, odd ? a : hi[0], odd ? b : hi[1], odd ? lo[0] : a, odd ? lo[1] : b);
    if (chunk % 32 == 0) ptx::store_shared(shared + rows * columns * 4 + (row * segments<columns> + chunk / 32) * 4, exponent - (shift << 23));
}

}  // namespace split
