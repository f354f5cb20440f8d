// The bias as the consumers add it: it comes with the keys, as a tile or as the one row that all queries share, or by ordinary loads.
#pragma once
#include "ptx/shared.cuh"
#include "sm90/fwd_softmax.cuh"

namespace sm90::fwd {

// How the bias comes: with the keys, as a tile or as one row for all queries; or by ordinary loads, of which one for each row may do.
enum BiasForm { kBiasLoads, kBiasRows, kBiasKeys, kBiasTiles };
constexpr BiasForm bias_form = cfg::bias_tiles ? kBiasTiles : cfg::bias_keys ? kBiasKeys : cfg::bias_rows ? kBiasRows : kBiasLoads;

// Is what the bias adds read before the scores are there?  Three warpgroups have no registers to keep it in.
constexpr bool bias_ahead = cfg::bias && bias_form != kBiasLoads && warpgroups == 2, bias_late = cfg::bias && !bias_ahead;

// What a thread adds to its scores of a key tile.
template <BiasForm form>
struct Bias {  // by ordinary loads: only where they begin is kept
    const cfg::bias_elem* rows[2];
    i32 key;

    __device__ __forceinline__ void load(const Params& p, const Shared&, u32, const Work& work, i32 first_row, i32 n) {
        const auto* head = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, work.batch, work.head);
        unroll<2>([&](int r) { rows[r] = head + min(max(first_row, 0) + 8 * r, p.n_queries - 1) * p.bias.row; });
        key = n * cfg::block_n + 2 * (threadIdx.x % 4);
    }
    __device__ __forceinline__ bool hides() const { return true; }
    __device__ __forceinline__ float of(const Params& p, int i) const {
        return to_acc(rows[half_of(i)][min(ptx::opaque(key) + i / 4 * 8 + i % 2, p.n_keys - 1) * p.bias.col]);
    }
};

// One number for each of the thread's two rows.
template <>
struct Bias<kBiasRows> {
    float rows[2];

    __device__ __forceinline__ void load(const Params& p, const Shared&, u32, const Work& work, i32 first_row, i32) {
        const i64 offset = slice_of(p.bias, work.batch, work.head);
        unroll<2>([&](int r) { rows[r] = bias_at(p, offset, max(first_row, 0) + 8 * r, 0); });
    }
    __device__ __forceinline__ bool hides() const { return true; }
    __device__ __forceinline__ float of(const Params&, int i) const { return rows[half_of(i)]; }
};

// One number for each of the thread's keys.
template <>
struct Bias<kBiasKeys> {
    float2 keys[cfg::block_n / 8];
    float most;
    bool wild;

    __device__ __forceinline__ void load(const Params&, const Shared& shared, u32 stage, const Work&, i32, i32) {
        const KeyBias& row = shared.key_bias(stage);
        unroll<cfg::block_n / 8>([&](int block) { keys[block] = *reinterpret_cast<const float2*>(row.of + 8 * block + 2 * (threadIdx.x % 4)); });
        most = row.most;
        wild = uniform(row.wild);
    }
    __device__ __forceinline__ bool hides() const { return wild; }
    __device__ __forceinline__ void clear() { unroll<cfg::block_n / 8>([&](int block) { keys[block] = {0.0f, 0.0f}; }); }
    __device__ __forceinline__ float of(const Params&, int i) const { return i % 2 ? keys[i / 4].y : keys[i / 4].x; }
};

// A tile lies in slabs like those of q; pairs of 16-bit numbers come as fragments.
template <>
struct Bias<kBiasTiles> {
    u32 pairs[cfg::block_n / 16][4];

