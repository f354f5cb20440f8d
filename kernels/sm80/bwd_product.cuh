// acc += A B for two tiles in shared memory, by element type.
//
// product<length, along_a, stride_a, along_b, stride_b>(acc, a, b) sums over `length` elements, for this warp's 16 tiles_m x 8 tiles_n
// results; a and b are the addresses of the warp's parts of the tiles, stride_a and stride_b their rows in bytes.
#pragma once
#include "attn/mma_f32.cuh"
#include "attn/mma_f64.cuh"
#include "ptx/ldmatrix.cuh"
#include "sm80/bwd_fragments.cuh"
#include "sm80/bwd_split.cuh"

namespace sm80 {

// Address that this lane gives to ldmatrix for the first 16 x 16 block: the four 8 x 8 matrices in the order (0, 0) (8, 0) (0, 8) (8, 8)
// for A summed along its columns and B summed along its rows, else in the order (0, 0) (0, 8) (8, 0) (8, 8).
template <bool down_first, int stride>
__device__ __forceinline__ u32 lane_address(u32 tile) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (down_first) return tile + lane % 16 * stride + lane / 16 * 16;
    return tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 16;
}

// The 16 x 16 block number `outer` across, and `inner` along the axis that is summed over.
template <Along along, int stride>
__device__ __forceinline__ void load_block(u32 (&fragment)[4], u32 lane, int outer, int inner) {
    if constexpr (along == Along::columns)
        ptx::ldmatrix_x4(fragment, lane + outer * 16 * stride + inner * 32);
    else
        ptx::ldmatrix_x4_trans(fragment, lane + inner * 16 * stride + outer * 32);
}

template <class E>
struct Product {  // __half, __nv_bfloat16; loads run one 16-column block of B, and up to one step of A, ahead of the products
    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run(float (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
        static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
        constexpr int blocks = tiles_n / 2, total = length / 16 * blocks;
        constexpr int ahead = tiles_m <= 2 ? 1 : 0;  // steps that A is loaded ahead; more rows would take too many registers
        const u32 lane_a = lane_address<along_a == Along::columns, stride_a>(a);
        const u32 lane_b = lane_address<along_b == Along::rows, stride_b>(b);
        u32 fa[1 + ahead][tiles_m][4], fb[2][4];
        auto load_a = [&](int step) {
#pragma unroll
            for (int m = 0; m < tiles_m; ++m) load_block<along_a, stride_a>(fa[step % (1 + ahead)][m], lane_a, m, step);
        };
        if constexpr (ahead) load_a(0);
        load_block<along_b, stride_b>(fb[0], lane_b, 0, 0);
#pragma unroll
        for (int i = 0; i < total; ++i) {
            const int step = i / blocks, block = i % blocks;
            if (i + 1 < total) load_block<along_b, stride_b>(fb[(i + 1) % 2], lane_b, (i + 1) % blocks, (i + 1) / blocks);
            if (block == 0 && step + ahead < length / 16) load_a(step + ahead);
#pragma unroll
            for (int m = 0; m < tiles_m; ++m) {
                Mma<E>::mma(acc[m][2 * block], fa[step % (1 + ahead)][m], fb[i % 2][0], fb[i % 2][1]);
                Mma<E>::mma(acc[m][2 * block + 1], fa[step % (1 + ahead)][m], fb[i % 2][2], fb[i % 2][3]);
            }
        }
    }
};

// float32: rows with rows as the forward has its scores, so that they meet its m bit for bit (sm80/bwd_split.cuh).  Else from TF32 products
// (attn/tf32.cuh): short sums in the tensor core, small terms first, longer ones by ordinary additions.  ldmatrix moves 4-byte elements
// just as well, four columns instead of eight; down the rows there is no such instruction.
template <>
struct Product<float> {
    // This lane's two elements of step `inner`, at `outer` + l / 4 along the other axis.
    template <int stride>
    static __device__ __forceinline__ void load_down(u32& low, u32& high, u32 tile, int inner, int outer, bool neighbours) {
        const u32 lane = threadIdx.x % 32, q = lane % 4;
        const u32 row = 8 * inner + (neighbours ? 2 * q : q);
        float x, y;
        ptx::load_shared(x, tile + row * stride + (outer + lane / 4) * 4);
        ptx::load_shared(y, tile + (row + (neighbours ? 1 : 4)) * stride + (outer + lane / 4) * 4);
        low = __float_as_uint(x), high = __float_as_uint(y);
    }

