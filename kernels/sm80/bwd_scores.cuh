// What happens to a tile of scores between the products: mask, softmax from the stored statistics, dropout, dS.
//
// Results of one warp, rows row0 + 16 m + g (+ 8), keys key0 + 8 n + 2q (+ 1): the layout of every accumulator.
#pragma once
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_product.cuh"

constexpr int score_tiles_m = scores_rows / 16, score_tiles_n = scores_keys / 8;
using Scores = Acc[score_tiles_m][score_tiles_n][4];
using RowValues = Acc[score_tiles_m][2];

// Calls work(m, n, i) for a lane's scores.
template <class Work>
__device__ __forceinline__ void for_scores(const Work& work) { unroll<score_tiles_m, score_tiles_n, 4>(work); }

__device__ __forceinline__ void load_row_values(RowValues& values, u32 vector) {
    const u32 g = threadIdx.x % 32 / 4;
    unroll<score_tiles_m, 2>([&](int m, int half) { ptx::load_shared(values[m][half], vector + (16 * m + 8 * half + g) * int(sizeof(Acc))); });
}

// One bit per element of this lane.
constexpr int score_elements = score_tiles_m * score_tiles_n * 4;
using ElementBits = u32[(score_elements + 31) / 32];

// Elements that are not to be seen; found before the product, when registers are free and the looking up of masks can overlap with it.
__device__ __forceinline__ void find_hidden(ElementBits& hidden, const Params& p, const Head& head, i32 row0, i32 key0) {
    const i32 lane = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32;  // the keys' masks are not kept in registers
    unroll<(score_elements + 31) / 32>([&](int word) { hidden[word] = 0; });
    unroll<score_tiles_n, 2>([&](int n, int odd) {
        const i32 key = key0 + 8 * n + lane % 4 * 2 + odd;
        const KeyMask mask(p, head.mask, key);
        unroll<score_tiles_m, 2>([&](int m, int half) {
            const i32 row = min(row0 + 16 * m + 8 * half + lane / 4, p.n_queries - 1);
            const int element = (m * score_tiles_n + n) * 4 + 2 * half + odd;
            if (!mask.visible(p, row, key)) hidden[element / 32] |= 1u << element % 32;
        });
    });
}

// Calls work(m, n, i, head, row, key) for a lane's scores and what functions know of their places.
template <class Work>
__device__ __forceinline__ void for_places(const Params& p, const TracedHead& head, i32 row0, i32 key0, const Work& work) {
    const i32 lane = threadIdx.x % 32;
    TracedRow rows[score_tiles_m][2];
    unroll<score_tiles_m, 2>([&](int m, int half) { rows[m][half] = TracedRow::of(p, head, row0 + 16 * m + lane / 4 + 8 * half); });
    unroll<score_tiles_n, 2>([&](int n, int odd) {
        const TracedKey key = TracedKey::of(p, head, key0 + 8 * n + lane % 4 * 2 + odd);
        unroll<score_tiles_m, 2>([&](int m, int half) { work(m, n, 2 * half + odd, head, rows[m][half], key); });
    });
}

// Raw products to scores in natural units: scale, softcap, function, bias.  What goes to `slope` is, on demand (`keep_input`), what the function
// was given.
template <bool keep_input>
__device__ __forceinline__ void finish_scores(Scores& s, Scores& slope, const Params& p, const Head& head, i32 row0, i32 key0) {
    const i32 lane = threadIdx.x % 32;
    if constexpr ((cfg::bias || cfg::score) && is_split) __syncwarp();  // loads are not moved ahead of this
    const auto finish = [&](int m, int n, int i, const auto&... place) {
        const Capped x = finish_score(p, s[m][n][i], head.bias, row0 + 16 * m + lane / 4 + i / 2 * 8, key0 + 8 * n + lane % 4 * 2 + i % 2, place...);
        slope[m][n][i] = keep_input ? cap_score(p, s[m][n][i]) : x.slope;
        s[m][n][i] = x.score;
    };
    if constexpr (cfg::score) for_places(p, head, row0, key0, finish);
    else for_scores(finish);
}

