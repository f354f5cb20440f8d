// The forward along tangents for compute capability 9.0: o, l, m, and the tangents of o and of lse (formulas: sm80/jvp.cu).
//
// Blocks are those of sm90/fwd.cu: a planner warp, a producer warp, two warpgroups of 64 query rows each (sm90/jvp_consumer.cuh).  Tiles of q, k and v
// bring their tangents with them, in the same buffers and on the same barriers.
#include "attn/tangents.cuh"
#include "ptx/registers.cuh"
#include "sm90/fwd_planner.cuh"
#include "sm90/fwd_producer.cuh"
#include "sm90/jvp_consumer.cuh"

namespace sm90::fwd {

// Loads tangents beside what they are of.
struct TangentLoads {
    static constexpr int first_parts = cfg::first_parts;
    const TangentParams* p;
    const ptx::TensorMap* map;  // of the one operand, or the two, that the warp loads
    const ptx::TensorMap* values_map;

    __device__ __forceinline__ void load_queries(u32 to, u32 full, const Work& work) const {
        if constexpr (cfg::tq) load_tile<cfg::block_m, slabs>(*map, to, full, ptx::evict_first, work.row, {p->tq, work.head, work.batch});
    }
    __device__ __forceinline__ void load_keys(u32 to, u32 full, i32 key, i32 head, i32 batch) const {
        if constexpr (cfg::tk) load_tile<cfg::block_n, slabs>(*map, to, full, ptx::evict_last, key, {p->tk, head, batch});
    }
    __device__ __forceinline__ void load_values(u32 to, u32 full, i32 key, i32 head, i32 batch) const {
        if constexpr (cfg::tv) load_tile<cfg::block_n, slabs_v>(*values_map, to, full, ptx::evict_last, key, {p->tv, head, batch});
    }
};

}  // namespace sm90::fwd

extern "C" __global__ void __launch_bounds__(sm90::fwd::threads, 1)
attention_jvp(const __grid_constant__ TangentParams p, const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
              const __grid_constant__ ptx::TensorMap v_map, const __grid_constant__ ptx::TensorMap o_map, const __grid_constant__ ptx::TensorMap to_map,
              const __grid_constant__ ptx::TensorMap tq_map, const __grid_constant__ ptx::TensorMap tk_map, const __grid_constant__ ptx::TensorMap tv_map) {
    using namespace sm90;
    using namespace sm90::fwd;
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes; the shuffle tells the compiler so
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();  // the barriers are ready

    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            Producer<TangentLoads> producer{p, k_map, v_map, k_map, shared, threadIdx.x, {}, {}, {}, {&p, &tk_map, &tv_map}};
            producer.run();
        } else if (warp == 1) {
            Planner<TangentLoads> planner{p, q_map, shared, threadIdx.x % 32, {}, {}, {&p, &tq_map, nullptr}};
            planner.run();
        } else if (warp == 2 && may_hide_keys) {
            clean(p, shared);
        }
    } else {
        ptx::registers_claim<consumer_registers>();
        TangentConsumer consumer{p, o_map, to_map, shared, warp / 4 - 1};
        consumer.run();
    }
}
