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
            unroll<m_tiles, steps>([&](int mt, int k) { read(fragment[mt][k], mt, k); });
        }
    }
    __device__ __forceinline__ void read(u32 (&a)[4], int mt, int k) const { ptx::ldmatrix_x4(a, lane.offset(k) + mt * 16 * row_bytes); }
    __device__ __forceinline__ void get(u32 (&a)[4], int mt, int k) const {
        if constexpr (in_registers) {
            unroll<4>([&](int r) { a[r] = fragment[mt][k][r]; });
        } else {
            read(a, mt, k);
        }
    }
};

template <class Elem>
struct Mma16 : PlainTiles<2> {
    template <int m_tiles, int head_dim>
    using QRows = RowFragments<m_tiles, head_dim>;

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(float (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        const LaneRow<head_dim * 2> lane((l & 7) + ((l >> 4) << 3), (l >> 3) & 1);
        unroll<head_dim / 16>([&](int k) {
            u32 a[m_tiles][4];
            unroll<m_tiles>([&](int mt) { q.get(a[mt], mt, k); });
            const u32 address = k_shared + lane.offset(k);
            unroll<n_tiles / 2>([&](int pair) {
                u32 b[4];
                ptx::ldmatrix_x4(b, address + pair * 16 * head_dim * 2);
                multiply(s, a, b, pair);
            });
        });
    }

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop, class Between>
    static __device__ __forceinline__ void values(float (&o)[m_tiles][v_tiles][4], float (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop, const Between&) {
        constexpr int row_bytes = v_tiles * 8 * 2;
        const LaneRow<row_bytes> lane(l & 15, l >> 4);
        unroll<n_tiles / 2>([&](int c) {
            finish(c);
            u32 a[m_tiles][4];
            unroll<m_tiles>([&](int mt) {
                unroll<4>([&](int r) { a[mt][r] = pack<Elem>(s[mt][2 * c + r / 2][2 * (r & 1)], s[mt][2 * c + r / 2][2 * (r & 1) + 1]); });
                drop(mt, c, a[mt]);
            });
            unroll<v_tiles / 2>([&](int pair) {
                u32 b[4];
                ptx::ldmatrix_x4_trans(b, v_shared + lane.offset(pair) + c * 16 * row_bytes);
                multiply(o, a, b, pair);
            });
        });
    }

    // x += A B for the 16 columns of B that one ldmatrix has loaded.
    template <int m_tiles, int n_tiles>
    static __device__ __forceinline__ void multiply(float (&x)[m_tiles][n_tiles][4], const u32 (&a)[m_tiles][4], const u32 (&b)[4], int pair) {
        unroll<m_tiles, 2>([&](int mt, int half) { mma<Elem>(x[mt][2 * pair + half], a[mt], b[2 * half], b[2 * half + 1]); });
    }
};

template <>
struct Mma<__half> : Mma16<__half> {};
template <>
struct Mma<__nv_bfloat16> : Mma16<__nv_bfloat16> {};

// float64.  Scores are summed in the order of the columns, as the backward does.  The order of the second sum is free: slots q and q + 4 of an
// instruction are keys 2q and 2q + 1, which is how p lies in its accumulators.  From v a lane takes two columns at once, so of two
// neighbouring tiles of o the first has the even columns and the second the odd ones, until `arrange`.
template <>
struct Mma<double> : PlainTiles<8> {
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
        unroll<head_dim / 8>([&](int k) {
            double a[m_tiles][4];
            unroll<m_tiles>([&](int mt) { q.get(a[mt], mt, k); });
            unroll<n_tiles>([&](int n) {
                double b0, b1;
                keys.get(b0, b1, k, n * 8 * head_dim * 8);
                unroll<m_tiles>([&](int mt) { mma(s[mt][n], a[mt], b0, b1); });
            });
        });
    }

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop, class Between>
    static __device__ __forceinline__ void values(double (&o)[m_tiles][v_tiles][4], double (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop, const Between&) {
        constexpr int row_bytes = v_tiles * 8 * 8;
        static_assert(v_tiles % 2 == 0, "columns of v are worked on 16 at a time");
        const Lane<row_bytes, 128> even(l % 4 * 2, l / 4), odd(l % 4 * 2 + 1, l / 4);
        unroll<n_tiles / 2>([&](int c) {
            finish(c);
            double p[m_tiles][8];  // in the order of the random words: rows g, g + 8 of keys 2q, 2q + 1, then the same 8 keys on
            unroll<m_tiles>([&](int mt) {
                unroll<8>([&](int i) { p[mt][i] = s[mt][2 * c + i / 4][i % 4]; });
                drop(mt, c, p[mt]);
            });
            unroll<2>([&](int half) {
                double a[m_tiles][4];
                unroll<m_tiles, 4>([&](int mt, int r) { a[mt][r] = p[mt][4 * half + r % 2 * 2 + r / 2]; });
                unroll<v_tiles / 2>([&](int pair) {
                    const u32 rows = v_shared + (c * 16 + half * 8) * row_bytes;
                    double2 b0, b1;
                    ptx::load_shared(b0, rows + even.offset(pair));
                    ptx::load_shared(b1, rows + odd.offset(pair));
                    unroll<m_tiles>([&](int mt) {
                        mma(o[mt][2 * pair], a[mt], b0.x, b1.x);
                        mma(o[mt][2 * pair + 1], a[mt], b0.y, b1.y);
                    });
                });
            });
        });
    }

    // Makes neighbours of the pairs of columns in o; column(n, q) is then the first column of a pair.
    template <int m_tiles, int v_tiles>
    static __device__ __forceinline__ void arrange(double (&o)[m_tiles][v_tiles][4]) {
        unroll<m_tiles, v_tiles / 2, 2>([&](int mt, int pair, int h) {
            const double x = o[mt][2 * pair][2 * h + 1];
            o[mt][2 * pair][2 * h + 1] = o[mt][2 * pair + 1][2 * h];
            o[mt][2 * pair + 1][2 * h] = x;
        });
    }
    static __device__ __forceinline__ int column(int n, int q) { return n / 2 * 16 + q * 4 + n % 2 * 2; }
};
