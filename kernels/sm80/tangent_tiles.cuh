// Tiles and products of the kernels along tangents: a warp owns 16 rows of an owner's tile, and streams past them tiles of the other side.
//
// All products are those of the forward: an owner's rows with a streamed tile's give scores in registers, and scores, rounded to the tile's
// type, with a streamed tile give sums.  Float32 is computed of pairs of halves (sm80/mma_f32.cuh) or in float64 (cfg::source: what memory holds;
// cfg::stat: l, m and unrounded results).
#pragma once
#include "attn/mask.cuh"
#include "attn/philox.cuh"
#include "attn/tangents.cuh"
#include "sm80/mma_f32.cuh"

using Elem = cfg::elem;
using Source = cfg::source;
using Stat = cfg::stat;
using Acc = cfg::acc;
using Product = Mma<Elem>;

constexpr int threads = 32 * cfg::warps;
// Warps that share 16 rows: each finds the scores of its part of the keys, and sums its part of the columns.
constexpr int sharers = cfg::sharers, owned_rows = 16 * cfg::warps / sharers;

__device__ __forceinline__ u32 own_row() { return sharers == 1 ? threadIdx.x / 32 * 16 : threadIdx.x / 32 % (owned_rows / 16) * 16; }
__device__ __forceinline__ u32 own_share() { return sharers == 1 ? 0 : threadIdx.x / (2 * owned_rows); }

// Whether some row sees a key.  Others must not reach a product: they could hold NaN.
__device__ __forceinline__ bool is_live(const Params& p, i64 bias, i64 instance, i32 key) {
    bool seen = key < p.n_keys && bias_shows(p, bias, key);
    if constexpr (cfg::band_left || cfg::band_right) seen = seen && band_sees(p, key);
    if constexpr (cfg::mask != kMaskNone) seen = seen && key_alive(p, instance, key);
    return seen;
}

// Rows for which live(row of the tile) is true, of which n_cols columns exist; all else becomes zeros.
template <int rows, int columns, class Live>
__device__ __forceinline__ void load_rows(u32 shared, const Source* from, i64 stride, i32 n_cols, const Live& live) {
    if constexpr (same_type<Source, Elem>) {
        load_tile<Elem, rows, columns, threads, cfg::load_bytes>(shared, from, stride, n_cols, live, threadIdx.x);
    } else {
        constexpr int per_chunk = 16 / int(sizeof(Elem));
        for (int index = threadIdx.x; index < rows * columns; index += threads) {
            const int row = index / columns, column = index % columns;
            const Elem x = column < n_cols && live(row) ? static_cast<Elem>(from[row * stride + column]) : Elem(0);
            ptx::store_shared(shared + swizzle<columns * int(sizeof(Elem)), sizeof(Elem) == 8>(row, column / per_chunk) + column % per_chunk * int(sizeof(Elem)), x);
        }
    }
}

// s += rows of the owner's tile, 16 of this warp, with those of a streamed tile.
template <int columns, int tiles>
__device__ __forceinline__ void add_scores(Acc (&s)[1][tiles][4], u32 owner, u32 streamed) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (sizeof(Elem) == 2) {
        Product::QRows<1, columns> rows(owner, owned_rows, own_row(), lane);
        rows.load();
        Product::scores(s, rows, streamed, lane);
    } else if constexpr (sizeof(Elem) == 4) {
        Acc part[1][tiles][4] = {};  // which exponents of rows are applied to
        Product::scores(part, Product::QRows<1, columns>(owner, owned_rows, own_row(), lane), streamed, lane);
        unroll<tiles, 4>([&](int n, int i) { s[0][n][i] += part[0][n][i]; });
    } else {  // unrolled altogether it would hold too many addresses
        const Mma<double>::QRows<1, columns> rows(owner, owned_rows, own_row(), lane);
        const Mma<double>::RowElements<columns * int(sizeof(double))> keys(streamed, lane);
#pragma unroll 4
        for (int k = 0; k < columns / 8; ++k) {
            double a[4];
            rows.get(a, 0, k);
            unroll<tiles>([&](int n) {
                double b0, b1;
                keys.get(b0, b1, k, n * 8 * columns * int(sizeof(double)));
                mma(s[0][n], a, b0, b1);
            });
        }
    }
}

