// The two products of the forward for one warp: s = q k^T and o += p v, by input type.
//
// A warp owns 16 * m_tiles rows.  Whatever the type, accumulators are m16n8 tiles: x[mt][nt][0..3] of lane l are rows
// 16 mt + g, 16 mt + g + 8 (two each) and columns 8 nt + 2q, 8 nt + 2q + 1, with g = l / 4, q = l % 4.
// So masks, softmax and dropout are written once, for this layout.
//
// Mma<Elem>::scores(s, q, k)            q: from QRows; k: shared address of a key tile (block_n rows of head_dim)
// Mma<Elem>::values(o, s, v, finish)    finish(c) turns the scores of keys 16 c .. 16 c + 15 into probabilities, in place;
//                                       drop(mt, c, a...) then applies dropout to the fragments that take part in the product;
//                                       between(i, n), for 0 <= i < n, is other work to be done meanwhile
// tile_bytes, prepare_*                 what a tile takes in shared memory, and what becomes of it before it is used
// arrange(o), column(n, q)              column of o[mt][n][0] and [2]; after arrange, those of [1] and [3] are the next
#pragma once
#include "attn/math.cuh"
#include "sm80/tile.cuh"
#include "ptx/shared.cuh"
#include "ptx/mma.cuh"

// D += A B for 16 x 8 results: of 16 columns of A in 16 bits, of 8 in float64.
template <class Elem>
__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (same_type<Elem, __half>) ptx::mma_m16n8k16_f16(d, a, b0, b1);
    else ptx::mma_m16n8k16_bf16(d, a, b0, b1);
}
__device__ __forceinline__ void mma(double (&d)[4], const double (&a)[4], double b0, double b1) {
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

template <class Elem>
struct Mma;

// Tiles that stay as they are loaded, and accumulators as the instructions leave them.
template <int element_bytes>
struct PlainTiles {
    template <int rows, int columns>
    static constexpr int tile_bytes = rows * columns * element_bytes;

    // If `prepares`, every thread calls these after its own copies into a tile have arrived, before others may read it; the tile of v
    // lies behind that of k, and the work on both may be divided into parts.
    static constexpr bool prepares = false;
    template <int rows, int columns, int threads>
    static __device__ __forceinline__ void prepare_q(u32, i32) {}
    template <int rows, int columns, int columns_v, int threads>
    static __device__ __forceinline__ void prepare_kv(u32, i32, int, int) {}

    template <class Rows>
    static __device__ __forceinline__ void arrange(Rows&) {}
    static __device__ __forceinline__ int column(int n, int q) { return n * 8 + q * 2; }
};

// The warp's rows of q, 16 columns of 16 rows to a fragment: in registers when they are few, else read again for every key tile.
template <int m_tiles, int head_dim>
struct RowFragments {
    static constexpr int row_bytes = head_dim * 2, steps = row_bytes / 32;
    static constexpr bool in_registers = m_tiles * steps <= 8;
    u32 fragment[in_registers ? m_tiles : 1][in_registers ? steps : 1][4];
    LaneRow<row_bytes> lane;

    // For the rows of a tile from first_row on; the tile has tile_rows.
    __device__ __forceinline__ RowFragments(u32 tile, u32 tile_rows, u32 first_row, u32 l) : lane(l & 15, l >> 4) { lane.base += tile + first_row * row_bytes; }
    __device__ __forceinline__ void load() {
        if constexpr (in_registers) {
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
                for (int k = 0; k < steps; ++k) read(fragment[mt][k], mt, k);
        }
    }
    __device__ __forceinline__ void read(u32 (&a)[4], int mt, int k) const { ptx::ldmatrix_x4(a, lane.offset(k) + mt * 16 * row_bytes); }
    __device__ __forceinline__ void get(u32 (&a)[4], int mt, int k) const {
        if constexpr (in_registers) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[r] = fragment[mt][k][r];
        } else {
            read(a, mt, k);
        }
    }
};

template <class Elem>
struct Mma16 : PlainTiles<2> {
    static constexpr int step = 16;  // contraction length of one instruction

    template <int m_tiles, int head_dim>
    using QRows = RowFragments<m_tiles, head_dim>;

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(float (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        const LaneRow<head_dim * 2> lane((l & 7) + ((l >> 4) << 3), (l >> 3) & 1);
#pragma unroll
        for (int k = 0; k < head_dim / step; ++k) {
            u32 a[m_tiles][4];
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) q.get(a[mt], mt, k);
            const u32 address = k_shared + lane.offset(k);
#pragma unroll
            for (int n = 0; n < n_tiles; n += 2) {
                u32 b[4];
                ptx::ldmatrix_x4(b, address + n * 8 * head_dim * 2);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) {
                    mma<Elem>(s[mt][n], a[mt], b[0], b[1]);
                    mma<Elem>(s[mt][n + 1], a[mt], b[2], b[3]);
                }
            }
        }
    }

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop, class Between>
    static __device__ __forceinline__ void values(float (&o)[m_tiles][v_tiles][4], float (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop, const Between&) {
        constexpr int row_bytes = v_tiles * 8 * 2;
        const LaneRow<row_bytes> lane(l & 15, l >> 4);
#pragma unroll
        for (int c = 0; c < n_tiles / 2; ++c) {
            finish(c);
            u32 a[m_tiles][4];
#pragma unroll
            for (int mt = 0; mt < m_tiles; ++mt) {
#pragma unroll
                for (int r = 0; r < 4; ++r) a[mt][r] = pack<Elem>(s[mt][2 * c + r / 2][2 * (r & 1)], s[mt][2 * c + r / 2][2 * (r & 1) + 1]);
                drop(mt, c, a[mt]);
            }
#pragma unroll
            for (int n = 0; n < v_tiles; n += 2) {
                u32 b[4];
                ptx::ldmatrix_x4_trans(b, v_shared + lane.offset(n / 2) + c * 16 * row_bytes);
#pragma unroll
                for (int mt = 0; mt < m_tiles; ++mt) {
                    mma<Elem>(o[mt][n], a[mt], b[0], b[1]);
                    mma<Elem>(o[mt][n + 1], a[mt], b[2], b[3]);
                }
            }
        }
    }
};

template <>
struct Mma<__half> : Mma16<__half> {};
template <>
struct Mma<__nv_bfloat16> : Mma16<__nv_bfloat16> {};
