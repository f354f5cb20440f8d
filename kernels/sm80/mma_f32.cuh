// The two products of the forward for float32 (sm80/mma.cuh says what they are), on halves: sm80/split_f32.cuh.
//
// Tensor cores round their sums towards zero, so no sum in them grows long: 16 columns for s, one tile of keys for o; the rest is added up in
// float32.
//
// Rows of v have exponents of their own too.  They are moved to p: p v = (p 2^(e - E)) (v 2^-e) 2^E, E the largest e of the tile.
#pragma once
#include "sm80/mma.cuh"
#include "sm80/split_f32.cuh"
#include "ptx/registers.cuh"

// products: 3 for float32 accuracy, 1 for 11 bits (what one product of TF32 has).
template <int products>
struct MmaSplit : PlainTiles<4> {
    static constexpr i32 key_shift = 2 * split::kTop;  // a key's factor undoes the scaling of both operands

    template <int rows, int columns>
    static constexpr int tile_bytes = rows * columns * 4 + split::exponent_bytes<rows, columns>;

    static constexpr bool prepares = true;
    template <int rows, int columns, int threads>
    static __device__ __forceinline__ void prepare_q(u32 tile, i32 thread) {
#pragma unroll 2
        for (int i = 0; i < split::steps<rows, columns, threads>; ++i) split::split_step<rows, columns, threads, 0>(tile, thread, i);
    }
    template <int rows, int columns, int columns_v, int threads>
    static __device__ __forceinline__ void prepare_kv(u32 tile, i32 thread, int part, int parts) {
        constexpr int k_steps = split::steps<rows, columns, threads>, v_steps = split::steps<rows, columns_v, threads>;
        constexpr int all = k_steps + v_steps;
        if constexpr (all <= 8) {
#pragma unroll
            for (int i = part * all / parts; i < (part + 1) * all / parts; ++i) {
                if (i < k_steps) split::split_step<rows, columns, threads, key_shift>(tile, thread, i);
                else split::split_step<rows, columns_v, threads, 0>(tile + tile_bytes<rows, columns>, thread, i - k_steps);
            }
        } else if (part == 0) {  // many steps of few threads would take too many registers in between
#pragma unroll 2
            for (int i = 0; i < k_steps; ++i) split::split_step<rows, columns, threads, key_shift>(tile, thread, i);
#pragma unroll 2
            for (int i = 0; i < v_steps; ++i) split::split_step<rows, columns_v, threads, 0>(tile + tile_bytes<rows, columns>, thread, i);
        }
    }

    template <int m_tiles, int head_dim>
    struct QRows {
        static constexpr int segments = split::segments<head_dim>;
        LaneRow<head_dim * 4, 64> lane;
        u32 exponents;  // address of this lane's row's

        __device__ __forceinline__ QRows(u32 tile, u32 tile_rows, u32 first_row, u32 l)
            : lane(l & 15, l >> 4 << 1), exponents(tile + tile_rows * head_dim * 4 + (first_row + l / 4) * segments * 4) {
            lane.base += tile + first_row * head_dim * 4;
        }
        __device__ __forceinline__ void load() {}
        __device__ __forceinline__ void get(u32 (&hi)[4], u32 (&lo)[4], int mt, int k) const {
            const u32 address = lane.offset(k) + mt * 16 * head_dim * 4;
            ptx::ldmatrix_x4(hi, address);
            if constexpr (products == 3) ptx::ldmatrix_x4(lo, address ^ 16);
        }
        __device__ __forceinline__ float factor(int mt, int h, int segment) const {
            float value;
            ptx::load_shared(value, exponents + ((mt * 16 + h * 8) * segments + segment) * 4);
            return value;
        }
    };

    template <int m_tiles, int n_tiles, int head_dim>
    static __device__ __forceinline__ void scores(float (&s)[m_tiles][n_tiles][4], const QRows<m_tiles, head_dim>& q, u32 k_shared, u32 l) {
        constexpr int segments = split::segments<head_dim>, row_bytes = head_dim * 4;
        // One ldmatrix has hi and lo of eight keys: chunks 0, 2 (hi) and 1, 3 (lo) of a step.
        const LaneRow<row_bytes, 64> lane(l & 7, (l >> 3 & 1) << 1 | l >> 4);
        const u32 exponents = k_shared + n_tiles * 8 * row_bytes + l % 4 * 2 * segments * 4;
#pragma unroll 1
        for (int k = 0; k < head_dim / 16; ++k) {
            u32 hi[m_tiles][4], lo[m_tiles][4];
            unroll<m_tiles>([&](int mt) { q.get(hi[mt], lo[mt], mt, k); });
            unroll<n_tiles>([&](int n) {
                split::Sums<products, m_tiles> sums;
                u32 b[4];
                ptx::ldmatrix_x4(b, k_shared + lane.offset(k) + n * 8 * row_bytes);
                unroll<m_tiles>([&](int mt) { sums.add(mt, hi[mt], lo[mt], b); });
                float factor[m_tiles][4];
                if constexpr (segments > 1) find_factors(factor, q, exponents + n * 8 * segments * 4, k / 8);
                unroll<m_tiles, 4>([&](int mt, int r) {
                    s[mt][n][r] = segments > 1 ? fmaf(sums.total(mt, r), factor[mt][r], s[mt][n][r]) : s[mt][n][r] + sums.total(mt, r);
                });
            });
        }
        if constexpr (segments == 1) {
            unroll<n_tiles>([&](int n) {
                float factor[m_tiles][4];
                find_factors(factor, q, exponents + n * 32, 0);
                unroll<m_tiles, 4>([&](int mt, int r) { s[mt][n][r] *= factor[mt][r]; });
            });
        }
    }