// s += q k, t += q. k + q k., of as many of these as there are; in float64 all at once, since few products of a warp depend on nothing else.
template <int columns, int tiles>
__device__ __forceinline__ void add_moved_scores(Acc (&s)[1][tiles][4], Acc (&t)[1][tiles][4], u32 q, u32 tq, u32 k, u32 tk) {
    if constexpr (sizeof(Elem) < 8) {
        add_scores<columns>(s, q, k);
        if constexpr (cfg::tq) add_scores<columns>(t, tq, k);
        if constexpr (cfg::tk) add_scores<columns>(t, q, tk);
    } else {
        constexpr int row_bytes = columns * int(sizeof(double));
        const u32 lane = threadIdx.x % 32;
        const Mma<double>::QRows<1, columns> rows(q, owned_rows, own_row(), lane);
        const Mma<double>::RowElements<row_bytes> keys(k, lane);
        Acc other[1][tiles][4] = {};
#pragma unroll 2
        for (int step = 0; step < columns / 8; ++step) {
            double a[4], ta[4];
            rows.get(a, 0, step);
            if constexpr (cfg::tq) {
                Mma<double>::QRows<1, columns> moved = rows;
                moved.rows.half += tq - q;
                moved.get(ta, 0, step);
            }
            unroll<tiles>([&](int n) {
                double b0, b1, tb0, tb1;
                keys.get(b0, b1, step, n * 8 * row_bytes);
                mma(s[0][n], a, b0, b1);
                if constexpr (cfg::tq) mma(t[0][n], ta, b0, b1);
                if constexpr (cfg::tk) {
                    keys.get(tb0, tb1, step, tk - k + n * 8 * row_bytes);
                    mma(other[0][n], a, tb0, tb1);
                }
            });
        }
        unroll<tiles, 4>([&](int n, int i) { t[0][n][i] += other[0][n][i]; });
    }
}

// Halves have a fixed least bit, and weights of tangents any size: those of each row are taken relative to the power of two beneath the largest.
template <int tiles>
struct RowUnits {
    Acc up[2], down[2];

    __device__ __forceinline__ explicit RowUnits(const Acc (&s)[1][tiles][4]) {
        unroll<2>([&](int h) {
            Acc top = 0;
            unroll<tiles, 2>([&](int n, int e) { top = fmaxf(top, fabsf(s[0][n][2 * h + e])); });
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const u32 exponent = min(max(__float_as_uint(top) & 0x7f800000u, split::kLeast), 253u << 23);
            down[h] = __uint_as_float(exponent), up[h] = __uint_as_float((254u << 23) - exponent);
        });
    }
};

// Fragments of the left factor of products with a tile of pairs of halves, and the factors that the rows' products take.
template <int tiles>
struct SplitWeights {
    Mma<float>::Weights<1> parts[tiles / 2];
    float unit[2];

    template <class Keys>
    __device__ __forceinline__ SplitWeights(const Acc (&s)[1][tiles][4], const Keys& keys) {
        unroll<tiles / 2>([&](int c) { Mma<float>::weigh(parts[c], s, c, keys); });
        unit[0] = unit[1] = keys.unit();
    }

    // sum += the rows with 8 columns; b: 16 keys each, hi and lo.
    __device__ __forceinline__ void add(float (&sum)[4], const u32 (&b)[tiles / 2][4]) const {
        float part[4] = {}, low[4] = {};
        unroll<tiles / 2>([&](int c) {
            if constexpr (!cfg::tf32) {
                ptx::mma_m16n8k16_f16(low, parts[c].hi[0], b[c][2], b[c][3]);  // lo of the tile is held times 2^11
                ptx::mma_m16n8k16_f16(part, parts[c].lo[0], b[c][0], b[c][1]);
            }
            ptx::mma_m16n8k16_f16(part, parts[c].hi[0], b[c][0], b[c][1]);
        });
        unroll<4>([&](int r) { sum[r] = fmaf(cfg::tf32 ? part[r] : fmaf(low[r], split::kLowUnit, part[r]), unit[r / 2], sum[r]); });
    }
};

// sum += s with a streamed tile of pairs of halves, and if `moves` moved += t with it; t becomes anything.
template <bool moves, int columns, int sums, int tiles>
__device__ __forceinline__ void add_split_values(Acc (&sum)[1][sums][4], Acc (&moved)[1][sums][4], const Acc (&s)[1][tiles][4], Acc (&t)[1][tiles][4], u32 streamed) {
    static_assert(columns == 8 * sums && columns <= 128, "one segment");
    constexpr int row_bytes = columns * 4;
    const u32 l = threadIdx.x % 32;
    const LaneRow<row_bytes> lane(l & 15, l >> 4);
    const Mma<float>::KeyExponents<tiles, 1> keys(streamed + tiles * 8 * row_bytes, 0, l);
    const SplitWeights<tiles> weights(s, keys);
    SplitWeights<tiles> other(weights);
    if constexpr (moves) {
        const RowUnits<tiles> units(t);
        unroll<tiles, 4>([&](int n, int i) { t[0][n][i] *= units.up[i / 2]; });
        other = SplitWeights<tiles>(t, keys);
        unroll<2>([&](int h) { other.unit[h] *= units.down[h]; });
    }
    unroll<sums>([&](int n) {
        u32 b[tiles / 2][4];
        unroll<tiles / 2>([&](int c) { ptx::ldmatrix_x4_trans(b[c], streamed + lane.offset(n) + c * 16 * row_bytes); });
        weights.add(sum[0][n], b);
        if constexpr (moves) other.add(moved[0][n], b);
    });
}