// Takes m from the scores of far rows (attn/bwd_workspace.cuh).
__device__ __forceinline__ void subtract_far(Scores& s, const Params& p, const Head& head, i32 row0) {
    const Acc scale = cfg::prescaled ? Acc(1) : Acc(p.scale), unit = cfg::prescaled ? Acc(1) : ptx::rcp(scale);
    unroll<score_tiles_m, 2>([&](int m, int half) {
        const i64 row = row0 + 16 * m + ptx::opaque(static_cast<i32>(threadIdx.x)) % 32 / 4 + 8 * half;
        const Acc top = row < p.n_queries ? head.m[row * p.m.row] : Acc(0);
        if (!is_far_row(top)) return;
        unroll<score_tiles_n, 2>([&](int n, int odd) {
            Acc& x = s[m][n][2 * half + odd];
            x = rounded_difference(product_of(x, scale), top) * unit;
        });
    });
}

// Algorithm 4 lines 14 and 15: the sign bit marks what the forward dropped.
__device__ __forceinline__ void mark_dropped(Scores& s, const Params& p, const Head& head, i32 row0, i32 key0) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const i32 lane = threadIdx.x % 32;
    unroll<score_tiles_m, score_tiles_n / 2>([&](int m, int pair) {
        u32 words[4];
        random_words(words, p, head.random, row0 + 16 * m + lane / 4, key0 + 16 * pair + lane % 4 * 2);
        unroll<4>([&](int w) {
            Acc(&tile)[4] = s[m][2 * pair + w / 2];
            if (!kept_low<threshold>(words[w])) tile[w % 2 * 2] = -tile[w % 2 * 2];
            if (!kept_high<threshold>(words[w])) tile[w % 2 * 2 + 1] = -tile[w % 2 * 2 + 1];
        });
    });
}

// Where this warp's part of a tile starts.
__device__ __forceinline__ i32 warp_score_row() { return threadIdx.x / 32 % scores_m * scores_rows; }
__device__ __forceinline__ i32 warp_score_key() { return threadIdx.x / 32 % scores_warps / scores_m * scores_keys; }

// A pair of tiles and its place among rows and keys; numbers: shared address of stat, delta and 1 / l of the rows.
struct TilePlace {
    u32 numbers;
    i32 first_row, first_key;
    bool partial;  // must elements be tested?

    __device__ __forceinline__ i32 row() const { return first_row + warp_score_row(); }
    __device__ __forceinline__ i32 key() const { return first_key + warp_score_key(); }
    __device__ __forceinline__ u32 warp_numbers() const { return numbers + warp_score_row() * int(sizeof(Acc)); }
};

// How a tile of dP changes hands where warps are paired: the block meets when it is complete, and again when it has been read, so that all
// warps pass the same barriers (racecheck counts them).  Who has computed dP has nothing to do before the block's next barrier.
struct BlockHandover {
    __device__ __forceinline__ void meet() const { ptx::barrier_sync(15, threads); }
    __device__ __forceinline__ void before() const {}
    __device__ __forceinline__ void done() const { meet(), meet(); }
    __device__ __forceinline__ void wait() const { meet(); }
    __device__ __forceinline__ void read() const { meet(); }
};

// The products behind a tile of S and dP: `scores` adds q k^T, `gradients` adds do v^T, for this warp's part.
// This one has all columns of the four tiles in shared memory.
template <class Handover>
struct TilesInShared {
    TileAt q, k, dout, v;
    u32 exchange;  // for dP, if warps are paired
    Handover handover;