    // Where both factors lie along their columns, acc must be 0.
    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run(float (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
        if constexpr (along_a == Along::columns && along_b == Along::columns)
            product_of_rows<cfg::tf32 ? 1 : 3, length, stride_a, stride_b>(acc, a, b);
        else
            run_tf32<length, along_a, stride_a, along_b, stride_b>(acc, a, b);
    }

    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run_tf32(float (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
        // When both factors are read down the rows, the order of the terms is free: neighbours 2q and 2q + 1 lie in different banks.
        constexpr bool neighbours = along_a == Along::rows && along_b == Along::rows;
        constexpr int steps = length / 8, chunk = steps < 4 ? steps : 4;
        static_assert(steps % chunk == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
        const u32 lane_a = lane_address<true, stride_a>(a), lane_b = lane_address<false, stride_b>(b);
#pragma unroll 1  // unrolled, the loads of all chunks would be moved to the front and their registers with them
        for (int first = 0; first < steps; first += chunk) {
            u32 hi[chunk][tiles_m][4], lo[chunk][tiles_m][4];
#pragma unroll
            for (int step = 0; step < chunk; ++step)
#pragma unroll
                for (int m = 0; m < tiles_m; ++m) {
                    u32(&x)[4] = hi[step][m];
                    if constexpr (along_a == Along::columns) {
                        load_block<Along::columns, stride_a>(x, lane_a, m, first + step);
                    } else {
                        load_down<stride_a>(x[0], x[2], a, first + step, 16 * m, neighbours);
                        load_down<stride_a>(x[1], x[3], a, first + step, 16 * m + 8, neighbours);
                    }
                    Mma<float>::split(x, lo[step][m]);
                }
#pragma unroll
            for (int block = 0; block < tiles_n / 2; ++block) {
                Split x[chunk][4];
#pragma unroll
                for (int step = 0; step < chunk; ++step) {
                    u32 raw[4];
                    if constexpr (along_b == Along::columns) {
                        load_block<Along::columns, stride_b>(raw, lane_b, block, first + step);
                    } else {
                        load_down<stride_b>(raw[0], raw[1], b, first + step, 16 * block, neighbours);
                        load_down<stride_b>(raw[2], raw[3], b, first + step, 16 * block + 8, neighbours);
                    }
#pragma unroll
                    for (int r = 0; r < 4; ++r) x[step][r] = Split(raw[r]);
                }
#pragma unroll
                for (int m = 0; m < tiles_m; ++m)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float part[4] = {};
#pragma unroll
                        for (int step = 0; step < chunk; ++step)
                            Mma<float>::mma_small(part, hi[step][m], lo[step][m], x[step][2 * e], x[step][2 * e + 1]);
#pragma unroll
                        for (int step = 0; step < chunk; ++step)
                            Mma<float>::mma_large(part, hi[step][m], x[step][2 * e], x[step][2 * e + 1]);
#pragma unroll
                        for (int i = 0; i < 4; ++i) acc[m][2 * block + e][i] += part[i];
                    }
            }
        }
    }
};

template <>
struct Product<double> {
    // Element (outer + l / 4, inner + l % 4), inner along the axis that is summed over.
    template <Along along, int stride>
    static __device__ __forceinline__ double load(u32 tile, int outer, int inner) {
        const u32 lane = threadIdx.x % 32, across = outer + lane / 4, along_it = inner + lane % 4;
        double x;
        ptx::load_shared(x, tile + (along == Along::columns ? across * stride + along_it * 8 : along_it * stride + across * 8));
        return x;
    }

    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run(double (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
#pragma unroll 2
        for (int k = 0; k < length; k += 8) {
            double x[tiles_m][4];
#pragma unroll
            for (int m = 0; m < tiles_m; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) x[m][r] = load<along_a, stride_a>(a, 16 * m + r % 2 * 8, k + r / 2 * 4);
#pragma unroll
            for (int n = 0; n < tiles_n; ++n) {
                const double b0 = load<along_b, stride_b>(b, 8 * n, k), b1 = load<along_b, stride_b>(b, 8 * n, k + 4);
#pragma unroll
                for (int m = 0; m < tiles_m; ++m) Mma<double>::mma(acc[m][n], x[m], b0, b1);
            }
        }
    }
};

template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void product(Acc (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
    Product<Elem>::template run<length, along_a, stride_a, along_b, stride_b>(acc, a, b);
}

}  // namespace sm80
