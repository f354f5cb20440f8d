// What becomes of dS beside dQ and dK, on its way to 16 bits: gradients of a bias, and of the arrays that a score function reads.
#pragma once
#include "ptx/global.cuh"
#include "sm90/bwd_bias.cuh"

namespace sm90::bwd {

// Two neighbouring queries of a key at a time: nothing,
struct NoSums {
    __device__ __forceinline__ void take(int, float, float) {}
};

// or a sum over queries for each of the thread's two keys.
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


}  // namespace sm90::bwd

#ifdef WEIGHTED_SUMS
#include "attn/score_sums.cuh"

namespace sm90::bwd {

// or sums of dS times the weights of a function's arrays, by key, for one head after another; heads' come from them.
//
// Where a weight grows by the same step from row to row (cfg::climbs), sums of dS and of dS times the row's number in its tile tell all: sum dS weight
// = weight(first row) sum dS + step sum dS number.  So do those of dS alone where the step is 0 (else in cfg::rests); others are cfg::apart.
struct WeightedSums {
    static constexpr int weights = cfg::weights;
    using Count = typename ::CountTo<weights>::type;
    const Params& p;
    float sums[weights][2];
    i32 head;  // whose sums they are

    __device__ __forceinline__ static constexpr int shared_by(int k) { return cfg::shared >> (3 * k) & 7; }
    __device__ __forceinline__ static constexpr int count_before(int end, int shared) {
        int count = 0;
        for (int k = 0; k < end; ++k) count += shared_by(k) == shared;
        return count;
    }
    // Is weight k among those of a constant?
    __device__ __forceinline__ static constexpr bool among(int those, int k) { return those >> k & 1; }

    __device__ __forceinline__ void clear() { unroll<weights, 2>([&](int k, int r) { sums[k][r] = 0.0f; }); }

    __device__ __forceinline__ void begin(const Work& work) {
        clear();
        head = work.head * p.group;
    }

    // Takes those of one row tile.
    struct Step {
        WeightedSums& to;
        const TilePlace at;
        const Traced traced;
        TracedRow rows[2];
        float total[2] = {}, moment[2] = {};  // of dS, and of dS times the number of a row

        __device__ __forceinline__ Step(WeightedSums& to, const TilePlace& at) : to(to), at(at), traced(to.p, at) {}

        __device__ __forceinline__ ScorePlace place(const TracedRow& row, int key) const { return {to.p, traced.head, row, traced.keys[key]}; }

        __device__ __forceinline__ void take(int i, float low, float high) {
            const int key = key_of(i);
            if constexpr (cfg::rests != 0) total[key] += low + high;
            if constexpr (cfg::climbs != 0) {
                moment[key] = fmaf(low, static_cast<float>(query_of(i)), moment[key]);
                moment[key] = fmaf(high, static_cast<float>(query_of(i + 1)), moment[key]);
            }
            if constexpr (cfg::apart == 0) return;
            unroll<2>([&](int e) {
                if (i % 4 == 0) rows[e] = traced.row(to.p, at, i + e);
                const float ds = e ? high : low;
                float weight[weights];
                place(rows[e], key).weights(weight, Count(), 0.0f);
                unroll<weights>([&](int k) {  // of a hidden score a weight may be anything
                    if (among(cfg::apart, k)) to.sums[k][key] += ds == 0.0f ? 0.0f : ds * weight[k];
                });
            });
        }

        __device__ __forceinline__ void finish() {
            if constexpr (cfg::rests == 0) return;
            const TracedRow first = traced.row(to.p, at, 0);
            unroll<2>([&](int key) {
                float weight[weights], step[weights];
                place(first, key).weights(weight, Count(), 0.0f);
                place(first, key).steps(step, Count());
                unroll<weights>([&](int k) {
                    if (among(cfg::rests, k)) to.sums[k][key] += total[key] == 0.0f ? 0.0f : total[key] * weight[k];
                    if (among(cfg::climbs, k)) to.sums[k][key] += moment[key] == 0.0f ? 0.0f : moment[key] * step[k];
                });
            });
        }
    };

    // Of weights with a multiple of the score (cfg::tilts), sum dS s = k (sum dS scale q), since dK waits for its factors; k: the warpgroup's rows.
    __device__ __forceinline__ void add_products(const KeyGradient& dk, u32 k, const Work& work, u32 warpgroup) {
        if constexpr (cfg::tilts == 0) return;
        const u32 row = fragment_row();
        float products[2] = {};
        unroll<cfg::head_dim / 4>([&](int pair) {
            const int block = pair / 2, key = pair % 2;
            u32 word;
            ptx::load_shared(word, k + block / 8 * cfg::block_n * row_bytes + (row + 8 * key) * row_bytes + 16 * (block % 8 ^ row % 8) + 4 * (threadIdx.x % 4));
            const float2 both = unpack<cfg::elem>(word);
            products[key] = fmaf(dk[2 * pair], both.x, fmaf(dk[2 * pair + 1], both.y, products[key]));
        });
        const TilePlace at = {work.batch, head, 0, static_cast<i32>(work.tile * cfg::block_n + 64 * warpgroup + row)};
        const Traced traced(p, at);
        const TracedRow first = traced.row(p, at, 0);
        unroll<2>([&](int key) {
            float tilt[weights];
            ScorePlace{p, traced.head, first, traced.keys[key]}.tilts(tilt, Count());
            const float product = products[key] * static_cast<float>(p.scale);
            unroll<weights>([&](int n) {
                if (among(cfg::tilts, n)) sums[n][key] += product == 0.0f ? 0.0f : product * tilt[n];
            });
        });
    }

    // Up to a head, of all of the warpgroup's keys, from the thread's first on; of heads a sum for each of the block's warps.
    __device__ __forceinline__ void store(const Work& work, i32 end, u32 warpgroup) {
        const i32 key = work.tile * cfg::block_n + 64 * warpgroup + fragment_row();
        for (; head < end; ++head) {
            store_head(work.batch * p.heads + head, key, work.tile * (4 * warpgroups) + 4 * warpgroup + threadIdx.x % 128 / 32);
            clear();
        }
    }

    __device__ __forceinline__ void store_head(i32 flat, i32 key, i32 warp) {
        const i64 heads = static_cast<i64>(p.batch) * p.heads;
        float* const of_keys = static_cast<float*>(p.dbias_acc) + (sums_diagonals ? heads * p.dbias.head + 4 : 0);  // behind diagonals
        float* const of_heads = of_keys + count_before(weights, kShareLine) * heads * p.n_keys;
        unroll<weights>([&](int k) {
            float (&sum)[2] = sums[k];
            unroll<2>([&](int r) { sum[r] += __shfl_xor_sync(~0u, sum[r], 1), sum[r] += __shfl_xor_sync(~0u, sum[r], 2); });
            const i64 number = count_before(k, shared_by(k)) * heads + flat;
            if (shared_by(k) == kShareLine) {
                unroll<2>([&](int r) {
                    if (threadIdx.x % 4 == r && key + 8 * r < p.n_keys) of_keys[number * p.n_keys + key + 8 * r] = sum[r];
                });
            } else if (shared_by(k) == kShareHead) {
                float all = sum[0] + sum[1];
                unroll<3>([&](int step) { all += __shfl_xor_sync(~0u, all, 4 << step); });
                if (threadIdx.x % 32 == 0) of_heads[number * (p.key_tiles * 4 * warpgroups) + warp] = all;
            }
        });
    }
};

}  // namespace sm90::bwd
#endif
