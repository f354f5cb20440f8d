// Gradients of the arrays that a score function reads (attn/score_sums.cuh): dS times weights, added up where scores share an index.
//
// dS is computed once more, pair by pair (sm90/bwd_pairs.cuh).  Each thread sums what its elements have in common: the rows, keys or diagonals of
// a block's pairs, which lie alike, or all of them.  A slice of an array is summed in shared memory, where every cfg::sharers-th thread has sums of
// its own that so many take turns to add to.
//
// Walk, grid and result are those of sm80/bwd_score.cu.
#include "attn/score_walk.cuh"
#include "ptx/global.cuh"
#include "sm90/bwd_pairs.cuh"

namespace sm90::pairs {

constexpr int consumers = 128 * warpgroups, warps = 4 * warpgroups;
constexpr int copies = consumers / cfg::sharers;  // of a slice

// The pairs of a block.
struct ScorePairs : ScoreWalk {
    using ScoreWalk::ScoreWalk;
    __device__ __forceinline__ i32 heads() const { return flat_end - flat; }
    __device__ __forceinline__ i32 head(const Params&, i32 number) const { return flat + number; }
};

// What a thread sums of each weight's lines, and in which number element i belongs.
constexpr int line_count = cfg::walk == kWalkKeys ? cfg::block_n / 4 : cfg::walk == kWalkRows ? 2 : cfg::walk == kWalkDiagonals ? cfg::block_n / 2 : 1;
__device__ __forceinline__ constexpr int line_of(int i) {
    return cfg::walk == kWalkKeys ? i / 4 * 2 + i % 2 : cfg::walk == kWalkRows ? i / 2 % 2 : cfg::walk == kWalkDiagonals ? i : 0;
}

// The weight whose array has a slice here, or -1.
__device__ __forceinline__ constexpr int find_slice() {
    for (int k = 0; k < weights; ++k)
        if (shared_by(k) == kShareSlice) return k;
    return -1;
}
constexpr int of_slice = find_slice();

// Four elements of a slice, and what is added to them: their sums are read together, which takes as long as one of them.
struct Shares {
    u32 packed;  // their numbers, less than 256
    float values[4];

    // Adds to a thread's sums, which lie `copies` apart.  An element that comes twice goes on from its first sum.
    __device__ __forceinline__ void add(float* own) const {
        u32 numbers[4];
        float sums[4];
        unroll<4>([&](int e) {
            numbers[e] = packed >> 8 * e & 0xFF;
            sums[e] = own[numbers[e] * copies];
        });
        unroll<4>([&](int e) {
            unroll<4>([&](int before) {
                if (before < e) sums[e] = numbers[before] == numbers[e] ? sums[before] : sums[e];
            });
            sums[e] += values[e];
        });
        unroll<4>([&](int e) { own[numbers[e] * copies] = sums[e]; });
    }
};

struct ScoreSumsOfBlock : Consumer<ScoreSumsOfBlock> {
    static constexpr bool takes_products = false;
    const ScoreSumsParams& own;
    float lines[weights][line_count], heads[weights];  // those of weights that share nothing of the kind are never touched
    u32 numbers[cfg::block_n / 8];  // of the slice's elements, found before any is added to: loads do not pass stores
    Shares shares;

    // This thread's sums of the slice.
    __device__ __forceinline__ float* slice() const { return &shared.at<float>(own_at) + (threadIdx.x - 128) / cfg::sharers; }

    // A warp's lanes together.
    __device__ __forceinline__ void add_shares() {
        unroll<cfg::sharers>([&](int turn) {
            if (threadIdx.x % cfg::sharers == turn) shares.add(slice());
            if constexpr (cfg::sharers > 1) __syncwarp();
        });
    }

    __device__ __forceinline__ void find_numbers() {
        unroll<cfg::block_n / 8>([&](int four) { numbers[four] = 0; });
        for_elements([&](int i, const auto&... at) {
            i64 number[weights];
            ScorePlace{p, at...}.ask<traced::numbers>(number);
            numbers[i / 4] |= static_cast<u32>(number[of_slice]) << 8 * (i % 4);
        });
    }