    __device__ __forceinline__ void load(const Params&, const Shared& shared, u32 stage, const Work&, i32, i32) {
        const u32 thread = ptx::opaque(static_cast<i32>(threadIdx.x - 128)), lane = thread % 32, row = 16 * (thread / 32) + lane % 16;
        const u32 tile = shared.bias(stage) + row * row_bytes;
        unroll<cfg::block_n / 16>([&](int block) {
            ptx::ldmatrix_x4(pairs[block], tile + block / 4 * cfg::block_m * row_bytes + 16 * ((2 * (block % 4) + lane / 16) ^ (row % 8)));
        });
    }
    // A dense bias of -inf hides what is finite.
    __device__ __forceinline__ bool hides() const { return false; }
    __device__ __forceinline__ float of(const Params&, int i) const {
        const u32 pair = pairs[i / 8][i / 2 % 4];
        if constexpr (is_bfloat16) return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
        return i % 2 ? ptx::high_f16(pair) : ptx::low_f16(pair);
    }
};

// What a score function adds to scores that are not there yet, for as many keys as there are registers: the first of each warpgroup's thread.
constexpr int free_registers = (warpgroups == 3 ? 128 : cfg::min_blocks == 2 ? 96 : 208) - cfg::block_n * 3 / 4 - cfg::head_dim_v / 2;
constexpr int blocks_ahead = !cfg::additive || cfg::bias || free_registers < 4 ? 0 : free_registers / 4 < cfg::block_n / 8 ? free_registers / 4 : cfg::block_n / 8;

// A thread's two rows, of which a score function is asked.
struct AskedRows {
    TracedHead head;
    TracedRow rows[2];
    float addends[4 * blocks_ahead + 1];

    __device__ __forceinline__ void ask(const Params& p, const Work& work, i32 first_row, i32 first_key) {
        head = TracedHead::of(p, work.batch, work.head);
        unroll<2>([&](int r) { rows[r] = TracedRow::of(p, head, max(first_row, 0) + 8 * r); });
        ask_ahead(p, head, first_key);
    }

    template <class Head>
    __device__ __forceinline__ void ask_ahead(const Params& p, const Head& of, i32 first_key) {
        if constexpr (cfg::additive) {
            unroll<2 * blocks_ahead>([&](int i) {
                const auto key = TracedKey::of(p, of, first_key + i / 2 * 8 + i % 2);
                unroll<2>([&](int r) { addends[i / 2 * 4 + 2 * r + i % 2] = addend(p, of, rows[r], key); });
            });
        }
    }

    template <class Head, class Row, class Key>
    __device__ __forceinline__ static float addend(const Params& p, const Head& head, const Row& row, const Key& key) {
        float x;
        traced::addend(p, head.made, row.made, key.made, 0.0f, head.b, head.h, row.i, key.j, x);
        return x;
    }
};

// A score with its bias, as finish_score makes it.
__device__ __forceinline__ float add_bias(const Params& p, float product, float bias) {
    if constexpr (cfg::softcap) return sum_of(cap_score(p, product), bias);
    return fmaf(product, static_cast<float>(p.scale), bias);
}

// Products become scores: softcap, function, bias.  Where the bias `hides` keys, one of -inf does so whatever the product is.
template <class Asked>
__device__ __forceinline__ void complete_scores(Scores& s, const Params& p, const Bias<bias_form>& bias, const Asked& asked, i32 first_key) {
    if constexpr (cfg::score) {
        unroll<cfg::block_n / 8, 2>([&](int block, int e) {
            const TracedKey key = TracedKey::of(p, asked.head, first_key + 8 * block + e);
            unroll<2>([&](int r) {
                const int i = 4 * block + 2 * r + e;
                float& x = s[i];
                x = block < blocks_ahead ? add_bias(p, x, asked.addends[i]) : function_score(p, x, asked.head, asked.rows[r], key).score;
                if constexpr (cfg::bias) x = sum_of(x, bias.of(p, i));
            });
        });
    } else {
        unroll<cfg::block_n / 2>([&](int i) { s[i] = add_bias(p, s[i], bias.of(p, i)); });
    }
    if constexpr (cfg::bias)
        if (bias.hides()) unroll<cfg::block_n / 2>([&](int i) { s[i] = bias.of(p, i) == minus_infinity() ? minus_infinity() : s[i]; });
}

}  // namespace sm90::fwd
