// The five matrix products of a step of algorithm 4, each on one warpgroup's part.  All are asynchronous.
//
// Scores are computed transposed, keys down and queries across: a warpgroup owns 64 keys, and its P^T and dS^T are, rounded, the
// register operands of the products that accumulate dV and dK.  Only dQ, to which all keys contribute, needs dS in shared memory.
//
// Scores to probabilities to dS, on one warpgroup's 64 keys: a thread holds keys g and g + 8 of its warp's 16, and two
// neighbours of every 8 queries.
#pragma once
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/hidden.cuh"
#include "sm90/scores.cuh"

namespace sm90::bwd {

using Scores = float[cfg::block_m / 2];           // 64 keys x block_m queries
using Fragments = u32[cfg::block_m / 16][4];      // the same rounded, as A operands of 16 queries each
using KeyGradient = float[cfg::head_dim / 2];     // dK of 64 keys
using ValueGradient = float[cfg::head_dim_v / 2];
using QueryGradient = float[dq_columns / 2];      // dQ of 64 rows

// Line 11: S^T = K Q^T.  k: this warpgroup's rows.  The caller commits.
__device__ __forceinline__ void compute_s(Scores& s, u32 k, u32 q) {
    ptx::wgmma_fence();
    multiply_rows<cfg::head_dim, cfg::block_n, cfg::block_m, sign>(s, k, q);
}

// Line 17: dP^T = V dO^T.  v: this warpgroup's rows.
__device__ __forceinline__ void compute_dp(Scores& dp, u32 v, u32 dout) {
    ptx::wgmma_fence();
    multiply_rows<cfg::head_dim_v, cfg::block_n, cfg::block_m, 1>(dp, v, dout);
    ptx::wgmma_commit();
}

// A key tile's V as the consumers multiply it: out of shared memory.
struct ReadValues {
    __device__ __forceinline__ void load(u32) const {}
    __device__ __forceinline__ void multiply(Scores& dp, u32 v, u32 dout, u32) const { compute_dp(dp, v, dout); }
};

// Are sums of dS for one array, with a weight or a step that all rows share, all that registers are taken for?
#ifdef WEIGHTED_SUMS
constexpr bool sums_little = cfg::dbias == kDbiasWeighted && cfg::weights == 1 && cfg::apart == 0 && cfg::tilts == 0;
#else
constexpr bool sums_little = false;
#endif

// With a split delta (attn/bwd_workspace.cuh): dP less D, so that no thread loads or subtracts it.  The registers that this saves keep a
// part of V, since a product of 64 rows and keys reads as much shared memory as it can multiply, and then half as much.
struct HeldValues {
    // Of 16 columns.  The assembler grants no more; a key tile under a column mask meets too few rows for as many.
    static constexpr bool loads_bias = adds_bias && !cfg::bias_keys && !cfg::bias_tiles;
    static constexpr bool sums_much = cfg::dbias >= kDbiasWeighted && !(splits && sums_little);
    static constexpr int steps = column_masks > 0 || stated_mask || loads_bias || sums_much ? 2 : splits ? 3 : 4;
    HeldRows<steps> rows;
    u32 minus_half[4];  // A: -1/2 where B has a part of D; both halves of B's 16 rows are the same 8

    __device__ __forceinline__ HeldValues() {
        const u32 column = 2 * (threadIdx.x % 4), pair = column == 0 ? 0xBF00BF00 : column == 2 ? 0xBF00 : 0;
#pragma unroll
        for (u32& columns : minus_half) columns = pair;
    }

    // v: this warpgroup's rows.
    __device__ __forceinline__ void load(u32 v) { rows.load(v); }

