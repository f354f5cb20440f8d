// How a bias and a score function join the scores of a warpgroup's part of a tile.
//
// A bias is two numbers of a thread, for its keys (cfg::bias_keys), or what tensor cores add (sm90/split_bias.cuh), as of a function; or it arrives by the copy engine in the buffer that dS will take, each
// warp reading what it later overwrites (cfg::bias_tiles); or it is loaded, element by element.
#pragma once
#include "sm90/bwd_scores.cuh"

namespace sm90::bwd {

// The head that a function was last asked about whose part tensor cores add.
struct NoHead {
    __device__ __forceinline__ void set_head(const TracedHead&) {}
    __device__ __forceinline__ TracedHead head() const { return {}; }
};
struct SplitHead {
    TracedHead last;
    __device__ __forceinline__ void set_head(const TracedHead& of) { last = of; }
    __device__ __forceinline__ const TracedHead& head() const { return last; }
};

// The bias of a thread's elements, asked for in ascending order.
struct Bias : Either<cfg::split_score, SplitHead, NoHead>::type {
    float keys[2];
    const cfg::bias_elem* first;  // of the thread's first query and key 0
    i64 columns[2];
    i32 rows;  // from the thread's first query to the last one
    u32 tile, pairs[4];

    // Of a thread's two keys, the same for all rows of a head.
    __device__ __forceinline__ void load_keys(const Params& p, const TilePlace& at) {
        const i64 offset = slice_of(p.bias, at.batch, at.head);
        unroll<2>([&](int r) { keys[r] = bias_at(p, offset, 0, at.key + 8 * r); });
    }

    // What tensor cores add for the thread's two keys, as a fragment, whose two halves are the same, or in the warpgroup's rows.
    __device__ __forceinline__ void split_keys(const TilePlace& at, u32 rows, const float (&x)[2]) {
        const u32 place = threadIdx.x % 4;
        unroll<2>([&](int r) {
            const BiasParts parts(x[r]);
            if constexpr (parts_held) pairs[r] = pairs[r + 2] = place == 0 ? parts.pair : place == 1 ? parts.third : 0;
            else if (place == 0) ptx::store_shared_v4(rows + part_bytes * (fragment_row() + 8 * r), parts.pair, parts.third, 0, 0);
        });
    }

    // The same in lower halves, and in upper ones what is added from row to row, whose numbers in the tile are three bfloat16 apart by 8.
    __device__ __forceinline__ void split_keys_and_rows(const float (&x)[2], float step) {
        const u32 place = threadIdx.x % 4;
        const float rest = rest_of(step), last = rest_of(rest), ahead = fmaf(8.0f, rest - last, 16.0f * last);
        unroll<2>([&](int r) { pairs[r] = part_of_place(x[r] - ahead, place) >> 16 | part_of_place(step, place); });
    }

    // Adds them to products that are being issued, and to all the same offset.
    __device__ __forceinline__ void add_parts(Scores& s, u32 counting, float offset) const {
        const u32 all = part_of_place(offset, threadIdx.x % 4) >> 16, a[4] = {pairs[0], pairs[1], all, all};
        ptx::wgmma_fence();  // of the fragment, made while the others are under way
        ptx::Product<cfg::block_m>::rs<true, 1, 1>(s, a, ptx::wgmma_descriptor_of_units(counting, 0, 32), 1);
    }
    __device__ __forceinline__ void add_parts(Scores& s, u32 halves, u32 rows) const {
        if constexpr (parts_held) ptx::Product<cfg::block_m>::rs<true, 1, 0>(s, pairs, halves_descriptor(halves), 1);
        else ptx::Product<cfg::block_m>::ss<true, 1, 0>(s, parts_descriptor(rows), halves_descriptor(halves), 1);
    }

    // The bias of the thread's two keys in units of raw products.
    __device__ __forceinline__ static void find_bias(float (&x)[2], const Params& p, const TilePlace& at) {
        const i64 offset = slice_of(p.bias, at.batch, at.head);
        unroll<2>([&](int r) { x[r] = bias_of_product(p, bias_at(p, offset, 0, at.key + 8 * r)); });
    }

    // slab: where store_gradients will put dS.
    __device__ __forceinline__ void begin(const Params& p, const TilePlace& at, u32 slab) {
        if constexpr (cfg::bias_keys) return;
        if constexpr (cfg::bias_tiles) {
            tile = gradients_at(slab);
        } else if constexpr (cfg::bias) {
            const i32 row = at.first_row + 2 * (threadIdx.x % 4);
            first = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, at.batch, at.head) + row * p.bias.row;
            rows = p.n_queries - 1 - row;
            unroll<2>([&](int r) { columns[r] = min(at.key + 8 * r, p.n_keys - 1) * p.bias.col; });
        }
    }

