// float32 products at float32 accuracy on tensor cores: each factor is split into two TF32 numbers, x = hi + lo, and
// x y = lo_x hi_y + hi_x lo_y + hi_x hi_y.  What the split leaves out is 2^-22 of a product.
//
// The tensor core adds with truncation, an error that grows with the sum and its length.  So sums are short, 16 columns for the
// scores and one key tile for the output, begin with the small products, and longer ones are made by ordinary additions.
#pragma once
#include "attn/mma.cuh"

// With cfg::tf32 the split is left out.
struct Split {
    u32 hi, lo;

    __device__ __forceinline__ Split() {}
    // Rounded to nearest by hand; of lo the tensor core ignores the last 13 bits itself.
    __device__ __forceinline__ explicit Split(u32 x)
        : hi((x + 0x1000) & 0xffffe000), lo(__float_as_uint(__uint_as_float(x) - __uint_as_float(hi)) + 0x1000) {}
};

template <>
struct Mma<float> {
    using Acc = float;
    static constexpr int step = 8, steps = 2;  // columns per instruction, instructions per sum of the scores

    template <int m_tiles, int head_dim>
    using QRows = RowFragments<4, m_tiles, head_dim>;

    // The small products of d += a b, and the large one.
    static __device__ __forceinline__ void mma_small(float (&d)[4], const u32 (&hi)[4], const u32 (&lo)[4], const Split& b0, const Split& b1) {
        if constexpr (!cfg::tf32) {
            ptx::mma_m16n8k8_tf32(d, lo, b0.hi, b1.hi);
            ptx::mma_m16n8k8_tf32(d, hi, b0.lo, b1.lo);
        }
    }
    static __device__ __forceinline__ void mma_large(float (&d)[4], const u32 (&hi)[4], const Split& b0, const Split& b1) {
        ptx::mma_m16n8k8_tf32(d, hi, b0.hi, b1.hi);
    }

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(float (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        const LaneRow<head_dim * 4> lane((l & 7) + ((l >> 4) << 3), (l >> 3) & 1);
        constexpr int unrolled = QRows<m_tiles, head_dim>::in_registers ? head_dim / step / steps : 2;  // registers need constant indices
#pragma unroll unrolled
        for (int first = 0; first < head_dim / step; first += steps) {
            u32 hi[steps][m_tiles][4], lo[steps][m_tiles][4];
#pragma unroll
            for (int k = 0; k < steps; ++k)
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) {
                    q.get(hi[k][mt], mt, first + k);
                    split(hi[k][mt], lo[k][mt]);
                }
#pragma unroll
            for (int n = 0; n < n_tiles; n += 2) {
                Split b[steps][4];
#pragma unroll
                for (int k = 0; k < steps; ++k) {
                    u32 raw[4];
                    ptx::ldmatrix_x4(raw, k_shared + lane.offset(first + k) + n * 8 * head_dim * 4);
#pragma unroll
                    for (int r = 0; r < 4; ++r) b[k][r] = Split(raw[r]);
                }
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float part[4] = {};
#pragma unroll
                        for (int k = 0; k < steps; ++k) mma_small(part, hi[k][mt], lo[k][mt], b[k][2 * e], b[k][2 * e + 1]);
#pragma unroll
                        for (int k = 0; k < steps; ++k) mma_large(part, hi[k][mt], b[k][2 * e], b[k][2 * e + 1]);
#pragma unroll
                        for (int r = 0; r < 4; ++r) s[mt][n + e][r] += part[r];
                    }
            }
        }
    }

    // The order of a sum's terms is free: column q of the instruction is key 2q, column q + 4 is key 2q + 1.  So the scores' fragment
    // is the first factor as it stands, and lane (g, q) reads rows 2q and 2q + 1 of v.
    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop>
    static __device__ __forceinline__ void values(float (&o)[m_tiles][v_tiles][4], float (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop) {
        constexpr int row_bytes = v_tiles * 8 * 4;
        u32 hi[m_tiles][n_tiles][4], lo[m_tiles][n_tiles][4];
#pragma unroll
        for (int c = 0; c < n_tiles / 2; ++c) {
            finish(c);
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) {
                drop(s[mt][2 * c], s[mt][2 * c + 1], mt, c);
#pragma unroll
                for (int n = 2 * c; n < 2 * c + 2; ++n) {
#pragma unroll
                    for (int r = 0; r < 4; ++r) hi[mt][n][r] = __float_as_uint(s[mt][n][2 * (r & 1) + r / 2]);
                    split(hi[mt][n], lo[mt][n]);
                }
            }
        }
        const u32 row = 2 * (l % 4), column = l / 4;
        const LaneRow<row_bytes> even(row, column / 4), odd(row + 1, column / 4);
#pragma unroll
        for (int n = 0; n < v_tiles; ++n) {
            const u32 at = v_shared + column % 4 * 4;
            Split b[n_tiles][2];
#pragma unroll
            for (int c = 0; c < n_tiles; ++c) {
                float x, y;
                ptx::load_shared(x, at + even.offset(n) + c * 8 * row_bytes);
                ptx::load_shared(y, at + odd.offset(n) + c * 8 * row_bytes);
                b[c][0] = Split(__float_as_uint(x)), b[c][1] = Split(__float_as_uint(y));
            }
            float part[m_tiles][4] = {};
#pragma unroll
            for (int c = 0; c < n_tiles; ++c)
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) mma_small(part[mt], hi[mt][c], lo[mt][c], b[c][0], b[c][1]);
#pragma unroll
            for (int c = 0; c < n_tiles; ++c)
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) mma_large(part[mt], hi[mt][c], b[c][0], b[c][1]);
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
                for (int r = 0; r < 4; ++r) o[mt][n][r] += part[mt][r];
        }
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
