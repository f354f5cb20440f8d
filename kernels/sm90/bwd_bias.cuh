// A bias in the backward: how it joins the scores of a warpgroup's part of a tile, and how its gradient, dS, is made of them.
//
// It is two numbers of a thread, for its keys (cfg::bias_keys); or it arrives by the copy engine in the buffer that dS will take, each
// warp reading what it later overwrites (cfg::bias_tiles); or it is loaded, element by element.
#pragma once
#include "ptx/global.cuh"
#include "sm90/bwd_scores.cuh"

namespace sm90::bwd {

// The bias of a thread's elements, asked for in ascending order.
struct Bias {
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
template <class Numbers>
__device__ __forceinline__ void weigh_apart(Scores& s, Fragments& weights, const Params& p, const TilePlace& at, Bias& bias, const Numbers& stat,
                                            const Draws& draws, bool far) {
    const float* maxima = static_cast<const float*>(p.m.data) + slice_of(p.m, at.batch, at.head);
    const Traced traced(p, at);
    TracedRow rows[2];
    float tops[2] = {}, slopes[2];
    unroll<cfg::block_m / 2>([&](int i) {
        const float2 shifts = stat[i / 4];
        const float shift = i % 2 ? shifts.y : shifts.x;
        if (i % 4 < 2) {
            rows[i % 2] = traced.row(p, at, i);
            if (far) {
                const float top = maxima[min(at.first_row + query_of(i) + 2 * static_cast<i32>(threadIdx.x % 4), p.n_queries - 1) * p.m.row];
                tops[i % 2] = is_far_row(top) ? top : 0.0f;
            }
        }
        Capped x = score_with_bias(p, s[i], bias.of(p, i), traced.head, rows[i % 2], traced.keys[key_of(i)]);
        // Of a row that sees nothing a function may make anything.
        if (s[i] == minus_infinity() || (!cfg::additive && shift == minus_infinity())) x.score = minus_infinity();
        const float weight = ptx::ex2(fmaf(rounded_difference(x.score, tops[i % 2]), static_cast<float>(kLog2e), shift));
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

// What becomes of dS on its way to bfloat16, two neighbouring queries of a key at a time: nothing,
struct NoSums {
    __device__ __forceinline__ void take(int, float, float) {}
};

// a sum over queries for each of the thread's two keys,
struct KeySums {
    float sums[2];

    __device__ __forceinline__ void take(int i, float low, float high) { sums[key_of(i)] += low + high; }

    // Of all of the warpgroup's keys, from the thread's first on.
    __device__ __forceinline__ void store(const Params& p, const Work& work, i32 key) {
        unroll<2>([&](int r) {
            float& sum = sums[r];
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            sum *= static_cast<float>(p.dropout_scale);
            float* to = static_cast<float*>(p.dbias_acc) + static_cast<i64>(work.batch * p.kv_heads + work.head) * p.n_keys;
            if (threadIdx.x % 4 == r && key + 8 * r < p.n_keys) to[key + 8 * r] = sum;
        });
    }
};

// or an addition in memory: [bias][row tile][key tile][warpgroup][part][thread][4], a part in the order of the registers.
struct AddedTile {
    float* to;
    float low, high;

    __device__ __forceinline__ void take(int i, float a, float b) {
        if (i % 4 == 0) low = a, high = b;
        else ptx::red_add_x4(to + i / 4 * 512, low, high, a, b);
    }
};


}  // namespace sm90::bwd

#ifdef WEIGHTED_SUMS
#include "attn/score_sums.cuh"

namespace sm90::bwd {

// or sums of dS times the weights of a function's arrays, by key; heads' come from them.
struct WeightedSums {
    static constexpr int weights = cfg::weights;
    float sums[weights][2];

    __device__ __forceinline__ static constexpr int shared_by(int k) { return cfg::shared >> (3 * k) & 7; }
    __device__ __forceinline__ static constexpr int count_before(int end, int shared) {
        int count = 0;
        for (int k = 0; k < end; ++k) count += shared_by(k) == shared;
        return count;
    }

    __device__ __forceinline__ void clear() { unroll<weights, 2>([&](int k, int r) { sums[k][r] = 0.0f; }); }

    // Takes those of one row tile.
    struct Step {
        WeightedSums& to;
        const Params& p;
        const TilePlace at;
        const Traced traced;
        TracedRow rows[2];

        __device__ __forceinline__ Step(WeightedSums& to, const Params& p, const TilePlace& at) : to(to), p(p), at(at), traced(p, at) {}

        __device__ __forceinline__ void take(int i, float low, float high) {
            unroll<2>([&](int e) {
                if (i % 4 == 0) rows[e] = traced.row(p, at, i + e);
                const float ds = e ? high : low;
                float weight[weights];
                ScorePlace{p, traced.head, rows[e], traced.keys[key_of(i)]}.weights(weight, typename ::CountTo<WeightedSums::weights>::type(), 0.0f);
                unroll<weights>([&](int k) {  // of a hidden score a weight may be anything
                    to.sums[k][key_of(i)] += ds == 0.0f ? 0.0f : ds * weight[k];
                });
            });
        }
    };

    // Of all of the warpgroup's keys, from the thread's first on; of heads a sum for each of the block's warps.
    __device__ __forceinline__ void store(const Params& p, const Work& work, i32 key, u32 warpgroup) {
        const i64 heads = static_cast<i64>(p.batch) * p.heads, flat = work.batch * p.heads + work.head;
        float* const of_keys = static_cast<float*>(p.dbias_acc);
        float* const of_heads = of_keys + count_before(weights, kShareLine) * heads * p.n_keys;
        unroll<weights>([&](int k) {
            float (&sum)[2] = sums[k];
            unroll<2>([&](int r) { sum[r] += __shfl_xor_sync(~0u, sum[r], 1), sum[r] += __shfl_xor_sync(~0u, sum[r], 2); });
            const i64 number = count_before(k, shared_by(k)) * heads + flat;
            if (shared_by(k) == kShareLine) {
                unroll<2>([&](int r) {
                    if (threadIdx.x % 4 == r && key + 8 * r < p.n_keys) of_keys[number * p.n_keys + key + 8 * r] = sum[r];
                });
            } else {
                float all = sum[0] + sum[1];
                unroll<3>([&](int step) { all += __shfl_xor_sync(~0u, all, 4 << step); });
                const u32 warp = 4 * warpgroup + threadIdx.x % 128 / 32;
                if (threadIdx.x % 32 == 0) of_heads[(number * p.key_tiles + work.tile) * (4 * warpgroups) + warp] = all;
            }
        });
    }
};

}  // namespace sm90::bwd
#endif
