// dBias = dS, summed over every axis that the bias was broadcast along, in a fixed order: no atomics, no N x N memory.
//
// A block has a tile of the bias at a time (or a row or column of tiles, where rows or keys are summed), which it keeps in shared memory, each thread its
// own elements.  For all heads that read its bias it computes dS once more (sm90/bwd_pairs.cuh) and adds them up in registers.
//
// An array of which a score function reads one element for each row and key is like a bias, with a weight (LEARNED_ELEMENTS).
//
// Places          tiles of the bias (keys fastest, then rows) * splits * instances of the bias, dealt out to the blocks in turn
// Result          dbias, or (cfg::split) dbias_acc [splits][like dbias]: part s takes every splits-th head
#include "attn/bias_sums.cuh"
#include "attn/pack.cuh"
#include "ptx/global.cuh"
#include "sm90/bwd_pairs.cuh"

#ifdef LEARNED_ELEMENTS
#include "attn/score_sums.cuh"
constexpr bool learned_elements = true;
#else
constexpr bool learned_elements = false;
#endif

namespace sm90::pairs {

// The tiles that a block sums over, and the heads.
struct BiasPairs : BiasPlace {
    i32 batches, of_batch;  // sequences that share the bias, and heads of one that do
    i32 first_batch, first_head, splits;

    __device__ __forceinline__ BiasPairs(const Params& p, i32 number) : BiasPlace(p, number), splits(p.splits) {
        const bool own_batch = p.dbias.batch[kBatchAxes - 1] != 0, own_head = p.dbias.head != 0;
        const i32 heads = own_head ? p.heads : 1;
        first_batch = own_batch ? instance / heads : 0, first_head = own_head ? instance % heads : 0;
        batches = own_batch ? 1 : p.batch, of_batch = own_head ? 1 : p.heads;
    }
    __device__ __forceinline__ i32 heads() const { return (batches * of_batch - split + splits - 1) / splits; }
    __device__ __forceinline__ i32 head(const Params& p, i32 number) const {
        const i32 member = split + number * splits, batch = member / of_batch;
        return (first_batch + batch) * p.heads + first_head + member - batch * of_batch;
    }
    __device__ __forceinline__ void rows(const Params&, i32, i32& begin, i32& end) const { begin = row_begin, end = row_end; }
};

using BiasPair = Pack<cfg::bias_elem, 2>;

struct BiasSums : Consumer<BiasSums> {
    static constexpr bool holds_bias = cfg::bias && !learned_elements, takes_products = !learned_elements && !cfg::dropout && !cfg::softcap;
    Scores sums;

    // Element i's pair of the tile of the bias.
    __device__ __forceinline__ BiasPair& held(int i) const { return shared.at<BiasPair>(own_at, i / 2 * 128 * warpgroups + threadIdx.x - 128); }
    __device__ __forceinline__ float bias_of(int i, i64 offset, i32 row, i32 key) const {
        if constexpr (holds_bias) return to_acc(held(i).x[i % 2]);
        return bias_at(p, offset, row, key);
    }

    // Calls work(i, row, key) for the first of each of the thread's pairs in a place's tile.
    template <class Work>
    __device__ __forceinline__ void for_pairs(const BiasPairs& place, const Work& work) const {
        const i32 row = place.row_begin * cfg::block_m + 64 * row_part() + fragment_row();
        const i32 key = place.key_begin * cfg::block_n + key_part() * own_keys + 2 * (threadIdx.x % 4);
        unroll<own_keys / 4>([&](int pair) { work(2 * pair, row + 8 * (pair % 2), key + key_of(2 * pair)); });
    }

    // Elements beyond the last row or key are those of others.
    __device__ __forceinline__ void load_bias(const BiasPairs& place) {
        const auto* bias = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, place.first_batch, place.first_head);
        const bool together = p.bias.col == 1 && (p.n_keys | p.bias.row) % 2 == 0 && reinterpret_cast<u64>(bias) % sizeof(BiasPair) == 0;
        if (uniform(together))
            for_pairs(place, [&](int i, i32 row, i32 key) {
                held(i) = *reinterpret_cast<const BiasPair*>(bias + min(row, p.n_queries - 1) * p.bias.row + min(key, p.n_keys - 2));
            });
        else
            for_pairs(place, [&](int i, i32 row, i32 key) {
                const auto* of_row = bias + min(row, p.n_queries - 1) * p.bias.row;
                BiasPair two;
                unroll<2>([&](int e) { two.x[e] = of_row[min(key + e, p.n_keys - 1) * p.bias.col]; });
                held(i) = two;
            });
    }