    __device__ __forceinline__ void multiply(Scores& dp, u32 v, u32 dout, u32 delta) const {
        ptx::wgmma_fence();
        ptx::Product<cfg::block_m>::rs<true, 1, 1>(dp, minus_half, ptx::wgmma_descriptor(delta, 16, 0), 0);
        rows.multiply(dp, dout);
        multiply_rows<cfg::head_dim_v, cfg::block_n, cfg::block_m, 1, steps>(dp, v, dout, 1);
        ptx::wgmma_commit();
    }
};

// Lines 16 and 22: dV += P^T dO, or dK += dS^T Q: the fragments' queries times the tile's rows; begun = 0: instead of +=.
template <int n>
__device__ __forceinline__ void accumulate(float (&d)[n], const Fragments& a, u32 tile, u32 begun = 1) {
    ptx::wgmma_fence();
    accumulate_rows<cfg::block_m>(d, a, tile, begun);
    ptx::wgmma_commit();
}

// Line 21: dQ = dS K, over all keys of the tile.  ds: this warpgroup's rows; k: its columns.
__device__ __forceinline__ void compute_dq(QueryGradient& dq, u32 ds, u32 k) {
    ptx::wgmma_fence();
    unroll<cfg::block_n / 16>([&](int step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 a = ptx::wgmma_descriptor(ds, 16, eight_rows) + ((slab * cfg::block_m * row_bytes + column) >> 4);
        const u64 b = ptx::wgmma_descriptor(k, cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<dq_columns>::ss<is_bfloat16, 1, 1>(dq, a, b, step > 0);
    });
    ptx::wgmma_commit();
}

// Element i of a thread belongs to its key key_of(i) and to query query_of(i), counted from twice its place in the quad.
__device__ __forceinline__ constexpr int key_of(int i) { return (i >> 1) & 1; }
__device__ __forceinline__ constexpr int query_of(int i) { return 8 * (i >> 2) + (i & 1); }

// The tile being worked on, as the element mask and dropout see it.
struct TilePlace {
    i32 batch, head, first_row, key;  // key: the thread's first
};

// Which of 64 rows from first_row on see a key.
__device__ __forceinline__ u64 visible_rows(const Params& p, const TilePlace& at, i32 first_row, i32 key) {
    u64 rows = band_rows<u64>(p, first_row, key);
    const i64 instance = column_masks > 0 || boolean_mask ? slice_of(p.table, at.batch, at.head) : 0;
    if constexpr (column_masks > 0) rows &= column_rows<u64>(__ldg(p.table.cols + instance * p.table.keys_padded + key), first_row);
    if constexpr (boolean_mask) rows &= __ldg(boolean_bits(p, instance, first_row / 64, key / cfg::block_n) + key % cfg::block_n);
    if constexpr (block_mask)
        rows &= block_rows<u64>(p, static_cast<const u8*>(p.mask.data) + slice_of(p.mask, at.batch, at.head), first_row, key);
    if constexpr (cfg::split_bias) rows &= bias_shows(p, slice_of(p.bias, at.batch, at.head), key) ? ~0ull : 0;
    return rows;
}

// Visibility of a thread's elements: by key and 64 queries, bit query_of(i) % 64.
using VisibleBits = u64[2][(cfg::block_m + 63) / 64];

// The same where nothing but a band hides: by key from which query on, and before which, counted as query_of(i) is.  Fewer registers, which
// makes causal kernels faster by up to 1 %; tiles of 128 rows that hide nothing, and kernels that do more besides, keep the bits.
struct VisibleRange {
    i32 first[2], end[2];
};
constexpr bool plain = !cfg::dropout && !cfg::bias && !cfg::score && !cfg::softcap && !cfg::deterministic;
constexpr bool band_alone = cfg::mask == kMaskNone && plain && (!unmasked || cfg::block_m == 64);
using Visible = Either<band_alone, VisibleRange, VisibleBits>::type;

// Takes away what a mask function hides.
__device__ __forceinline__ void ask_function(VisibleBits& visible, const Params& p, const TilePlace& at) {
    const FunctionHead head = FunctionHead::of(p, static_cast<i32>(slice_of(p.function, at.batch, at.head)));
    const FunctionKey keys[2] = {FunctionKey::of(p, head, at.key), FunctionKey::of(p, head, at.key + 8)};
    const i32 first = at.first_row + 2 * (threadIdx.x % 4);
    unroll<(cfg::block_m + 63) / 64>([&](int half) {
#pragma unroll 2
        for (int i = 0; i < 64; i += 8) {
            unroll<2>([&](int e) {
                const FunctionRow row = FunctionRow::of(p, head, first + 64 * half + i + e);
                unroll<2>([&](int r) { visible[r][half] &= function_shows(p, head, row, keys[r]) ? ~0ull : ~(1ull << (i + e)); });
            });
        }
    });
}

__device__ __forceinline__ void find_visible(VisibleRange& visible, const Params& p, const TilePlace& at) {
    unroll<2>([&](int r) {
        const i32 key = at.key + 8 * r, diagonal = key - at.first_row - 2 * (threadIdx.x % 4);
        visible.first[r] = key >= p.n_keys ? cfg::block_m : cfg::band_right ? diagonal - p.band_right : 0;
        visible.end[r] = cfg::band_left ? diagonal + p.band_left + 1 : cfg::block_m;
    });
}

__device__ __forceinline__ void find_visible(VisibleBits& visible, const Params& p, const TilePlace& at) {
    unroll<2, (cfg::block_m + 63) / 64>([&](int r, int half) {
        visible[r][half] = visible_rows(p, at, at.first_row + 64 * half, at.key + 8 * r) >> (2 * (threadIdx.x % 4));
    });
    if constexpr (function_mask) ask_function(visible, p, at);
}

// Hidden scores become -inf, whatever they were.
__device__ __forceinline__ void mask_scores(Scores& s, const VisibleRange& visible) {
    unroll<cfg::block_m / 2>([&](int i) {
        const int query = query_of(i), key = key_of(i);
        s[i] = query >= visible.first[key] && (!cfg::band_left || query < visible.end[key]) ? s[i] : minus_infinity();
    });
}

__device__ __forceinline__ void mask_scores(Scores& s, const VisibleBits& visible) {
    unroll<cfg::block_m / 2>([&](int i) {
        const int query = query_of(i);
        const u64 rows = visible[key_of(i)][query / 64];
        const u32 word = static_cast<u32>(query % 64 < 32 ? rows : rows >> 32);
        s[i] = word & (1u << query % 32) ? s[i] : minus_infinity();
    });
}

// Takes the maximum from n scores of a thread that belong to far rows, as the forward rounded both, so that weigh finds what is left of their
// exponents: exactly - log2 l at the maximum.  They lie in shared memory as store_registers left them, so that a loop can tell them apart: a
// short one, since steps without far rows jump over it.  first_row: of the row tile's, that of the first score.
template <int n>
__device__ __forceinline__ void subtract_far(u32 scores, const Params& p, const TilePlace& at, i32 first_row) {
    const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, at.batch, at.head);
    scores += 16 * (threadIdx.x % 128);
#pragma unroll 1
    for (i32 i = 0; i < n; i += i % 2 ? 3 : 1) {  // elements i and i + 2 are of one row
        const i32 row = at.first_row + first_row + query_of(i) + 2 * (threadIdx.x % 4);
        const float top = maxima[min(row, p.n_queries - 1) * p.m.row];
        if (!is_far_row(top)) continue;
        const float scale = cfg::prescaled ? 1.0f : fabsf(static_cast<float>(p.scale)), inverse = __fdividef(1.0f, scale);
        unroll<2>([&](int key) {
            const u32 address = scores + i / 4 * 2048 + 4 * (i % 2) + 8 * key;
            float score;
            ptx::load_shared(score, address);
            ptx::store_shared(address, sm90::subtract_far(score, top, scale, inverse));
        });
    }
}

// The same where all scores lack what a function adds to their rows, rest_of_row(row), and many rows may be far: a warp asks for all maxima together.
template <int n, class Rest>
__device__ __forceinline__ void complete_far(u32 scores, const Params& p, const TilePlace& at, i32 first_row, const Rest& rest_of_row) {
    const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, at.batch, at.head);
    first_row += at.first_row;
    const i32 lane = threadIdx.x % 32;
    const float scale = cfg::prescaled ? 1.0f : fabsf(static_cast<float>(p.scale)), inverse = __fdividef(1.0f, scale);
    scores += 16 * (threadIdx.x % 128);
    float tops[2];  // of rows 32 apart
    unroll<2>([&](int half) { tops[half] = maxima[min(first_row + 32 * half + lane, p.n_queries - 1) * p.m.row]; });
#pragma unroll 1
    for (i32 four = 0; four < n / 4; ++four, scores += 2048) {  // scores, of two rows and keys
        float4 x;
        ptx::load_shared(x, scores);
        float each[4] = {x.x, x.y, x.z, x.w};
        unroll<2>([&](int e) {
            const i32 row = 8 * four + 2 * (lane % 4) + e;
            const float top = __shfl_sync(~0u, four < 4 ? tops[0] : tops[1], row % 32), rest = rest_of_row(first_row + row);
            unroll<2>([&](int key) {
                float& score = each[e + 2 * key];
                score = sum_of(score, rest);
                if (is_far_row(top)) score = sm90::subtract_far(score, top, scale, inverse);
            });
        });
        ptx::store_shared_v4(scores, __float_as_uint(each[0]), __float_as_uint(each[1]), __float_as_uint(each[2]), __float_as_uint(each[3]));
    }
}

