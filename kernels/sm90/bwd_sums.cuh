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
    const Params& p;
    float sums[weights][2], counted[4];
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

    __device__ __forceinline__ static ScorePlace place(const Params& p, const Traced& traced, const TracedRow& row, int key) {
        return {p, traced.head, row, traced.keys[key]};
    }

    // Takes what is apart, of one row tile.
    struct Step {
        WeightedSums& to;
        const TilePlace at;
        const Traced traced;
        TracedRow rows[2];

        __device__ __forceinline__ Step(WeightedSums& to, const TilePlace& at) : to(to), at(at), traced(to.p, at) {}

        __device__ __forceinline__ void take(int i, float low, float high) {
            const int key = key_of(i);
            unroll<2>([&](int e) {
                if (i % 4 == 0) rows[e] = traced.row(to.p, at, i + e);
                const float ds = e ? high : low;
                float weight[weights];
                place(to.p, traced, rows[e], key).ask<traced::weights>(weight);
                unroll<weights>([&](int k) {  // of a hidden score a weight may be anything
                    if (among(cfg::apart, k)) to.sums[k][key] += ds == 0.0f ? 0.0f : ds * weight[k];
                });
            });
        }
    };

    // What is not: sums over a row tile of dS, and of dS times the number of a row, by tensor cores, as rounded for them.
    __device__ __forceinline__ void count(const Fragments& ds, u32 counting) {
        if constexpr (cfg::rests == 0) return;
        ptx::wgmma_fence();
        unroll<cfg::block_m / 16>([&](int step) {
            ptx::Product<8>::rs<is_bfloat16, 1, 0>(counted, ds[step], ptx::wgmma_descriptor_of_units(counting + 64 * step, 32, 0), step > 0);
        });
        ptx::wgmma_commit();
    }

    // Adds them when they are there; they belong to the first threads of quads.
    __device__ __forceinline__ void add(const TilePlace& at) {
        if constexpr (cfg::rests == 0) return;
        ptx::wgmma_pin(counted);
        const Traced traced(p, at);
        const TracedRow first = traced.row(p, at, 0);
        const bool own = threadIdx.x % 4 == 0;
        unroll<2>([&](int key) {
            const float total = own ? counted[2 * key] : 0.0f, moment = own ? counted[2 * key + 1] : 0.0f;
            float weight[weights], step[weights];
            place(p, traced, first, key).ask<traced::weights>(weight);
            place(p, traced, first, key).ask<traced::steps>(step);
            unroll<weights>([&](int k) {  // of a hidden score a weight may be anything
                if (among(cfg::rests, k)) sums[k][key] += total == 0.0f ? 0.0f : total * weight[k];
                if (among(cfg::climbs, k)) sums[k][key] += moment == 0.0f ? 0.0f : moment * step[k];
            });
        });
    }

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
            ScorePlace{p, traced.head, first, traced.keys[key]}.ask<traced::tilts>(tilt);
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
