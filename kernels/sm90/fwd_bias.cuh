// The bias as the consumers add it: it comes with the keys, as a tile or as the one row that all queries share, or by ordinary loads.
#pragma once
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "sm90/fwd_softmax.cuh"

namespace sm90::fwd {

// How the bias comes: with the keys, as a tile or as one row for all queries; or by ordinary loads, of which one for each row may do.
enum BiasForm { kBiasLoads, kBiasRows, kBiasKeys, kBiasTiles };
constexpr BiasForm bias_form = cfg::bias_tiles ? kBiasTiles : cfg::bias_keys ? kBiasKeys : cfg::bias_rows ? kBiasRows : kBiasLoads;

// Is what the bias adds read before the scores are there?  More warpgroups than two have no registers to keep it in.
constexpr bool bias_ahead = adds_bias && bias_form != kBiasLoads && warpgroups == 2, bias_late = adds_bias && !bias_ahead;

// Calls work(i) for those of `count` pieces that belong to one of `steps` steps.
template <int count, class Work>
__device__ __forceinline__ void unroll_part(int step, int steps, const Work& work) {
    unroll<count>([&](int i) { if (i * steps / count == step) work(i); });
}

// What a thread adds to its scores of a key tile, read in steps, and unpacked in steps.
struct Unpacked {
    __device__ __forceinline__ void unpack(int, int) const {}
};
template <BiasForm form>
struct Bias : Unpacked {  // by ordinary loads: only where they begin is kept
    const cfg::bias_elem* rows[2];
    i32 key;

