// The tangents of attention's gradients for compute capability 9.0, in a fixed order, and without any sum in memory.
//
//   u = s. - lse.,  dP = dO V^T,  dP. = dO V.^T + dO. V^T,  dS = P (dP - D),  dS. = u dS + P (dP. - D.),  dX = f' dS,  dX. = f' dS. + f'. dS
//   dQ. = scale (dX. K + dX K.),   dK. = scale (dX.^T Q + dX^T Q.),   dV. = (P u)^T dO + P^T dO.
//
// One launch owns row tiles and sums dQ. (7 products a tile without dO.), one owns key tiles and sums dK. and dV. (8).  Where keys own, scores are
// transposed, so that both are the same: a producer warp feeds tiles of the other side to two consumer warpgroups of 64 own rows each.  Or
// (cfg::one_pass) keys own, and each warpgroup adds what its keys give of dQ. up in memory, in no fixed order (10).  The warpgroups take turns at the
// tensor cores, so that one's products run while the other weighs and differentiates.
//
// Grid: tiles of the owner, and further parts of the first one, * heads * batch.
#include "ptx/registers.cuh"
#include "sm90/bwd_jvp_consumer.cuh"

namespace sm90::moved {

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    for (u32 stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.full(stage), 1);
        ptx::mbarrier_init(shared.empty(stage), 128 * warpgroups);
        if constexpr (may_hide) ptx::mbarrier_init(shared.raw(stage), 1);
    }
    ptx::mbarrier_init(shared.own_full(), 1);
    if constexpr (one_pass && may_hide) ptx::mbarrier_init(shared.own_raw(), 1);
    ptx::mbarrier_init_fence();
}

}  // namespace sm90::moved

extern "C" __global__ void __launch_bounds__(sm90::moved::threads, 1)
backward_jvp(const __grid_constant__ TangentParams p, const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
             const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap do_map, const __grid_constant__ ptx::TensorMap tq_map,
             const __grid_constant__ ptx::TensorMap tk_map, const __grid_constant__ ptx::TensorMap tv_map, const __grid_constant__ ptx::TensorMap tdo_map) {
    using namespace sm90;
    using namespace sm90::moved;
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    const Maps maps{q_map, k_map, v_map, do_map, tq_map, tk_map, tv_map, tdo_map};
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes; the shuffle tells the compiler so
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();  // the barriers are ready

    const Work work = own_tile(p, blockIdx.x);
    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            Producer producer{p, maps, shared, work, threadIdx.x == 0};
            producer.run();
        } else if (warp == 1 && may_hide) {
            Cleaner{p, shared, work}.run();
        }
    } else {
        ptx::registers_claim<consumer_registers>();
        Consumer consumer{p, shared, work, warp / 4 - 1};
        consumer.run();
    }
}