// What dropout keeps of a thread's elements, a bit each, as sm90/bwd_draws.cuh lays them out.
struct Draws {
    u32 kept[cfg::block_m / 64];

    // p of element i, negative if it is dropped.
    __device__ __forceinline__ float mark(int i, float p) const {
        return ptx::negate_unless(p, kept[i / 32] & (1u << (i / 8 % 4 * 8 + i % 2 * 4 + i / 2 % 4)));
    }
};

// Elements 2 i and 2 i + 1 as a packed pair; a negative P is one that dropout dropped.
__device__ __forceinline__ u32 round_weights(float low, float high) {
    return cfg::dropout ? pack<true>(low, high) : pack(low, high);
}

// P (dP - D); of a dropped element, whose dP is 0, - P D.
__device__ __forceinline__ float gradient(float p, float dp, float d) {
    return cfg::dropout ? fmaf(fmaxf(p, 0.0f), dp, -fabsf(p) * d) : p * (dp - d);
}

// Numbers of a tile's queries, for a thread those of 2 neighbours of every 8: the first `held` pairs ahead of their use in registers, since
// beside products that fill shared memory's time a load waits for hundreds of clocks; the others where they lie.
template <int held>
struct Numbers {
    const float2* first;
    float2 ahead[held ? held : 1];
    __device__ __forceinline__ explicit Numbers(const float2* first) : Numbers(first, [&](int i) { return first[4 * i]; }) {}
    // Of which some are in registers.
    template <int before>
    __device__ __forceinline__ explicit Numbers(const Numbers<before>& some) : Numbers(some.first, [&](int i) { return some[i]; }) {}
    template <class Pair>
    __device__ __forceinline__ Numbers(const float2* first, const Pair& pair) : first(first) {
        unroll<held>([&](int i) { ahead[i] = pair(i); });
    }
    __device__ __forceinline__ float2 operator[](int i) const { return i < held ? ahead[i] : first[4 * i]; }
};