    __device__ __forceinline__ void load(int, int, const Params& p, const Shared&, u32, const Work& work, i32 first_row, i32 n) {
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
struct Bias<kBiasRows> : Unpacked {
    float rows[2];

    __device__ __forceinline__ void load(int step, int, const Params& p, const Shared&, u32, const Work& work, i32 first_row, i32) {
        if (step > 0) return;
        const i64 offset = slice_of(p.bias, work.batch, work.head);
        unroll<2>([&](int r) { rows[r] = bias_at(p, offset, max(first_row, 0) + 8 * r, 0); });
    }
    __device__ __forceinline__ bool hides() const { return true; }
    __device__ __forceinline__ float of(const Params&, int i) const { return rows[half_of(i)]; }
};

// One number for each of the thread's keys.
template <>
struct Bias<kBiasKeys> : Unpacked {
    float2 keys[cfg::block_n / 8];
    float some_hidden;

    __device__ __forceinline__ void load(int step, int steps, const Params&, const Shared& shared, u32 stage, const Work&, i32, i32) {
        const u32 row = shared.key_bias(stage), own = row + 8 * (threadIdx.x % 4);
        unroll_part<cfg::block_n / 8>(step, steps, [&](int block) { ptx::load_shared(keys[block], own + 32 * block); });
        if (step == 0) ptx::load_shared(some_hidden, row + 4 * cfg::block_n);
    }
    __device__ __forceinline__ bool hides() const { return uniform(some_hidden != 0.0f); }
    __device__ __forceinline__ float of(const Params&, int i) const { return i % 2 ? keys[i / 4].y : keys[i / 4].x; }
};

// A tile lies in slabs like those of q; pairs of 16-bit numbers come as fragments, and are told apart where there are registers for that.
constexpr bool unpacks_ahead = bias_ahead && bias_form == kBiasTiles && cfg::min_blocks == 1 && cfg::block_n * 5 / 4 + cfg::head_dim_v / 2 <= 192;
template <>
struct Bias<kBiasTiles> {
    u32 pairs[cfg::block_n / 16][4];
    float numbers[unpacks_ahead ? cfg::block_n / 2 : 1];

    __device__ __forceinline__ void load(int step, int steps, const Params&, const Shared& shared, u32 stage, const Work&, i32, i32) {
        const u32 thread = ptx::opaque(static_cast<i32>(threadIdx.x - 128)), lane = thread % 32, row = 16 * (thread / 32) + lane % 16;
        const u32 own = shared.bias(stage) + row * row_bytes + 16 * (lane / 16 ^ row % 8);  // the swizzle is an exclusive or of the row's bits
        unroll_part<cfg::block_n / 16>(step, steps, [&](int block) {
            ptx::ldmatrix_x4(pairs[block], (own ^ 32 * (block % 4)) + block / 4 * cfg::block_m * row_bytes);
        });
    }
    __device__ __forceinline__ void unpack(int step, int steps) {
        if constexpr (unpacks_ahead) unroll_part<cfg::block_n / 2>(step, steps, [&](int i) { numbers[i] = ptx::opaque(unpacked(i)); });
    }
    // A dense bias of -inf hides what is finite.
    __device__ __forceinline__ bool hides() const { return false; }
    __device__ __forceinline__ float of(const Params&, int i) const {
        if constexpr (unpacks_ahead) return numbers[i];
        return unpacked(i);
    }
    __device__ __forceinline__ float unpacked(int i) const {
        const u32 pair = pairs[i / 8][i / 2 % 4];
        if constexpr (is_bfloat16) return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
        return i % 2 ? ptx::high_f16(pair) : ptx::low_f16(pair);
    }
};

// For how many blocks of 8 keys there are registers to keep what a score function adds to scores that are not there yet.
constexpr int find_blocks_ahead() {
    if (!cfg::additive || cfg::bias || cfg::split_score) return 0;
    const int all = warpgroups == 3 ? 128 : cfg::reads_keys || cfg::dropout > 0 ? 184 : 200;
    const int blocks = (all - cfg::block_n * 3 / 4 - cfg::head_dim_v / 2) / 4;
    return blocks < 0 ? 0 : blocks < cfg::block_n / 8 ? blocks : cfg::block_n / 8;
}
constexpr int blocks_ahead = find_blocks_ahead();

// A key of which a score function is asked.  One beyond the last is taken for that only where arrays are read by keys: its score is masked.
template <class Key, class Head>
__device__ __forceinline__ Key key_of(const Params& p, const Head& head, i32 key) {
    if constexpr (cfg::reads_keys) return Key::of(p, head, key);
    const i32 j = static_cast<i32>(global_key(p, key));
    return {j, traced::key(p, head.made, head.b, head.h, j)};
}

// A thread's two rows, of which a score function is asked.
struct AskedRows {
    TracedHead head;
    TracedRow rows[2];
    float addends[4 * blocks_ahead + 1];

    __device__ __forceinline__ void ask(int step, int steps, const Params& p, const Work& work, i32 first_row, i32 first_key) {
        if (step == 0) {
            head = TracedHead::of(p, work.batch, work.head);
            unroll<2>([&](int r) { rows[r] = TracedRow::of(p, head, max(first_row, 0) + 8 * r); });
        }
        ask_ahead(step, steps, p, head, first_key);
    }

    template <class Head>
    __device__ __forceinline__ void ask_ahead(int step, int steps, const Params& p, const Head& of, i32 first_key) {
        if constexpr (blocks_ahead > 0) {
            unroll_part<2 * blocks_ahead>(step, steps, [&](int i) {
                const auto key = key_of<TracedKey>(p, of, first_key + i / 2 * 8 + i % 2);
                unroll<2>([&](int r) { addends[i / 2 * 4 + 2 * r + i % 2] = ptx::opaque(addend(p, of, rows[r], key)); });
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

// Adds the bias of a tile's keys to their products, which are under way.
__device__ __forceinline__ void add_parts(Scores& s, u32 halves, u32 parts) {
    ptx::Product<cfg::block_n>::ss<true, 1, 0>(s, halves_descriptor(halves), parts_descriptor(parts), 1);
}

// Hides the scores of keys whose bias does, whatever their products are; parts: of the tile's keys.
__device__ __forceinline__ void hide_scores(Scores& s, u32 parts) {
    const u32 own = parts + 2 * part_bytes * (place_of_thread() % 4);
    unroll<cfg::block_n / 8, 2>([&](int block, int e) {
        u32 leading;
        ptx::load_shared(leading, own + part_bytes * (8 * block + e));
        unroll<2>([&](int r) { s[4 * block + 2 * r + e] = BiasParts::hides(leading) ? minus_infinity() : s[4 * block + 2 * r + e]; });
    });
}

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
            const auto key = key_of<TracedKey>(p, asked.head, first_key + 8 * block + e);
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
