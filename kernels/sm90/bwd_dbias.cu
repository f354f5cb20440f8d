// dBias = dS, summed over every axis that the bias was broadcast along, in a fixed order: no atomics, no N x N memory.
//
// A block owns a tile of the bias (or a row or column of tiles, where rows or keys are summed), which it keeps in shared memory, each thread its own
// elements.  For all heads that read its bias it computes dS once more (sm90/bwd_pairs.cuh) and adds them up in registers.
//
// An array of which a score function reads one element for each row and key is like a bias, with a weight (LEARNED_ELEMENTS).
//
// Grid            tiles of the bias (keys fastest, then rows) * splits * instances of the bias
// Result          dbias, or (cfg::split) dbias_acc [splits][like dbias]: part s takes every splits-th head
#include "attn/bias_sums.cuh"
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

    __device__ __forceinline__ explicit BiasPairs(const Params& p) : BiasPlace(p), splits(p.splits) {
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

struct alignas(2 * sizeof(cfg::bias_elem)) BiasPair {
    cfg::bias_elem x[2];
};

struct BiasSums : Consumer<BiasSums> {
    RowScoresOf sums;

    static constexpr bool holds_bias = cfg::bias && !learned_elements;

    // Element i's pair of the tile of the bias.
    __device__ __forceinline__ BiasPair& held(int i) const { return shared.at<BiasPair>(own_at, i / 2 * 128 * warpgroups + threadIdx.x - 128); }
    __device__ __forceinline__ float bias_of(int i, i64 offset, i32 row, i32 key) const {
        if constexpr (holds_bias) return to_acc(held(i).x[i % 2]);
        return bias_at(p, offset, row, key);
    }

    // Elements beyond the last row or key are those of that.
    __device__ __forceinline__ void load_bias(const BiasPairs& place) {
        const i64 offset = slice_of(p.bias, place.first_batch, place.first_head);
        const i32 row = place.row_begin * cfg::block_m + 64 * warpgroup + fragment_row(), key = place.key_begin * cfg::block_n + 2 * (threadIdx.x % 4);
        const auto* bias = static_cast<const cfg::bias_elem*>(p.bias.data) + offset;
        unroll<cfg::block_n / 4>([&](int pair) {
            const int i = 2 * pair;
            const auto* of_row = bias + min(row + 8 * (pair % 2), p.n_queries - 1) * p.bias.row;
            BiasPair two;
            unroll<2>([&](int e) { two.x[e] = of_row[min(key + key_of(i + e), p.n_keys - 1) * p.bias.col]; });
            held(i) = two;
        });
    }

#ifdef LEARNED_ELEMENTS
    // The weight of a hidden score may be anything.
    __device__ __forceinline__ void take() {
        for_elements([&](int i, const auto&... place) {
            float weight[cfg::weights];
            ScorePlace{p, place...}.weights(weight, typename CountTo<cfg::weights>::type(), 0.0f);
            sums[i] += s[i] == 0.0f ? 0.0f : s[i] * weight[cfg::weight];
        });
    }
#else
    __device__ __forceinline__ void take() { unroll<cfg::block_n / 2>([&](int i) { sums[i] += s[i]; }); }
#endif
};

constexpr u32 sums_barrier = 1;

__device__ __forceinline__ void consume(const Params& p, const Shared& shared, const BiasPairs& place, u32 warpgroup) {
    BiasSums sums{{{p}, shared, warpgroup}};
    if constexpr (sums.holds_bias) sums.load_bias(place);
    sums.run();
    ptx::barrier_sync(sums_barrier, 128 * warpgroups);  // nobody reads the ring any more
    float* const tile = &shared.at<float>(0);
    const i32 row = 64 * warpgroup + fragment_row(), key = 2 * (threadIdx.x % 4);
    unroll<cfg::block_n / 2>([&](int i) { tile[(row + 8 * (i / 2 % 2)) * bias_sums_stride + key + sums.key_of(i)] = sums.sums[i]; });
    ptx::barrier_sync(sums_barrier, 128 * warpgroups);  // the sums are complete
    store_bias_sums<128 * warpgroups>(tile, p, place, threadIdx.x - 128);
}

}  // namespace sm90::pairs

extern "C" __global__ void __launch_bounds__(sm90::pairs::threads, 1)
backward_bias(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap do_map) {
    using namespace sm90::pairs;
    extern __shared__ __align__(1024) u8 memory[];
    const sm90::pairs::Shared shared{ptx::shared_address(memory), memory};
    const BiasPairs place(p);
    run_block(p, {q_map, k_map, v_map, do_map}, shared, place, [&](u32 warpgroup) { consume(p, shared, place, warpgroup); });
}
