// Attention forward for compute capability 9.0 (FlashAttention algorithm 2, with block masks 5, and FlashMask algorithm 1, tile by tile).
//
// A persistent grid; per block a planner warp lists the key tiles of a row tile, a producer warp and its companion feed them to
// two to four consumer warpgroups of 64 query rows each (sm90/fwd_planner.cuh, sm90/fwd_producer.cuh, sm90/fwd_consumer.cuh).
// The four schedulers have one of these warps each: planner, producer, companion (what a bias or function adds to keys), cleaner.
#include "attn/params.cuh"
#include "ptx/registers.cuh"
#include "sm90/fwd_consumer.cuh"
#include "sm90/fwd_planner.cuh"
#include "sm90/fwd_producer.cuh"

// The map of a bias that comes in tiles is an argument of the kernel in sm90/fwd_bias.cu, which is this one else.
#ifndef BIAS_ARGUMENT
#define BIAS_ARGUMENT
#define bias_map k_map
#endif

extern "C" __global__ void __launch_bounds__(sm90::fwd::threads, cfg::min_blocks)
attention_forward(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
                  const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
                  const __grid_constant__ ptx::TensorMap o_map BIAS_ARGUMENT) {
    using namespace sm90;
    using namespace sm90::fwd;
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    // The same in all lanes; the shuffle tells the compiler so.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) init_barriers(shared);
    if constexpr (splits) store_halves(shared.halves());
    if (threadIdx.x == 32) {  // descriptors are on their way before the first copies need them
        ptx::tensor_map_prefetch(q_map);
        ptx::tensor_map_prefetch(k_map);
        ptx::tensor_map_prefetch(v_map);
        ptx::tensor_map_prefetch(o_map);
        if constexpr (cfg::bias_tiles) ptx::tensor_map_prefetch(bias_map);
    }
    __syncthreads();  // the barriers are ready

    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            Producer<> producer{p, k_map, v_map, bias_map, shared, threadIdx.x};
            producer.run();
        } else if (warp == 1) {
            Planner<> planner{p, q_map, shared, threadIdx.x % 32};
            planner.run();
        } else if (warp == 2 && may_hide_keys) {
            clean(p, shared);
        } else if (warp == 3 && has_companion) {
            Companion companion{p, bias_map, shared, threadIdx.x % 32};
            companion.run();
        }
    } else {
        ptx::registers_claim<consumer_registers>();
        Consumer consumer{{}, p, o_map, shared, warp / 4 - 1};
        consumer.state.scale = score_scale(p);
        consumer.run();
    }
}

