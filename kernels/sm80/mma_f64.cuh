// The two products of the forward for float64 (sm80/mma.cuh says what they are).
//
// Scores are summed in the order of the columns, as the backward does.  The order of the second sum is free: slots q and q + 4 of an
// instruction are keys 2q and 2q + 1, which is how p lies in its accumulators.  From v a lane takes two columns at once, so of two
// neighbouring tiles of o the first has the even columns and the second the odd ones, until `arrange`.
#pragma once
#include "sm80/mma.cuh"
#include "ptx/mma.cuh"

template <>
struct Mma<double> : PlainTiles<8> {
    static constexpr int step = 8;

    template <int row_bytes, int step_bytes>
    using Lane = LaneRow<row_bytes, step_bytes, true>;

    // A lane's elements 8 k + q and 8 k + q + 4 of row l / 4.
    template <int row_bytes>
    struct RowElements {
        Lane<row_bytes, 64> lane;
        u32 half;

        __device__ __forceinline__ RowElements(u32 rows, u32 l) : lane(l / 4, l % 4 / 2), half(rows + l % 2 * 8) {}
        __device__ __forceinline__ void get(double& first, double& second, int k, u32 below) const {
            ptx::load_shared(first, half + lane.offset(k) + below);
            ptx::load_shared(second, half + (lane.offset(k) ^ 32) + below);
        }
    };

    template <int m_tiles, int head_dim>
    struct QRows {
        RowElements<head_dim * 8> rows;

        __device__ __forceinline__ QRows(u32 tile, u32, u32 first_row, u32 l) : rows(tile + first_row * head_dim * 8, l) {}
        __device__ __forceinline__ void load() {}
        __device__ __forceinline__ void get(double (&a)[4], int mt, int k) const {
            rows.get(a[0], a[2], k, mt * 16 * head_dim * 8);
            rows.get(a[1], a[3], k, (mt * 16 + 8) * head_dim * 8);
        }
    };

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(double (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        const RowElements<head_dim * 8> keys(k_shared, l);
#pragma unroll
        for (int k = 0; k < head_dim / step; ++k) {
            double a[m_tiles][4];
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) q.get(a[mt], mt, k);
#pragma unroll
            for (int n = 0; n < n_tiles; ++n) {
                double b0, b1;
                keys.get(b0, b1, k, n * 8 * head_dim * 8);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) mma(s[mt][n], a[mt], b0, b1);
            }
        }
    }

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop, class Between>
    static __device__ __forceinline__ void values(double (&o)[m_tiles][v_tiles][4], double (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop, const Between&) {
        constexpr int row_bytes = v_tiles * 8 * 8;
        static_assert(v_tiles % 2 == 0, "columns of v are worked on 16 at a time");
        const Lane<row_bytes, 128> even(l % 4 * 2, l / 4), odd(l % 4 * 2 + 1, l / 4);
#pragma unroll
        for (int c = 0; c < n_tiles / 2; ++c) {
            finish(c);
            double p[m_tiles][8];  // in the order of the random words: rows g, g + 8 of keys 2q, 2q + 1, then the same 8 keys on
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) {
#pragma unroll
                for (int i = 0; i < 8; ++i) p[mt][i] = s[mt][2 * c + i / 4][i % 4];
                drop(mt, c, p[mt]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                double a[m_tiles][4];
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
                    for (int r = 0; r < 4; ++r) a[mt][r] = p[mt][4 * half + r % 2 * 2 + r / 2];
#pragma unroll
                for (int n = 0; n < v_tiles; n += 2) {
                    const u32 rows = v_shared + (c * 16 + half * 8) * row_bytes;
                    double2 b0, b1;
                    ptx::load_shared(b0, rows + even.offset(n / 2));
                    ptx::load_shared(b1, rows + odd.offset(n / 2));
#pragma unroll
                    for (int mt = 0; mt < m_tiles; ++mt) {
                        mma(o[mt][n], a[mt], b0.x, b1.x);
                        mma(o[mt][n + 1], a[mt], b0.y, b1.y);
                    }
                }
            }
        }
    }

    // Makes neighbours of the pairs of columns in o; column(n, q) is then the first column of a pair.
    template <int m_tiles, int v_tiles>
    static __device__ __forceinline__ void arrange(double (&o)[m_tiles][v_tiles][4]) {
#pragma unroll
        for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
            for (int n = 0; n < v_tiles; n += 2)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const double x = o[mt][n][2 * h + 1];
                    o[mt][n][2 * h + 1] = o[mt][n + 1][2 * h];
                    o[mt][n + 1][2 * h] = x;
                }
    }
    static __device__ __forceinline__ int column(int n, int q) { return n / 2 * 16 + q * 4 + n % 2 * 2; }
};
