// The reducers: two warps that take every other row tile and add its dQ to the accumulator in global memory.  While one waits for
// its addition to complete, where the next key tile must know, the other already waits for its turn.
//
// The accumulator is [instance of q][row tile][warpgroup][part], a part in the order of the registers that computed it
// (sm90/bwd_consumer.cuh); kernels/sm90/bwd_convert.cu turns it into rows.
#pragma once
#include "ptx/mbarrier.cuh"
#include "sm90/bwd_turns.cuh"

namespace sm90 {

__device__ __forceinline__ void reduce(const Params& p, const Shared& shared, u32 stage) {
    constexpr int bytes = warpgroups * dq_part_bytes;
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(foretold + stage), phase);
        const DqPlace place = shared.dq_place(stage);
        if (uniform(place.tile < 0)) return;
        const typename Either<in_turns, Turn, NoTurn>::type turn(p, place);
        __syncwarp();  // all lanes know the place
        if (threadIdx.x % 32 == 0) {
            turn.await();  // while dQ is being computed
            ptx::mbarrier_wait(shared.barrier(handed + stage), phase);
            if constexpr (reducer_fences) ptx::async_proxy_fence();
            ptx::bulk_add(static_cast<float*>(p.dq_acc) + static_cast<i64>(place.tile) * (bytes / 4), shared.handed_on(0), bytes);
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
            ptx::mbarrier_arrive(shared.barrier(taken));
            turn.pass_on();
        }
    }
}

}  // namespace sm90