// sum += s with columns first ... first + 8 sums of a streamed tile that has `columns`; a multiple of 16.
template <int columns, int sums, int tiles>
__device__ __forceinline__ void add_values(Acc (&sum)[1][sums][4], const Acc (&s)[1][tiles][4], u32 streamed, int first) {
    constexpr int row_bytes = columns * int(sizeof(Elem));
    const u32 l = threadIdx.x % 32;
    if constexpr (sizeof(Elem) == 2) {
        const LaneRow<row_bytes> lane(l & 15, l >> 4);
        unroll<tiles / 2>([&](int c) {
            u32 a[1][4];
            unroll<4>([&](int r) { a[0][r] = pack<Elem>(s[0][2 * c + r / 2][2 * (r & 1)], s[0][2 * c + r / 2][2 * (r & 1) + 1]); });
            unroll<sums / 2>([&](int pair) {
                u32 b[4];
                ptx::ldmatrix_x4_trans(b, streamed + lane.offset(first / 16 + pair) + c * 16 * row_bytes);
                Mma16<Elem>::multiply(sum, a, b, pair);
            });
        });
    } else {
        // Of two neighbouring tiles the first has the even columns and the second the odd ones, until Product::arrange.
        const LaneRow<row_bytes, 128, true> even(l % 4 * 2, l / 4), odd(l % 4 * 2 + 1, l / 4);
        unroll<tiles / 2, 2>([&](int c, int half) {
            double a[4];
            unroll<4>([&](int r) { a[r] = s[0][2 * c + half][r % 2 * 2 + r / 2]; });
            unroll<sums / 2>([&](int pair) {
                const u32 rows = streamed + (c * 16 + half * 8) * row_bytes;
                double2 b0, b1;
                ptx::load_shared(b0, rows + even.offset(first / 16 + pair));
                ptx::load_shared(b1, rows + odd.offset(first / 16 + pair));
                mma(sum[0][2 * pair], a, b0.x, b1.x);
                mma(sum[0][2 * pair + 1], a, b0.y, b1.y);
            });
        });
    }
}

// The same of a jvp: o += s v, to += t v + s tv.
template <int columns, int sums, int tiles>
__device__ __forceinline__ void add_moved_values(Acc (&o)[1][sums][4], Acc (&to)[1][sums][4], const Acc (&s)[1][tiles][4], Acc (&t)[1][tiles][4], u32 v, u32 tv) {
    if constexpr (sizeof(Elem) == 4) {
        if constexpr (cfg::tv) add_split_values<false, columns>(to, to, s, t, tv);
        add_split_values<cfg::moves, columns>(o, to, s, t, v);
    } else if constexpr (sizeof(Elem) == 2) {
        add_values<columns>(o, s, v, 0);
        if constexpr (cfg::moves) add_values<columns>(to, t, v, 0);
        if constexpr (cfg::tv) add_values<columns>(to, s, tv, 0);
    } else {
        constexpr int row_bytes = columns * int(sizeof(double));
        const u32 l = threadIdx.x % 32;
        const LaneRow<row_bytes, 128, true> even(l % 4 * 2, l / 4), odd(l % 4 * 2 + 1, l / 4);
        unroll<tiles / 2, 2>([&](int c, int half) {
            double a[4], ta[4];
            unroll<4>([&](int r) { a[r] = s[0][2 * c + half][r % 2 * 2 + r / 2], ta[r] = t[0][2 * c + half][r % 2 * 2 + r / 2]; });
            unroll<sums / 2>([&](int pair) {
                const u32 rows = (c * 16 + half * 8) * row_bytes;
                double2 b0, b1;
                ptx::load_shared(b0, v + rows + even.offset(pair));
                ptx::load_shared(b1, v + rows + odd.offset(pair));
                const auto add = [&](Acc (&sum)[1][sums][4], const double (&from)[4]) {
                    mma(sum[0][2 * pair], from, b0.x, b1.x);
                    mma(sum[0][2 * pair + 1], from, b0.y, b1.y);
                };
                add(o, a);
                if constexpr (cfg::moves) add(to, ta);
                if constexpr (cfg::tv) {
                    ptx::load_shared(b0, tv + rows + even.offset(pair));
                    ptx::load_shared(b1, tv + rows + odd.offset(pair));
                    add(to, a);
                }
            });
        });
    }
}

