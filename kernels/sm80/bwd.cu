// Gradients of attention for one tile of keys at a time: FlashAttention's Algorithm 4, with FlashMask's tile skipping (Algorithm 2).
//
//   P = exp(S - m) / l,   dV = P^T dO,   dP = dO V^T,   dS = P (dP - D),   dQ = scale dS K,   dK = scale dS^T Q
//
// One block owns the keys of one tile of one key/value head.  It walks over the query heads of its group and over the row tiles that see
// its keys; dK and dV stay in registers throughout, dQ is added to a float32 accumulator in global memory (cfg::atomic_dq).
// Warps share the work three ways (sm80/bwd_layout.cuh); P and dS pass between them through shared memory, rounded to the input type.
//
// Shared memory   k [block_n][d]   v [block_n][dv]   q [stages][block_m][d]   do [stages][block_m][dv]   p, ds [block_m][block_n]
//                 stat, delta [stages][block_m]   units (float32: sm80/bwd_split.cuh)
// Grid            key tiles * key/value heads * batch, tiles fastest
// Workspace       stat, delta, counters (attn/bwd_workspace.cuh); dq_acc (sm80/bwd_queries.cuh)
#include "sm80/bwd_alternate.cuh"
#include "sm80/bwd_gradients.cuh"
#include "sm80/bwd_queries.cuh"

namespace sm80 {

// Algorithm 4 line 10.
__device__ __forceinline__ void load_queries(u32 shared, const Params& p, const Head& head, i32 tile, int stage) {
    load_row_tile(tile_q(shared, stage).tile, tile_do(shared, stage).tile, shared + stat_at + stage * row_numbers, p, head, tile);
}

// Waits for the rows of `tile` and starts loading those of `next` (-1: none); meanwhile, line 21 for the tile before.
__device__ __forceinline__ void next_queries(u32 shared, const Params& p, const Head& head, i32 tile, i32 next, i32 before,
                                              int stage) {
    if constexpr (cfg::stages == 2) {
        finish_row_tile(tile_q(shared, stage), tile_do(shared, stage));
        __syncthreads();  // this stage has arrived; the other one and P are free; dS of the tile before is complete
        if (next >= 0) load_queries(shared, p, head, next, stage ^ 1);
        ptx::cp_async_commit();
        if (cfg::atomic_dq && before >= 0) add_queries(shared, head.dq_acc, before, stage ^ 1);
    } else {
        __syncthreads();  // q, do and P are free; dS of the tile before is complete
        load_queries(shared, p, head, tile, 0);
        ptx::cp_async_commit();
        if (cfg::atomic_dq && before >= 0) add_queries(shared, head.dq_acc, before, 0);
        finish_row_tile(tile_q(shared, 0), tile_do(shared, 0));
        __syncthreads();  // q and do have arrived; dS is free
    }
}

// Algorithm 4 lines 9-23 for one query head, from row tile walk.tile on; first_tile: number of its first row tile among those of the block.
__device__ __forceinline__ void walk_together(KeyGradients& acc, i32& group, u32 shared, const Params& p, const Head& head, RowWalk& walk,
                                              const Slice& slice, i32 first_tile) {
    i32 before = -1;  // row tile whose dS is still to be multiplied with K
    int stage = 0;
    for (i32 tile = walk.tile, next; tile >= 0; tile = next) {
        const bool partial = walk.partial(p);
        next = walk.next(p) ? walk.tile : -1;
        flush(acc, p, slice, group, first_tile + tile);
        next_queries(shared, p, head, tile, next, before, stage);
        rows_to_shared(shared, p, head, tile, partial, stage);
        if constexpr (team_local)
            ptx::barrier_sync(1 + slice.team, 32 * slices);  // the team's P and dS are complete
        else
            __syncthreads();  // P and dS are complete
        add_keys(acc, shared, slice, stage);
        before = tile;
        stage = (stage + 1) % cfg::stages;
    }
    __syncthreads();  // all of dS is complete
    if constexpr (cfg::atomic_dq) add_queries(shared, head.dq_acc, before, (stage + 1) % cfg::stages);
}

}  // namespace sm80

extern "C" __global__ void __launch_bounds__(sm80::threads, cfg::blocks_per_sm) attention_backward(const __grid_constant__ Params p) {
    using namespace sm80;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    __shared__ u64 barriers[Signals::count];
    const u32 shared = ptx::shared_address(memory);
    const Slice slice;
    KeyGradients acc;
    clear(acc);  // line 8
    start_flushes(acc, p, slice);
    i32 group = -1;
    Signals signals = {ptx::shared_address(barriers), 0, 0};
    if constexpr (alternating) signals.init();

    for (i32 member = 0; member < p.group; ++member) {
        describe_group_member(head, p, member);
        __syncthreads();  // head is complete
        RowWalk walk(p, head.walk);
        if (shares(p)) walk.tile = max(walk.tile, first_shared(p) - 1);
        if (!walk.next(p)) continue;
        if (!alternating || threadIdx.x < number_loaders) {
            load_key_tile(shared + k_at, shared + v_at, p, head, walk.first_key(), true);  // line 7
            if constexpr (is_split) finish_key_tile(tile_k(shared), tile_v(shared));
            if constexpr (cfg::stages == 2) load_queries(shared, p, head, walk.tile, 0);
        }
        ptx::cp_async_commit();
        if constexpr (alternating) walk_alternating(acc, group, signals, shared, p, head, walk, slice, member * p.row_tiles);
        else walk_together(acc, group, shared, p, head, walk, slice, member * p.row_tiles);
        __syncthreads();  // nothing of this head is read again
    }
    if (shares(p)) {
        add_shared(acc, p, slice);
        return;
    }
    add_flushed(acc, p, slice);
    store_keys(memory, shared, p, slice, acc);  // line 24
}