    // 2^(exponents of row and key) for this lane's part of 16 m_tiles x 8 scores; `exponents` is the address of its first key's.
    template <int m_tiles, int head_dim>
    static __device__ __forceinline__ void find_factors(float (&factor)[m_tiles][4], const QRows<m_tiles, head_dim>& q, u32 exponents, int segment) {
        constexpr int segments = split::segments<head_dim>;
        float key[2];
        unroll<2>([&](int e) { ptx::load_shared(key[e], exponents + (e * segments + segment) * 4); });
        unroll<m_tiles, 4>([&](int mt, int r) { factor[mt][r] = key[r % 2] * q.factor(mt, r / 2, segment); });
    }

    // The bits of the exponents 2^e of this lane's keys, and the largest of the tile.
    template <int n_tiles, int segments>
    struct KeyExponents {
        u32 address, largest;

        __device__ __forceinline__ KeyExponents(u32 exponents, int segment, u32 l) : address(exponents + segment * 4) {
            largest = 0;
#pragma unroll
            for (int key = 0; key < n_tiles * 8; key += 32) {
                u32 bits = 0;
                if (n_tiles * 8 % 32 == 0 || key + l < n_tiles * 8) ptx::load_shared(bits, address + (key + l) * segments * 4);
                largest = max(largest, bits);
            }
            largest = __reduce_max_sync(~0u, largest);
            address += l % 4 * 2 * segments * 4;
        }
        // 2^(e - E + kTop) for key 8 n + 2q + odd.
        __device__ __forceinline__ float weight(int n, int odd) const {
            u32 bits;
            ptx::load_shared(bits, address + (n * 8 + odd) * segments * 4);
            return __uint_as_float(max(static_cast<i32>(bits - largest) + ((127 + split::kTop) << 23), 0));
        }
        __device__ __forceinline__ float unit() const { return __uint_as_float(largest - (2 * split::kTop << 23)); }
    };

    // Fragments of p for 16 keys.  p is at most 1, so lo may keep its place, and all three products go into one sum: lo of v, which is
    // held times 2^11, meets hi times 2^-11.
    template <int m_tiles>
    struct Weights {
        u32 hi[m_tiles][4], lo[m_tiles][4], small[m_tiles][4];
    };

    template <int m_tiles, int n_tiles, int v_tiles, class Finish, class Drop, class Between>
    static __device__ __forceinline__ void values(float (&o)[m_tiles][v_tiles][4], float (&s)[m_tiles][n_tiles][4], u32 v_shared, u32 l,
                                                  const Finish& finish, const Drop& drop, const Between& between) {
        constexpr int row_bytes = v_tiles * 8 * 4, segments = split::segments<v_tiles * 8>, chunks = n_tiles / 2;
        const LaneRow<row_bytes> lane(l & 15, l >> 4);
        unroll<segments>([&](int segment) {
            const KeyExponents<n_tiles, segments> keys(v_shared + n_tiles * 8 * row_bytes, segment, l);
            Weights<m_tiles> p[chunks];
            unroll<chunks>([&](int c) {
                if (segment == 0) finish(c);
                weigh(p[c], s, c, keys);
                unroll<m_tiles>([&](int mt) {
                    drop(mt, c, p[c].hi[mt], p[c].lo[mt]);
                    unroll<4>([&](int r) { p[c].small[mt][r] = ptx::mul_f16x2(p[c].hi[mt][r], 0x10001000u); });
                });
            });
            const float unit = keys.unit();
#pragma unroll
            for (int n = segment * 16; n < v_tiles && n < segment * 16 + 16; ++n) {
                float sum[m_tiles][4] = {};
                unroll<chunks>([&](int c) {
                    u32 b[4];
                    ptx::ldmatrix_x4_trans(b, v_shared + lane.offset(n) + c * 16 * row_bytes);
                    unroll<m_tiles>([&](int mt) {
                        if constexpr (products == 3) {
                            ptx::mma_m16n8k16_f16(sum[mt], p[c].lo[mt], b[0], b[1]);
                            ptx::mma_m16n8k16_f16(sum[mt], p[c].small[mt], b[2], b[3]);
                        }
                        ptx::mma_m16n8k16_f16(sum[mt], p[c].hi[mt], b[0], b[1]);
                    });
                });
                between(n, v_tiles);
                unroll<m_tiles, 4>([&](int mt, int r) { o[mt][n][r] = fmaf(sum[mt][r], unit, o[mt][n][r]); });
            }
        });
    }

    template <int m_tiles, int n_tiles, class Keys>
    static __device__ __forceinline__ void weigh(Weights<m_tiles>& p, const float (&s)[m_tiles][n_tiles][4], int c, const Keys& keys) {
        unroll<2>([&](int half) {
            const int n = 2 * c + half;
            const float w0 = keys.weight(n, 0), w1 = keys.weight(n, 1);
            unroll<m_tiles, 2>([&](int mt, int h) {
                split::split_pair<1>(p.hi[mt][2 * half + h], p.lo[mt][2 * half + h], s[mt][n][2 * h] * w0, s[mt][n][2 * h + 1] * w1);
            });
        });
    }
};

template <>
struct Mma<float> : MmaSplit<cfg::tf32 ? 1 : 3> {};
