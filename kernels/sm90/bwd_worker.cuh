// What the consumer warpgroups of the backward have in common: their place in the rings, and the way from scores to P.
#pragma once
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "sm90/gradients.cuh"
#include "sm90/bwd_sums.cuh"

namespace sm90::bwd {

constexpr u32 store_barrier = 3;  // + warpgroup: its 128 threads around a staged gradient

struct Worker {
    const Params& p;
    const Shared shared;
    Slot<cfg::stages> slot;  // of the row tile being worked on
    Slot<k_stages> keys;     // of the key tile
    Bias bias;

    __device__ __forceinline__ const Step& step() const { return shared.step(slot.stage); }
    // stat or delta of the row tile in the slot, from the thread's first query on.
    __device__ __forceinline__ const float2* numbers(int offset) const {
        return &shared.at<float2>(offset, slot.stage * (cfg::block_m / 2) + threadIdx.x % 4);
    }

    __device__ __forceinline__ void await_queries() const { ptx::mbarrier_wait(shared.barrier(q_full + slot.stage), slot.phase); }
    __device__ __forceinline__ void await_douts() const { ptx::mbarrier_wait(shared.barrier(do_full + slot.stage), slot.phase); }

    // What is kept of the row tile in the slot, for the warpgroup's keys from first_key on within the key tile.
    __device__ __forceinline__ Draws take_draws(u32 first_key) const {
        Draws draws;
        if constexpr (drawers) {
            ptx::mbarrier_wait(shared.barrier(draws_full + slot.stage), slot.phase);
            const u32 keys_block = first_key / 16 + threadIdx.x % 128 / 32;
            unroll<cfg::block_m / 64>([&](int part) { draws.kept[part] = shared.draws(part, keys_block, threadIdx.x % 32); });
            release_read(shared.barrier(draws_empty + slot.stage));
        }
        return draws;
    }

    __device__ __forceinline__ const Work& work() const { return shared.work(keys.stage); }

    // Of the warpgroup's part of the row tile in the slot, first_key on within the key tile.
    __device__ __forceinline__ TilePlace place(i32 first_key) const {
        return {work().batch, step().head, step().m() * cfg::block_m, work().tile * cfg::block_n + first_key + fragment_row()};
    }

    // The bias of the warpgroup's keys from first_key on, if it is the same for all rows of a head: asked for when a head begins.
    __device__ __forceinline__ void load_bias(i32 first_key) {
        if constexpr (cfg::bias_keys) {
            if (uniform(step().first()) || p.group > 1) bias.load_keys(p, place(first_key));
        }
    }

    // Raw products to scores, as far as something stands between them, and to P.  first_key: as above; slab: of a tile of the bias;
    // await_buffer(): as below.
    template <bool round_now, class Hidden, class Stat, class Buffer>
    __device__ __forceinline__ void find_weights(Scores& s, Fragments& weights, const Hidden& hidden, const Stat& stat, const Draws& draws,
                                                 i32 first_key, u32 slab, const Buffer& await_buffer) {
        constexpr bool finishes = adds_bias || (cfg::score && !cfg::split_score);
        if constexpr (finishes) bias.begin(p, place(first_key), slab);
        if constexpr (slopes_apart) {
            hidden.mask(s);
            if (uniform(step().far())) weigh_apart<true>(s, weights, p, place(first_key), bias, stat, draws);
            else weigh_apart<false>(s, weights, p, place(first_key), bias, stat, draws);
        } else {
            if constexpr (finishes) finish_scores(s, p, place(first_key), bias);
            else if constexpr (cfg::prescaled) prescale(s, p);
            const SplitScore score = split_score();
            hidden.refine(s, p, await_buffer, [&](i32 row) { return score.of_row(row); });
            if constexpr (cfg::row_offsets && !splits_rows) {
                const i32 first_row = step().m() * cfg::block_m + 2 * (threadIdx.x % 4);
                weigh<round_now>(s, weights, p, OffsetStat<Stat>{stat, score, first_row, uniform(step().far()) ? 0.0f : score_scale(p)}, draws);
            } else {
                weigh<round_now>(s, weights, p, stat, draws);
            }
        }
    }

