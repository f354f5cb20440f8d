// What becomes of dS beside dQ and dK, on its way to 16 bits: gradients of a bias, and of the arrays that a score function reads.
#pragma once
#include "ptx/global.cuh"
#include "sm90/bwd_bias.cuh"

namespace sm90::bwd {

// Two neighbouring queries of a key at a time: nothing,
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
