// A bias in the backward: how it joins the scores of a warpgroup's part of a tile, and how its gradient, dS, is made of them.
//
// It is two numbers of a thread, for its keys (cfg::bias_keys); or it arrives by the copy engine in the buffer that dS will take, each
// warp reading what it later overwrites (cfg::bias_tiles); or it is loaded, element by element.
#pragma once
#include "ptx/global.cuh"
#include "sm90/bwd_scores.cuh"

namespace sm90::bwd {

// Of a thread's two keys, the same for all rows of a head.
struct KeyBias {
    float numbers[2];

    __device__ __forceinline__ void load(const Params& p, const TilePlace& at) {
        const i64 offset = slice_of(p.bias, at.batch, at.head);
        unroll<2>([&](int r) { numbers[r] = bias_at(p, offset, 0, at.key + 8 * r); });
    }

    __device__ __forceinline__ void add_to(Scores& s, const Params& p) const {
        unroll<cfg::block_m / 2>([&](int i) { s[i] = add_bias(p, s[i], numbers[key_of(i)]); });
    }
};

// tile: where store_gradients will put dS.
__device__ __forceinline__ void add_tile(Scores& s, const Params& p, u32 tile) {
    const u32 at = gradients_at(tile);
    unroll<cfg::block_m / 16>([&](int j) {
        u32 pairs[4];
        ptx::ldmatrix_x4_trans(pairs, at + j * 2 * eight_rows);
        unroll<4>([&](int w) {
            const float2 pair = unpack<cfg::bias_elem>(pairs[w]);
            s[8 * j + 2 * w] = add_bias(p, s[8 * j + 2 * w], pair.x);
            s[8 * j + 2 * w + 1] = add_bias(p, s[8 * j + 2 * w + 1], pair.y);
        });
    });
}

__device__ __forceinline__ void add_loaded(Scores& s, const Params& p, const TilePlace& at) {
    const auto* slice = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, at.batch, at.head);
    const i64 keys[2] = {min(at.key, p.n_keys - 1) * p.bias.col, min(at.key + 8, p.n_keys - 1) * p.bias.col};
    const i32 row = at.first_row + 2 * (threadIdx.x % 4);
    unroll<cfg::block_m / 8, 2>([&](int eight, int odd) {
        const auto* of_row = slice + min(row + 8 * eight + odd, p.n_queries - 1) * p.bias.row;
        unroll<2>([&](int r) {
            float& score = s[4 * eight + 2 * r + odd];
            score = add_bias(p, score, to_acc(of_row[keys[r]]));
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