    __device__ __forceinline__ SplitScore split_score() const { return {p, bias.head(), work().tile * cfg::block_n}; }

    // Waits for the key tile in the slot; false when there is none.
    __device__ __forceinline__ bool await_keys() const {
        ptx::mbarrier_wait(shared.barrier(k_full + keys.stage), keys.phase);
        return uniform(work().tile >= 0);
    }

    // There is one buffer of v, so its phase changes with each key tile.
    __device__ __forceinline__ void await_values() const { ptx::mbarrier_wait(shared.barrier(v_full), k_stages == 2 ? keys.stage : keys.phase); }
};

template <int n>
__device__ __forceinline__ void clear(float (&x)[n]) {
    unroll<n>([&](int i) { x[i] = 0.0f; });
}
__device__ __forceinline__ void clear(VisibleRange& visible) { visible = {}; }
__device__ __forceinline__ void clear(VisibleBits& visible) {
#pragma unroll
    for (auto& rows_of_key : visible)
#pragma unroll
        for (u64& rows : rows_of_key) rows = 0;
}

// Registers, or the first of them, to and from a buffer in shared memory that keeps their order, [n / 4][thread][4].
template <int n>
__device__ __forceinline__ void store_registers(u32 buffer, const float (&x)[n], int count = n) {
    const u32 to = buffer + 16 * (threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < n && i < count; i += 4)
        ptx::store_shared_v4(to + i / 4 * 2048, __float_as_uint(x[i]), __float_as_uint(x[i + 1]), __float_as_uint(x[i + 2]),
                             __float_as_uint(x[i + 3]));
}

template <int n>
__device__ __forceinline__ void load_registers(float (&x)[n], u32 buffer) {
    const u32 from = buffer + 16 * (threadIdx.x % 128);
#pragma unroll
    for (int i = 0; i < n; i += 4) {
        float4 four;
        ptx::load_shared(four, from + i / 4 * 2048);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
}

// What is hidden of a warpgroup's part of a tile; found while the scores are being computed.
struct Hidden {
    const Worker& worker;
    Visible visible;
    const bool partial;

    // first_key: of the warpgroup, within the key tile.  partial: elements must be tested.
    __device__ __forceinline__ Hidden(const Worker& worker, i32 first_key, bool partial) : worker(worker), partial(partial) {
        if (partial)
            find_visible(visible, worker.p, worker.place(first_key));
        else if ((cfg::dropout || cfg::split_bias) && (unmasked || cfg::block_m == 128))
            clear(visible);  // or the assembler keeps the last tile's in registers, of which these leave few
    }

    __device__ __forceinline__ void mask(Scores& s) const {
        if (partial) mask_scores(s, visible);
    }

    // Hides scores, makes those of tiles with far rows whole, and takes the maximum from those of far rows.  await_buffer(): the address of
    // handed_bytes, once nobody needs them.
    template <class Buffer, class Rest>
    __device__ __forceinline__ void refine(Scores& s, const Params& p, const Buffer& await_buffer, const Rest& rest_of_row) const {
        if (!partial) return;
        mask_scores(s, visible);
        if (!uniform(worker.step().far())) return;
        constexpr int n = handed_bytes / 512;  // of the thread's scores at a time
#pragma unroll
        for (int first = 0; first < cfg::block_m / 2; first += n) {
            float (&part)[n] = *reinterpret_cast<float (*)[n]>(s + first);
            const u32 buffer = await_buffer();
            store_registers(buffer, part);
            if constexpr (cfg::row_offsets) complete_far<n>(buffer, p, worker.place(0), 2 * first, rest_of_row);
            else subtract_far<n>(buffer, p, worker.place(0), 2 * first);
            load_registers(part, buffer);
        }
    }
};

}  // namespace sm90::bwd
