// What a block of the backward does.
//
// A persistent grid.  Per block: a producer warp feeds row tiles of q and do to two consumer warpgroups of 64 keys each, two
// reducer warps add dQ up in memory, and a cleaner warp looks after NaN (sm90/bwd_producer.cuh, bwd_consumer.cuh, bwd_reducer.cuh).
// With dropout a further warpgroup draws what is dropped (bwd_draws.cuh).
#pragma once
#include "attn/params.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_consumer.cuh"
#include "sm90/bwd_draws.cuh"
#include "sm90/bwd_keys.cuh"
#include "sm90/bwd_producer.cuh"
#include "sm90/bwd_reducer.cuh"
#include "sm90/bwd_split.cuh"

namespace sm90::bwd {

// Accumulators leave the others few; walking blocks takes more.  Setting registers goes by eights.
constexpr bool shared_evenly = drawing_warpgroups && (cfg::block_m == 64 || (cfg::runs && !drawn_in_pairs));
constexpr int producer_registers = sums_diagonals || by_function || block_mask || (stated_mask && cfg::deterministic) || (cfg::in_parts && column_masks > 0) || (ds_stages == 1 && !unmasked) ? 40 : shared_evenly ? 32 : 24;
constexpr int drawer_registers = drawn_in_pairs ? 40 : shared_evenly ? 32 : 24;
constexpr int consumer_registers = ((drawing_warpgroups ? 512 - drawer_registers : 504) - producer_registers) / 16 * 8;

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    constexpr u32 warps = 4 * warpgroups;
    for (int stage = 0; stage < k_stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(k_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(k_empty + stage), consumers);
    }
    ptx::mbarrier_init(shared.barrier(v_full), 1);
    ptx::mbarrier_init(shared.barrier(v_empty), by_function ? 128 : cfg::split_delta || dq_elsewhere ? consumers : warps);
    for (int stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(q_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(q_empty + stage), consumers);
        ptx::mbarrier_init(shared.barrier(do_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(do_empty + stage), dq_elsewhere ? consumers : warps);
        if constexpr (drawers) {
            ptx::mbarrier_init(shared.barrier(draws_told + stage), 1);
            ptx::mbarrier_init(shared.barrier(draws_full + stage), 32 * drawers);
            ptx::mbarrier_init(shared.barrier(draws_empty + stage), by_function ? 128 : consumers);
        }
        if constexpr (sums_diagonals) ptx::mbarrier_init(shared.barrier(ds_empty + stage), 32);
    }
    for (int buffer = 0; buffer < 2; ++buffer) {
        ptx::mbarrier_init(shared.barrier(handed + buffer), by_function ? 128 : warps);
        ptx::mbarrier_init(shared.barrier(taken + buffer), by_function && !cfg::keeps_ds ? 128 : 1);
        ptx::mbarrier_init(shared.barrier(foretold + buffer), cfg::keeps_ds ? 128 : 1);
    }
    ptx::mbarrier_init(shared.barrier(raw_full), 1);
    ptx::mbarrier_init(shared.barrier(raw_empty), 32);
    ptx::mbarrier_init_fence();
}

// Of what tensor cores read as D all but its parts is never written.
__device__ __forceinline__ void clear_delta(const Shared& shared) {
    for (u32 i = threadIdx.x; i < cfg::stages * delta_stride / 16; i += threads) shared.at<uint4>(delta_at, i) = {0, 0, 0, 0};
    ptx::async_proxy_fence();
}

// By the first threads.
template <class Elem>
__device__ __forceinline__ void store_counting(u32 counting) {
    if (threadIdx.x < counting_bytes / 16) {
        const float each = threadIdx.x % 2, row = each ? 8 * (threadIdx.x / 2) : 1.0f;
        u32 pairs[4];
        unroll<4>([&](int i) { pairs[i] = ::pack<Elem>(fmaf(each, 2 * i, row), fmaf(each, 2 * i + 1, row)); });
        ptx::store_shared_v4(counting + 16 * threadIdx.x, pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    ptx::async_proxy_fence();
}

// What parts and dS are multiplied with; in rows of zeros beside delta, once all are there.
__device__ __forceinline__ void fill_factors(const Shared& shared) {
    if constexpr (cfg::split_delta) __syncthreads();
    if constexpr (splits_rows) store_counting<__nv_bfloat16>(shared.halves());
    else if constexpr (splits) store_halves(shared.halves());
    if constexpr (counts) store_counting<cfg::elem>(shared.counting());
}

__device__ __forceinline__ void run_consumer(const Params& p, const Shared& shared, const Maps& maps, u32 warpgroup) {
    if constexpr (dq_elsewhere && !by_function) {
        KeyOwner owner{{p, shared}, warpgroup};
        owner.run(maps);
    } else if constexpr (!by_function) {
        Consumer(p, shared, maps, warpgroup).run();
    } else if (warpgroup == 0) {
        Weigher weigher{{p, shared}};
        weigher.run(maps);
    } else {
        Differentiator differentiator{{p, shared}};
        differentiator.run(maps);
    }
}

__device__ __forceinline__ void run_block(const Params& p, const Maps& maps) {
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    // The same in all lanes; the shuffle tells the compiler so.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) init_barriers(shared);
    if constexpr (cfg::split_delta) clear_delta(shared);
    if constexpr (splits || counts) fill_factors(shared);
    __syncthreads();  // the barriers and the zeros beside delta are ready

    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            if constexpr (dq_elsewhere) ptx::launch_dependents();  // sm90/bwd_rows.cu, which needs nothing of this
            Producer producer{p, maps, shared, threadIdx.x == 0};
            producer.run();
        } else if (warp <= warpgroups) {
            if constexpr (dq_whole || (dq_elsewhere && !by_function)) {}
            else if constexpr (!by_function)
                reduce(p, shared, warp - 1);
            else if constexpr (drawers)
                draw_ahead(p, shared, warp - 1);
            else if constexpr (cfg::keeps_ds) {
                if (warp == 1) keep_gradients(p, shared);
            }
        } else if (may_hide_rows) {
            clean(p, shared);
        }
    } else if (drawing_warpgroups && warp >= 4 * (1 + warpgroups)) {
        ptx::registers_release<drawer_registers>();
        draw_ahead(p, shared, warp % 4);
    } else {
        ptx::registers_claim<consumer_registers>();
        run_consumer(p, shared, maps, warp / 4 - 1);
    }
}

}  // namespace sm90::bwd
