// float64 products on the double-precision tensor cores.  As for float32, column q of an instruction of the second product is key 2q
// and column q + 4 is key 2q + 1, so that the scores' fragment is its first factor as it stands.
#pragma once
#include "attn/mma.cuh"
#include "ptx/mma_f64.cuh"

// The address pattern of one lane through a tile of doubles: offset(step) is that of element 4 step + column of a row; for column >= 4
// only even steps.
template <int row_bytes>
struct LaneDoubles {
    u32 base, key;

    __device__ __forceinline__ LaneDoubles(u32 row, u32 column)
        : base(row * row_bytes + column % 4 * 8), key(wide_key(row) << 4 ^ column / 4 << 5) {}
    __device__ __forceinline__ u32 offset(int step) const { return base + ((step * 32) & ~0x7f) + (((step * 32) & 0x7f) ^ key); }
};

template <>
struct Mma<double> {
    using Acc = double;
    static constexpr int step = 8;

    template <int m_tiles, int head_dim>
    struct QRows {
        LaneDoubles<head_dim * 8> lane;

        // `address` is that of the warp's first row.
        __device__ __forceinline__ QRows(u32 address, u32 l) : lane(l / 4, l % 4) { lane.base += address; }
        __device__ __forceinline__ void load() {}
        __device__ __forceinline__ void get(double (&a)[4], int mt, int k) const {
#pragma unroll
            for (int r = 0; r < 4; ++r) ptx::load_shared(a[r], lane.offset(2 * k + r / 2) + (mt * 16 + r % 2 * 8) * head_dim * 8);
        }
    };

    static __device__ __forceinline__ void mma(double (&d)[4], const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
        ptx::mma_m16n8k8_f64(d, a, b0, b1);
#else
        double (&top)[2] = reinterpret_cast<double (&)[2]>(d[0]), (&bottom)[2] = reinterpret_cast<double (&)[2]>(d[2]);
        ptx::mma_m8n8k4_f64(top, a[0], b0);
        ptx::mma_m8n8k4_f64(bottom, a[1], b0);
        ptx::mma_m8n8k4_f64(top, a[2], b1);
        ptx::mma_m8n8k4_f64(bottom, a[3], b1);
#endif
    }

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(double (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        const LaneDoubles<head_dim * 8> lane(l / 4, l % 4);
#pragma unroll 4
        for (int k = 0; k < head_dim / step; ++k) {
            double a[m_tiles][4];
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) q.get(a[mt], mt, k);
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
                double b0, b1;
                ptx::load_shared(b0, k_shared + lane.offset(2 * k) + n * 8 * head_dim * 8);
                ptx::load_shared(b1, k_shared + lane.offset(2 * k + 1) + n * 8 * head_dim * 8);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) mma(s[mt][n], a[mt], b0, b1);
            }
        }
    }

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop>
    static __device__ __forceinline__ void values(double (&o)[m_tiles][v_tiles][4], double (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop) {
        constexpr int row_bytes = v_tiles * 8 * 8;
        const LaneDoubles<row_bytes> even(2 * (l % 4), l / 4), odd(2 * (l % 4) + 1, l / 4);
#pragma unroll
        for (int c = 0; c < n_tiles; ++c) {
            if (c % 2 == 0) {
                finish(c / 2);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) drop(s[mt][c], s[mt][c + 1], mt, c / 2);
            }
            double a[m_tiles][4];
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
                for (int r = 0; r < 4; ++r) a[mt][r] = s[mt][c][2 * (r & 1) + r / 2];
#pragma unroll
            for (int n = 0; n < v_tiles; ++n) {
                double b0, b1;
                ptx::load_shared(b0, v_shared + even.offset(2 * n) + c * 8 * row_bytes);
                ptx::load_shared(b1, v_shared + odd.offset(2 * n) + c * 8 * row_bytes);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) mma(o[mt][n], a[mt], b0, b1);
            }
        }
    }
};