// The rows of this warp: sums times factors (of the two rows of a lane) to memory, columns first ... of `count`.
template <class Out, int sums>
__device__ __forceinline__ void store_sums(Out* to, i64 stride, i32 rows, i32 row0, i32 first, i32 count, Acc (&sum)[1][sums][4], Acc upper, Acc lower) {
    Product::arrange(sum);
    const u32 lane = threadIdx.x % 32;
    unroll<2>([&](int h) {
        const i64 row = row0 + own_row() + lane / 4 + 8 * h;
        if (row >= rows) return;
        unroll<sums, 2>([&](int n, int e) {
            const i32 column = first + Product::column(n, lane % 4) + e;
            if (column < count) to[row * stride + column] = round_to<Out>(sum[0][n][2 * h + e] * (h ? lower : upper));
        });
    });
}

// Calls work(n, i, row, key, head, row, key) for a lane's scores and what functions know of their places.  Scores have rows of the owner and
// columns of the streamed side; `keys_own`: the owner's are keys.
template <bool keys_own, int tiles, class Work>
__device__ __forceinline__ void for_elements(const Params& p, const TracedHead& head, i32 owner0, i32 stream0, const Work& work) {
    const i32 lane = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32, own = owner0 + static_cast<i32>(own_row()) + lane / 4;
    unroll<2>([&](int h) {
        const i32 mine = own + 8 * h;
        const TracedRow own_row = TracedRow::of(p, head, mine);
        const TracedKey own_key = TracedKey::of(p, head, mine);
        unroll<tiles, 2>([&](int n, int e) {
            const i32 other = stream0 + 8 * n + lane % 4 * 2 + e;
            if constexpr (keys_own) work(n, 2 * h + e, other, mine, TracedRow::of(p, head, other), own_key);
            else work(n, 2 * h + e, mine, other, own_row, TracedKey::of(p, head, other));
        });
    });
}

// Calls work(n, i) for a lane's scores that masks, the band or the end of an axis hide.
template <bool keys_own, int tiles, class Work>
__device__ __forceinline__ void for_hidden(const Params& p, const MaskSlices& slices, i32 owner0, i32 stream0, const Work& work) {
    const i32 lane = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32, own = owner0 + static_cast<i32>(own_row()) + lane / 4;
    const auto look = [&](const KeyMask& mask, i32 row, i32 key, int n, int i) {
        if (row >= p.n_queries || !mask.visible(p, row, key)) work(n, i);
    };
    if constexpr (keys_own) {
        unroll<2>([&](int h) {
            const KeyMask mask(p, slices, own + 8 * h);
            unroll<tiles, 2>([&](int n, int e) { look(mask, stream0 + 8 * n + lane % 4 * 2 + e, own + 8 * h, n, 2 * h + e); });
        });
    } else {
        unroll<tiles, 2>([&](int n, int e) {
            const i32 key = stream0 + 8 * n + lane % 4 * 2 + e;
            const KeyMask mask(p, slices, key);
            unroll<2>([&](int h) { look(mask, own + 8 * h, key, n, 2 * h + e); });
        });
    }
}

// Calls work(n, i) for a lane's scores that dropout takes.
template <bool keys_own, int tiles, class Work>
__device__ __forceinline__ void for_dropped(const Params& p, const RandomStream& stream, i32 owner0, i32 stream0, const Work& work) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const i32 lane = threadIdx.x % 32, own0 = owner0 + static_cast<i32>(own_row());
    unroll<tiles / 2>([&](int c) {
        u32 words[4];
        if constexpr (!keys_own) {
            random_words(words, p, stream, own0 + lane / 4, stream0 + 16 * c + lane % 4 * 2);
            unroll<4>([&](int w) {
                if (!kept_low<threshold>(words[w])) work(2 * c + w / 2, 2 * (w & 1));
                if (!kept_high<threshold>(words[w])) work(2 * c + w / 2, 2 * (w & 1) + 1);
            });
        } else {
            const i32 key = own0 + lane / 4;  // and the eighth after it; a draw's words are those of an even key and the next
            unroll<2>([&](int e) {
                random_words(words, p, stream, stream0 + 16 * c + lane % 4 * 2 + e, key & ~1);
                unroll<4>([&](int w) {
                    const bool kept = key & 1 ? kept_high<threshold>(words[w]) : kept_low<threshold>(words[w]);
                    if (!kept) work(2 * c + (w & 1), w / 2 * 2 + e);
                });
            });
        }
    });
}