// What the tensor cores have seen to.
struct NoNumbers {
    __device__ __forceinline__ explicit NoNumbers(const float2*) {}
    __device__ __forceinline__ float2 operator[](int) const { return {0.0f, 0.0f}; }
};

// Algorithm 4, lines 13 to 15: P in place of the scores, p = 2^(s log2 e + stat); what dropout drops is marked by its sign.  With
// round_now P is also rounded, and then, with a softcap, multiplied by the slope that dS needs.
template <bool round_now, class Numbers>
__device__ __forceinline__ void weigh(Scores& s, Fragments& weights, const Params& p, const Numbers& stat, const Draws& draws) {
    static_assert(round_now || !cfg::sloped);
    const float scale = score_scale(p);
#pragma unroll
    for (int i = 0; i < cfg::block_m / 2; i += 2) {
        const float2 shift = stat[i / 4];
        const float score[2] = {s[i], s[i + 1]};
        s[i] = ptx::ex2(fmaf(score[0], scale, shift.x));
        s[i + 1] = ptx::ex2(fmaf(score[1], scale, shift.y));
        if constexpr (cfg::dropout) s[i] = draws.mark(i, s[i]), s[i + 1] = draws.mark(i + 1, s[i + 1]);
        if constexpr (round_now) weights[i / 8][i / 2 % 4] = round_weights(s[i], s[i + 1]);
        if constexpr (cfg::softcap) s[i] *= cap_slope(p, score[0]), s[i + 1] *= cap_slope(p, score[1]);
    }
}

// Lines 18 and 20: dS = P (dP - D), rounded; all divided by the scale of dropout, where a dropped element's dP is 0.
// dbias takes dS before it is rounded.
template <bool round_weights_now, class Numbers, class BiasGradient>
__device__ __forceinline__ void differentiate(Fragments& ds, Fragments& weights, const Scores& s, const Scores& dp, const Numbers& delta,
                                              BiasGradient& dbias) {
#pragma unroll
    for (int i = 0; i < cfg::block_m / 2; i += 2) {
        const float2 d = delta[i / 4];
        const float low = gradient(s[i], dp[i], d.x), high = gradient(s[i + 1], dp[i + 1], d.y);
        dbias.take(i, low, high);
        ds[i / 8][i / 2 % 4] = pack(low, high);
        if constexpr (round_weights_now) weights[i / 8][i / 2 % 4] = round_weights(s[i], s[i + 1]);
    }
}

// Where a lane's part of a slab [queries][keys] begins, whose 64 keys are the warpgroup's, as matrices are stored and loaded transposed.
__device__ __forceinline__ u32 gradients_at(u32 slab) {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const u32 query = lane % 8 + 8 * (lane / 16), chunk = (2 * warp + lane / 8 % 2) ^ (query % 8);
    return slab + query * row_bytes + 16 * chunk;
}

// dS as [queries][keys]: this warpgroup's 64 keys are the slab at `ds`.
__device__ __forceinline__ void store_gradients(const Fragments& fragments, u32 ds) {
    const u32 at = gradients_at(ds);
    unroll<cfg::block_m / 16>([&](int j) {
        ptx::stmatrix_x4_trans(at + j * 2 * eight_rows, fragments[j][0], fragments[j][1], fragments[j][2], fragments[j][3]);
    });
}

}  // namespace sm90::bwd
