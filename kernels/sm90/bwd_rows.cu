// dQ for compute capability 9.0 in a fixed order: each row tile against its key tiles, without any sum in memory.
//
// A persistent grid, whose blocks may begin while sm90/bwd.cu has its last key tiles; per block a producer warp feeds key and value tiles to two
// consumer warpgroups of 64 query rows each.
#include "ptx/registers.cuh"
#include "sm90/bwd_rows_consumer.cuh"

namespace sm90::rows {

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    constexpr u32 warps = 4 * warpgroups;
    ptx::mbarrier_init(shared.barrier(rows_full), 1);
    ptx::mbarrier_init(shared.barrier(rows_empty), warpgroups);
    for (int stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(k_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(k_empty + stage), 128 * warpgroups);
    }
    for (int stage = 0; stage < cfg::v_stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(v_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(v_empty + stage), warps);
    }
    ptx::mbarrier_init(shared.barrier(raw_full), 1);
    ptx::mbarrier_init(shared.barrier(raw_empty), 32);
    ptx::mbarrier_init_fence();
}

}  // namespace sm90::rows

extern "C" __global__ void __launch_bounds__(sm90::rows::threads, 1)
backward_rows(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
              const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
              const __grid_constant__ ptx::TensorMap do_map, const __grid_constant__ ptx::TensorMap dq_map) {
    using namespace sm90;
    using namespace sm90::rows;
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    const Maps maps{q_map, k_map, v_map, do_map, dq_map};
    // The same in all lanes; the shuffle tells the compiler so.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();  // the barriers are ready

    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            Producer producer{p, maps, shared, threadIdx.x == 0};
            producer.run();
            ptx::await_launch_before();  // who waits for this launch waits for both
        } else if (warp == 1 && may_hide_keys) {
            clean(p, shared);
        }
    } else {
        ptx::registers_claim<consumer_registers>();
        Consumer consumer{{p}, dq_map, shared, warp / 4 - 1};
        consumer.run();
    }
}