    __device__ __forceinline__ void scores(Scores& s) const {
        product<cfg::head_dim, Along::columns, qk_stride, Along::columns, qk_stride>(s, part_of_rows<qk_stride>(q, warp_score_row(), 0),
                                                                                     part_of_rows<qk_stride>(k, warp_score_key(), 0));
    }
    __device__ __forceinline__ void gradients(Scores& dp) const {
        if constexpr (paired) {
            handover.wait();  // the other warps' dP is complete
            move_scores([&](int i, Acc& x) { ptx::load_shared(x, exchange_place(i)); }, dp);
            handover.read();  // by all: P may take the place of dP
        } else {
            multiply_gradients(dp);
        }
    }
    // What warps without scores do.
    __device__ __forceinline__ void help() const {
        if constexpr (paired) {
            Scores dp = {};
            multiply_gradients(dp);
            handover.before();
            move_scores([&](int i, Acc& x) { ptx::store_shared(exchange_place(i), x); }, dp);
            handover.done();
        }
    }

private:
    __device__ __forceinline__ void multiply_gradients(Scores& dp) const {
        product<cfg::head_dim_v, Along::columns, v_stride, Along::columns, v_stride>(dp, part_of_rows<v_stride>(dout, warp_score_row(), 0),
                                                                                     part_of_rows<v_stride>(v, warp_score_key(), 0));
    }
    // Of this lane's i-th number; the same for both warps of a pair.
    __device__ __forceinline__ u32 exchange_place(int i) const { return exchange + (i * scores_warps * 32 + threadIdx.x % (scores_warps * 32)) * int(sizeof(Acc)); }
    template <class Move>
    static __device__ __forceinline__ void move_scores(const Move& move, Scores& x) {
        for_scores([&](int m, int n, int i) { move((m * score_tiles_n + n) * 4 + i, x[m][n][i]); });
    }
};
using WholeTiles = TilesInShared<BlockHandover>;

// Algorithm 4 lines 11-15 for this warp's part of a tile.
template <bool keep_input = false, class Products>
__device__ __forceinline__ void find_p(Scores& s, Scores& slope, Products& products, const TilePlace& at, const Params& p, const Head& head) {
    RowValues stat, inverse;
    load_row_values(stat, at.warp_numbers());
    if constexpr (split_stat) load_row_values(inverse, at.warp_numbers() + 2 * stat_bytes);
    ElementBits hidden;
    if (at.partial) find_hidden(hidden, p, head, at.row(), at.key());
    for_scores([&](int m, int n, int i) { s[m][n][i] = 0; });
    products.scores(s);  // line 11
    if constexpr (cfg::prescaled) finish_scores<keep_input>(s, slope, p, head, at.row(), at.key());
    if (at.partial) {  // line 12, FlashMask's algorithm 2 lines 22-27: scores that may not be seen become -inf
        for_scores([&](int m, int n, int i) {
            const int element = (m * score_tiles_n + n) * 4 + i;
            if (hidden[element / 32] >> element % 32 & 1) s[m][n][i] = -infinity<Acc>();
        });
    }
    if constexpr (!split_stat) {
        if (head.has_far_rows) subtract_far(s, p, head, at.row());
    }
    const float to_log2 = static_cast<float>(cfg::prescaled ? kLog2e : p.scale * kLog2e);
    for_scores([&](int m, int n, int i) {  // line 13
        Acc& x = s[m][n][i];
        if constexpr (cfg::score && !cfg::additive) {  // of a row without keys, whose q is loaded as zeros, a function may make anything
            if (is_empty_row(stat[m][i / 2])) x = -infinity<Acc>();
        }
        if constexpr (split_stat) x = exp_times(rounded_difference(cfg::prescaled ? x : x * Acc(p.scale), stat[m][i / 2]), inverse[m][i / 2]);
        else x = ptx::ex2(fmaf(x, to_log2, stat[m][i / 2]));
    });
    if constexpr (cfg::dropout) mark_dropped(s, p, head, at.row(), at.key());
}