    __device__ __forceinline__ float of(const Params& p, int i) {
        if constexpr (cfg::bias_keys) return keys[key_of(i)];
        if constexpr (cfg::bias_tiles) {
            if (i % 8 == 0) ptx::ldmatrix_x4_trans(pairs, tile + i / 4 * eight_rows);
            const float2 pair = unpack<cfg::bias_elem>(pairs[i / 2 % 4]);
            return i % 2 ? pair.y : pair.x;
        }
        return cfg::bias ? to_acc(first[min(query_of(i), rows) * p.bias.row + columns[key_of(i)]]) : 0.0f;
    }
};

// What is added to the exponents of a thread's queries, with what an affine function leaves to rows that are not consecutive; pairs of neighbours, as
// Numbers.
template <class Stat>
struct OffsetStat {
    const Stat& stat;
    const SplitScore& score;
    i32 first_row;  // of the thread's queries
    float scale;    // 0 where scores are whole

    __device__ __forceinline__ float2 operator[](int i) const {
        const float2 x = stat[i];
        return {fmaf(score.of_row(first_row + 8 * i), scale, x.x), fmaf(score.of_row(first_row + 8 * i + 1), scale, x.y)};
    }
};

// What functions are asked about: the head of a row tile and the thread's two keys.
struct Traced {
    TracedHead head;
    TracedKey keys[2];

    __device__ __forceinline__ Traced(const Params& p, const TilePlace& at)
        : head(TracedHead::of(p, at.batch, at.head)), keys{TracedKey::of(p, head, at.key), TracedKey::of(p, head, at.key + 8)} {}
    __device__ __forceinline__ TracedRow row(const Params& p, const TilePlace& at, int i) const {
        return TracedRow::of(p, head, at.first_row + query_of(i) + 2 * (threadIdx.x % 4));
    }
};

// Raw products to scores, whose slopes are 1.
__device__ __forceinline__ void finish_scores(Scores& s, const Params& p, const TilePlace& at, Bias& bias) {
    const Traced traced(p, at);
    TracedRow rows[2];
    unroll<cfg::block_m / 2>([&](int i) {
        if (i % 4 < 2) rows[i % 2] = traced.row(p, at, i);
        s[i] = score_with_bias(p, s[i], bias.of(p, i), traced.head, rows[i % 2], traced.keys[key_of(i)]).score;
    });
}

// weigh where slopes come with the scores: P is rounded, and then multiplied by its slope.  Hidden products are -inf.
// far: rows may be far ones, whose maxima are loaded.
template <bool far, class Numbers>
__device__ __forceinline__ void weigh_apart(Scores& s, Fragments& weights, const Params& p, const TilePlace& at, Bias& bias, const Numbers& stat,
                                            const Draws& draws) {
    const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, at.batch, at.head);
    const Traced traced(p, at);
    TracedRow rows[2];
    float tops[2] = {}, slopes[2];
    unroll<cfg::block_m / 2>([&](int i) {
        const float2 shifts = stat[i / 4];
        const float shift = i % 2 ? shifts.y : shifts.x;
        if (i % 4 < 2) {
            rows[i % 2] = traced.row(p, at, i);
            if constexpr (far) {
                const float top = maxima[min(at.first_row + query_of(i) + 2 * static_cast<i32>(threadIdx.x % 4), p.n_queries - 1) * p.m.row];
                tops[i % 2] = is_far_row(top) ? top : 0.0f;
            }
        }
        Capped x = score_with_bias(p, s[i], bias.of(p, i), traced.head, rows[i % 2], traced.keys[key_of(i)]);
        // Of a row that sees nothing a function may make anything.
        if (s[i] == minus_infinity() || (!cfg::additive && shift == minus_infinity())) x.score = minus_infinity();
        const float weight = ptx::ex2(fmaf(far ? rounded_difference(x.score, tops[i % 2]) : x.score, static_cast<float>(kLog2e), shift));
        s[i] = cfg::dropout ? draws.mark(i, weight) : weight;
        slopes[i % 2] = x.slope;
        if (i % 2 == 0) return;
        weights[i / 8][i / 2 % 4] = round_weights(s[i - 1], s[i]);
        unroll<2>([&](int e) {  // where P is 0 a function's slope may be anything
            float& one = s[i - 1 + e];
            one = cfg::score && one == 0.0f ? 0.0f : one * slopes[e];
        });
    });
}

}  // namespace sm90::bwd