    __device__ __forceinline__ void take() {
        if constexpr (of_slice >= 0) find_numbers();
        for_ds([&](int i, float ds, float input, const auto&... at) {
            const ScorePlace place{p, at...};
            float weight[weights];
            i64 offset[weights];
            place.ask<traced::weights>(weight, input);
            place.ask<traced::offsets>(offset);
            unroll<weights>([&](int k) {
                const float share = ds == 0.0f ? 0.0f : ds * weight[k];  // of a hidden score a weight may be anything
                if (shared_by(k) == kShareLine) lines[k][line_of(i)] += share;
                if (shared_by(k) == kShareHead) heads[k] += share;
                if (shared_by(k) == kShareElement && share != 0.0f) ptx::red_add(static_cast<float*>(own.elements) + offset[k], share);
                if (shared_by(k) != kShareSlice) return;
                shares.packed = numbers[i / 4], shares.values[i % 4] = share;
                if (i % 4 == 3) add_shares();
            });
        });
    }
};

constexpr u32 sums_barrier = 1;
__device__ __forceinline__ void await_consumers() { ptx::barrier_sync(sums_barrier, consumers); }

// Sums over lanes that differ in these bits.
template <int first, int last>
__device__ __forceinline__ float sum_lanes(float x) {
#pragma unroll
    for (int bit = first; bit <= last; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
    return x;
}

// Where the sums of weight k begin.
__device__ __forceinline__ float* sums_of(const ScoreSumsParams& p, const ScoreWalk& place, int k) {
    const i64 number = count_alike(k) * (static_cast<i64>(p.batch) * p.heads) + place.flat;
    return static_cast<float*>(p.sums) + (shared_by(k) == kShareHead ? p.heads_at + number * p.owners + place.owner : number * p.lines);
}

// Lines of weight k to memory, by way of `tile`.
__device__ __forceinline__ void store_lines(float* tile, const ScoreSumsOfBlock& sums, const ScorePairs& place, int k) {
    const ScoreSumsParams& p = sums.own;
    const i32 thread = threadIdx.x - 128, lane = thread % 32;
    float* const to = sums_of(p, place, k);
    if constexpr (cfg::walk == kWalkRows) {
        unroll<2>([&](int r) {
            const float sum = sum_lanes<1, 2>(sums.lines[k][r]);
            const i32 row = place.owner * cfg::block_m + 64 * sums.warpgroup + fragment_row() + 8 * r;
            if (lane % 4 == 0 && row < p.lines) to[row] = sum;
        });
    } else if constexpr (cfg::walk == kWalkKeys) {
        unroll<line_count>([&](int n) {
            const float sum = sum_lanes<4, 16>(sums.lines[k][n]);
            if (lane < 4) tile[thread / 32 * cfg::block_n + n / 2 * 8 + 2 * lane + n % 2] = sum;
        });
        await_consumers();  // every warp's sums are there
        const i32 key = place.owner * cfg::block_n + thread;
        if (thread >= cfg::block_n || key >= p.lines) return;
        float sum = 0.0f;
        for (int warp = 0; warp < warps; ++warp) sum += tile[warp * cfg::block_n + thread];
        to[key] = sum;
    } else if constexpr (cfg::walk == kWalkDiagonals) {
        constexpr int stride = cfg::block_n + 1;
        const i32 row = 64 * sums.warpgroup + fragment_row(), key = 2 * (lane % 4);
        unroll<line_count>([&](int i) { tile[(row + 8 * (i / 2 % 2)) * stride + key + sums.key_of(i)] = sums.lines[k][i]; });
        await_consumers();  // the tile is complete
        if (thread < Diagonal::lines - 1 && place.owner * static_cast<i64>(Diagonal::lines) + thread < p.lines)
            to[place.owner * Diagonal::lines + thread] = line_sum(tile, stride, thread);
    }
}

__device__ __forceinline__ void store_head(float* tile, const ScoreSumsOfBlock& sums, const ScorePairs& place, int k) {
    const i32 thread = threadIdx.x - 128;
    const float sum = sum_lanes<1, 16>(sums.heads[k]);
    if (thread % 32 == 0) tile[thread / 32] = sum;
    await_consumers();  // every warp's sum is there
    if (thread != 0) return;
    float all = 0.0f;
    for (int warp = 0; warp < warps; ++warp) all += tile[warp];
    *sums_of(sums.own, place, k) = all;
}

__device__ __forceinline__ void consume(const ScoreSumsParams& p, const Shared& shared, const ScorePairs& place, u32 warpgroup) {
    ScoreSumsOfBlock sums{{{p}, shared, warpgroup}, p};
    const i32 thread = threadIdx.x - 128;
    float* const slice = &shared.at<float>(own_at);
    for (i32 x = thread; x < p.slice * copies; x += consumers) slice[x] = 0.0f;
    await_consumers();  // the slice is 0
    sums.run();
    float* const tile = &shared.at<float>(0);
    unroll<weights>([&](int k) {
        if (!is_summed(k)) return;
        await_consumers();  // nobody reads the ring, or the last sums, any more
        if (shared_by(k) == kShareLine) store_lines(tile, sums, place, k);
        else store_head(tile, sums, place, k);
    });
    await_consumers();  // the slice is complete
    float* const to = static_cast<float*>(p.sums) + p.slices_at + (static_cast<i64>(place.flat) * p.owners + place.owner) * p.slice;
    for (i32 x = thread; x < p.slice; x += consumers) {
        float sum = 0.0f;
        for (int copy = 0; copy < copies; ++copy) sum += slice[x * copies + copy];
        to[x] = sum;
    }
}

}  // namespace sm90::pairs

extern "C" __global__ void __launch_bounds__(sm90::pairs::threads, 1)
backward_score(const __grid_constant__ ScoreSumsParams p, const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
               const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap do_map) {
    using namespace sm90::pairs;
    extern __shared__ __align__(1024) u8 memory[];
    const sm90::pairs::Shared shared{ptx::shared_address(memory), memory};
    const ScorePairs place(p);
    run_block(p, {q_map, k_map, v_map, do_map}, shared, [&](Producer& producer) { producer.run(place, 0); },
              [&](u32 warpgroup) { consume(p, shared, place, warpgroup); });
}