// This warp's part of P or dS to its tile; with `relu`, negative values become 0.
template <bool relu>
__device__ __forceinline__ void store_weights(TileAt tile, const Scores& x) {
    const TileAt part = part_of_weights(tile, warp_score_row(), warp_score_key());
    if constexpr (is_split) store_split<p_stride, relu>(part, x);
    else store_rounded<p_stride, relu>(part.tile, x);
}
__device__ __forceinline__ void store_p(TileAt tile, const Scores& s) { store_weights<cfg::dropout != 0>(tile, s); }
__device__ __forceinline__ void store_ds(TileAt tile, const Scores& ds) { store_weights<false>(tile, ds); }

// Algorithm 4 lines 17-20 from what find_p has left.  P goes to shared memory, at `p_tile`, if asked for.  ds: the gradient by what enters
// the softcap, or (behind_cap) by what leaves it, which is the gradient by the bias.
template <bool keep_p, bool behind_cap, class Products>
__device__ __forceinline__ void find_ds(Scores& ds, Scores& s, const Scores& slope, Products& products, const TilePlace& at, TileAt p_tile) {
    constexpr bool any_sign = cfg::dropout != 0 && cfg::score && cfg::sloped && !behind_cap;  // slopes may be negative, a sign is a mark no more
    ElementBits dropped = {};
    if constexpr (cfg::sloped && !behind_cap) {  // P makes room for P times the slope of softcap and function
        if constexpr (keep_p) store_p(p_tile, s);
        for_scores([&](int m, int n, int i) {  // where P is 0, a function's slope may be anything
            Acc& x = s[m][n][i];
            const int element = (m * score_tiles_n + n) * 4 + i;
            if constexpr (any_sign) {
                if (x < 0) dropped[element / 32] |= 1u << element % 32;
                x = size_of(x);
            }
            x = cfg::score && x == 0 ? Acc(0) : x * slope[m][n][i];
        });
    }
    RowValues delta;
    for_scores([&](int m, int n, int i) { ds[m][n][i] = 0; });
    products.gradients(ds);  // line 17
    // Only after the product: its loads would have to wait for the stores.
    if constexpr (keep_p && !cfg::sloped) store_p(p_tile, s);
    load_row_values(delta, at.warp_numbers() + stat_bytes);
    // Where p is 0, dP may be anything (a hidden key's v); it must not turn 0 * dP into NaN.
    if (at.partial) for_scores([&](int m, int n, int i) { ds[m][n][i] = s[m][n][i] == 0 ? Acc(0) : ds[m][n][i]; });
    for_scores([&](int m, int n, int i) {  // line 20, all divided by the scale of dropout; a dropped element's dP is 0
        const Acc x = s[m][n][i], d = delta[m][i / 2];
        Acc& dp = ds[m][n][i];
        const int element = (m * score_tiles_n + n) * 4 + i;
        if constexpr (any_sign) dp = fma_of(dropped[element / 32] >> element % 32 & 1 ? Acc(0) : x, dp, -(x * d));
        else dp = cfg::dropout != 0 ? fma_of(max_of(x, Acc(0)), dp, -(size_of(x) * d)) : x * (dp - d);
    });
}

// Algorithm 4 lines 11-15, 17-20 by the warps with scores: P (if asked for) and dS to shared memory.
template <bool keep_p, class Products>
__device__ __forceinline__ void score(Products& products, const TilePlace& at, const Params& p, const Head& head, TileAt p_tile, TileAt ds_tile) {
    Scores s, slope, ds;
    find_p(s, slope, products, at, p, head);
    find_ds<keep_p, false>(ds, s, slope, products, at, p_tile);
    store_ds(ds_tile, ds);
}

// The same by all warps of the block.
template <bool keep_p, class Products>
__device__ __forceinline__ void scores_to_shared(Products& products, const TilePlace& at, const Params& p, const Head& head, TileAt p_tile,
                                                  TileAt ds_tile) {
    if (threadIdx.x / 32 < scores_warps) score<keep_p>(products, at, p, head, p_tile, ds_tile);
    else products.help();
}