    // Asks for a tile ahead: a part of a row a thread, if rows are contiguous.
    __device__ __forceinline__ void prefetch_bias(const BiasPairs& place) const {
        constexpr int line = 128 / sizeof(cfg::bias_elem), half = cfg::block_n / warpgroups;
        const auto* bias = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, place.first_batch, place.first_head);
        const i32 thread = threadIdx.x - 128, row = min(place.row_begin * cfg::block_m + thread / warpgroups, p.n_queries - 1);
        for (i32 key = place.key_begin * cfg::block_n + thread % warpgroups * half, end = min(key + half, p.n_keys); key < end; key += line)
            ptx::prefetch(bias + row * p.bias.row + key * p.bias.col);
    }

    // The tile of sums, each thread its own; both keys of a pair exist or neither does where their number is even.
    template <class T>
    __device__ __forceinline__ void store(T* to, const BiasPairs& place) const {
        const float factor = static_cast<float>(p.dropout_scale);
        const bool together = p.n_keys % 2 == 0;
        const i64 before = place.instance + (cfg::split ? static_cast<i64>(place.split) * p.bias_instances : 0);
        to += before * bias_rows(p) * bias_keys(p);
        for_pairs(place, [&](int i, i32 row, i32 key) {
            if (row >= p.n_queries || key >= p.n_keys) return;
            const Pack<T, 2> two = {{round_to<T>(sums[i] * factor), round_to<T>(sums[i + 1] * factor)}};
            T* const at = to + static_cast<i64>(row) * p.n_keys + key;
            if (together) {
                *reinterpret_cast<Pack<T, 2>*>(at) = two;
            } else {
                at[0] = two.x[0];
                if (key + 1 < p.n_keys) at[1] = two.x[1];
            }
        });
    }

#ifdef LEARNED_ELEMENTS
    // The weight of a hidden score may be anything.
    __device__ __forceinline__ void take() {
        for_elements([&](int i, const auto&... place) {
            float weight[cfg::weights];
            ScorePlace{p, place...}.ask<traced::weights>(weight);
            sums[i] += s[i] == 0.0f ? 0.0f : s[i] * weight[cfg::weight];
        });
    }
#else
    __device__ __forceinline__ void take() {
        unroll<own_keys / 2>([&](int i) {
            if constexpr (takes_products) sums[i] = fmaf(s[i], dp[i] - (i / 2 % 2 ? delta.y : delta.x), sums[i]);
            else sums[i] += s[i];
        });
    }
#endif
};

constexpr u32 sums_barrier = 1;
constexpr bool along = cfg::sum_rows || cfg::sum_keys;  // then a block has one place, and its ring takes the sums

__device__ __forceinline__ void store_along(const BiasSums& sums, const BiasPairs& place) {
    ptx::barrier_sync(sums_barrier, 128 * warpgroups);  // nobody reads the ring any more
    float* const tile = &sums.shared.at<float>(0);
    const i32 row = 64 * sums.row_part() + fragment_row(), key = sums.key_part() * own_keys + 2 * (threadIdx.x % 4);
    unroll<own_keys / 2>([&](int i) { tile[(row + 8 * (i / 2 % 2)) * bias_sums_stride + key + sums.key_of(i)] = sums.sums[i]; });
    ptx::barrier_sync(sums_barrier, 128 * warpgroups);  // the sums are complete
    store_bias_sums<128 * warpgroups>(tile, sums.p, place, threadIdx.x - 128, bias_sums_to(sums.p), static_cast<float>(sums.p.dropout_scale));
}

__device__ __forceinline__ void consume(const Params& p, const Shared& shared, u32 warpgroup) {
    BiasSums sums{{{p}, shared, warpgroup}};
    for (i32 number = blockIdx.x; number < BiasPlace::count(p); number += gridDim.x) {
        unroll<own_keys / 2>([&](int i) { sums.sums[i] = 0.0f; });
        if constexpr (BiasSums::holds_bias) {
            sums.load_bias(BiasPairs(p, number));
            if (number + gridDim.x < BiasPlace::count(p)) sums.prefetch_bias(BiasPairs(p, number + gridDim.x));
        }
        number = sums.run();
        const BiasPairs place(p, number);
        if constexpr (along) store_along(sums, place);
        else sums.store(bias_sums_to(p), place);
    }
}

}  // namespace sm90::pairs

extern "C" __global__ void __launch_bounds__(sm90::pairs::threads, 1)
backward_bias(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap do_map) {
    using namespace sm90::pairs;
    extern __shared__ __align__(1024) u8 memory[];
    const sm90::pairs::Shared shared{ptx::shared_address(memory), memory};
    run_block(p, {q_map, k_map, v_map, do_map}, shared,
              [&](Producer& producer) {
                  for (i32 number = blockIdx.x; number < BiasPlace::count(p); number += gridDim.x) producer.run(BiasPairs(p, number), number);
              },
              [&](u32 warpgroup) { consume(p, shared, warpgroup); });
}
