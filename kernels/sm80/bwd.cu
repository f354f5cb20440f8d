// Gradients of attention for one tile of keys at a time: FlashAttention's Algorithm 4, with FlashMask's tile skipping (Algorithm 2).
//
//   P = exp(S - m) / l,   dV = P^T dO,   dP = dO V^T,   dS = P (dP - D),   dQ = scale dS K,   dK = scale dS^T Q
//
// One block owns the keys of one tile of one key/value head.  It walks over the query heads of its group and over the row tiles that see
// its keys; dK and dV stay in registers throughout, dQ is added to a float32 accumulator in global memory (cfg::atomic_dq).
// Warps share the work three ways (sm80/bwd_layout.cuh); P and dS pass between them through shared memory, rounded to the input type.
//
// Shared memory   k [block_n][d]   v [block_n][dv]   q [stages][block_m][d]   do [stages][block_m][dv]   p, ds [block_m][block_n]
//                 stat, delta [stages][block_m]
// Grid            key tiles * key/value heads * batch, tiles fastest
// Workspace       stat, delta [batch * heads][row tiles * block_m] and counters from backward_preprocess; dq_acc (bwd_queries.cuh)
#include "ptx/barrier.cuh"
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_queries.cuh"
#include "sm80/bwd_scores.cuh"

namespace sm80 {

constexpr bool split_slices = cfg::head_dim == cfg::head_dim_v;
constexpr int slice_tiles = slice_columns / 8;
using KeyGradients = Acc[team_keys / 16][slice_tiles][4];

// The part of dV or dK that this warp owns.
struct Slice {
    i32 team, column;
    bool is_k;

    __device__ __forceinline__ Slice() {
        const i32 warp = threadIdx.x / 32, part = warp % slices;
        team = warp / slices;
        is_k = part >= slices / 2;
        column = part % (slices / 2) * slice_columns;
    }
};

// Not kept in registers from one use to the next.
__device__ __forceinline__ i32 key_tile(const Params& p) { return ptx::opaque(static_cast<i32>(blockIdx.x)) % p.key_tiles; }
__device__ __forceinline__ i32 flat_kv_head(const Params& p) { return ptx::opaque(static_cast<i32>(blockIdx.x)) / p.key_tiles; }

// Describes query head number `member` of the block's group.
__device__ __forceinline__ void describe_group_member(Head& head, const Params& p, i32 member) {
    const i32 flat = flat_kv_head(p);
    describe_head(head, p, flat / p.kv_heads, flat % p.kv_heads * p.group + member);
    if (threadIdx.x != 0) return;
    head.walk.first_key = key_tile(p) * cfg::block_n;
    head.walk.end = walk_end(p, head.walk.first_key);
    if constexpr (cfg::mask == kMaskBlock) head.walk.blocks = static_cast<const u8*>(p.mask.data) + head.mask_offset;
    if constexpr (cfg::mask == kMaskColumn) {
        const int4* bounds = p.table.bounds + (head.instance * p.key_tiles + key_tile(p)) * 2;
        head.walk.bounds[0] = bounds[0], head.walk.bounds[1] = bounds[1];
        head.walk.bounds[0].x &= ~kDeadTile;
    }
}

// Algorithm 4 line 7.  Keys that no row sees are loaded as zeros: 0 * NaN in dS K would reach dQ.
__device__ __forceinline__ void load_keys(u32 shared, const Params& p, const Head& head, i32 first_key) {
    auto inside = [&](int row) { return first_key + row < p.n_keys; };
    auto alive = [&](int row) {
        return inside(row) && band_sees(p, first_key + row) && key_alive(p, head.instance, first_key + row);
    };
    load_some_rows<cfg::block_n, cfg::head_dim>(shared + k_at, head.k, p.k.row, first_key, p.head_dim, alive);
    load_some_rows<cfg::block_n, cfg::head_dim_v>(shared + v_at, head.v, p.v.row, first_key, p.head_dim_v, inside);
}

// Algorithm 4 line 10.  Rows that see nothing are loaded as zeros: they would reach dK and dV by 0 * NaN.
__device__ __forceinline__ void load_queries(u32 shared, const Params& p, const Head& head, i32 tile, int stage) {
    const i64 first = i64(tile) * cfg::block_m;
    const Acc* stat = head.stat + first;
    const u32 q = shared + q_at + stage * cfg::block_m * qk_stride, dout = shared + do_at + stage * cfg::block_m * v_stride;
    load_vector(shared + stat_at + stage * stat_bytes, stat);
    load_vector(shared + delta_at + stage * stat_bytes, head.delta + first);
    const bool some_empty = head.has_empty_rows && head.empty_tiles[tile];
    if (cfg::whole_columns && first + cfg::block_m <= p.n_queries && !some_empty) {
        load_all_rows<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, first);
        load_all_rows<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, first);
    } else {
        auto seen = [&](int row) { return first + row < p.n_queries && !(some_empty && is_empty_row(stat[row])); };
        load_some_rows<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, first, p.head_dim, seen);
        load_some_rows<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, first, p.head_dim_v, seen);
    }
}

// Waits for the rows of `tile` and starts loading those of `next` (-1: none); meanwhile, line 21 for the tile before.
__device__ __forceinline__ void next_queries(u32 shared, const Params& p, const Head& head, i32 tile, i32 next, i32 before, int stage) {
    if constexpr (cfg::stages == 2) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this stage has arrived; the other one and P are free; dS of the tile before is complete
        if (next >= 0) load_queries(shared, p, head, next, stage ^ 1);
        ptx::cp_async_commit();
        if (cfg::atomic_dq && before >= 0) add_queries(shared, head.dq_acc, before, stage ^ 1);
    } else {
        __syncthreads();  // q, do and P are free; dS of the tile before is complete
        load_queries(shared, p, head, tile, 0);
        ptx::cp_async_commit();
        if (cfg::atomic_dq && before >= 0) add_queries(shared, head.dq_acc, before, 0);
        ptx::cp_async_wait<0>();
        __syncthreads();  // q and do have arrived; dS is free
    }
}

// Algorithm 4 lines 11-15, 17-20 for the rows of one tile; P and dS go to shared memory.
__device__ __forceinline__ void rows_to_shared(u32 shared, const Params& p, const Head& head, i32 tile, bool partial, int stage) {
    const int row = stage * cfg::block_m;
    const TileAddresses at = {shared + q_at + row * qk_stride, shared + k_at, shared + do_at + row * v_stride, shared + v_at,
                              shared + stat_at + stage * stat_bytes, shared + delta_at + stage * stat_bytes,
                              shared + p_at, shared + ds_at + row * p_stride};
    scores_to_shared<true>(at, p, head, tile * cfg::block_m, head.walk.first_key, partial);
}

// Algorithm 4 lines 16 and 22: dV += P^T dO or dK += dS^T Q, for the columns that this warp owns.
__device__ __forceinline__ void add_keys(KeyGradients& acc, u32 shared, const Slice& slice, int stage) {
    const u32 weights = shared + (slice.is_k ? ds_at + stage * cfg::block_m * p_stride : p_at) + slice.team * team_keys * int(sizeof(Elem));
    const u32 column = slice.column * int(sizeof(Elem));
    const u32 q = shared + q_at + stage * cfg::block_m * qk_stride + column, dout = shared + do_at + stage * cfg::block_m * v_stride + column;
    if constexpr (split_slices) {
        product<cfg::block_m, Along::rows, p_stride, Along::rows, qk_stride>(acc, weights, slice.is_k ? q : dout);
    } else if (slice.is_k) {
        product<cfg::block_m, Along::rows, p_stride, Along::rows, qk_stride>(acc, weights, q);
    } else {
        product<cfg::block_m, Along::rows, p_stride, Along::rows, v_stride>(acc, weights, dout);
    }
}

// Algorithm 4 line 24, first half: this warp's columns of dV or dK, over the tile of v or k.
__device__ __forceinline__ void keys_to_shared(u32 shared, KeyGradients& acc, const Slice& slice, Acc factor) {
#pragma unroll
    for (int m = 0; m < team_keys / 16; ++m)
#pragma unroll
        for (int n = 0; n < slice_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor;
    const u32 column = slice.column * int(sizeof(Elem)), key = slice.team * team_keys;
    if (slice.is_k)
        store_rounded<qk_stride, false>(shared + k_at + key * qk_stride + column, acc);
    else
        store_rounded<v_stride, false>(shared + v_at + key * v_stride + column, acc);
}

// Line 24 when a sum over axes that k or v was broadcast along is still to come: unrounded, straight to memory.
__device__ __forceinline__ void keys_to_accumulator(Acc* out, const KeyGradients& acc, const Slice& slice, i32 first_key, i32 n_keys, i32 columns, Acc factor) {
    const i32 lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < team_keys / 16; ++m)
#pragma unroll
        for (int n = 0; n < slice_tiles; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i64 key = first_key + slice.team * team_keys + 16 * m + i / 2 * 8 + lane / 4;
                const i32 column = slice.column + 8 * n + lane % 4 * 2 + i % 2;
                if (key < n_keys && column < columns) out[key * columns + column] = acc[m][n][i] * factor;
            }
}

__device__ __forceinline__ void store_keys(const unsigned char* memory, u32 shared, const Params& p, const Slice& slice, KeyGradients& acc) {
    const i32 flat_head = flat_kv_head(p), kv_head = flat_head % p.kv_heads;
    const BatchIndex index = batch_index(p, flat_head / p.kv_heads);
    const Acc factor = Acc(slice.is_k ? p.scale * p.dropout_scale : p.dropout_scale);
    const i32 first_key = key_tile(p) * cfg::block_n;
    const i64 flat = i64(flat_head) * p.n_keys;
    if (slice.is_k ? cfg::sum_dk : cfg::sum_dv) {
        Acc* out = static_cast<Acc*>(slice.is_k ? p.dk_acc : p.dv_acc) + flat * (slice.is_k ? p.head_dim : p.head_dim_v);
        keys_to_accumulator(out, acc, slice, first_key, p.n_keys, slice.is_k ? p.head_dim : p.head_dim_v, factor);
    }
    if (cfg::sum_dk && cfg::sum_dv) return;
    keys_to_shared(shared, acc, slice, factor);
    __syncthreads();  // dK and dV are complete
    if (!cfg::sum_dk) save_rows<cfg::block_n, cfg::head_dim>(memory + k_at, static_cast<Elem*>(p.dk.data) + slice_offset(p.dk, index, kv_head), p.dk.row, first_key, p.n_keys, p.head_dim);
    if (!cfg::sum_dv) save_rows<cfg::block_n, cfg::head_dim_v>(memory + v_at, static_cast<Elem*>(p.dv.data) + slice_offset(p.dv, index, kv_head), p.dv.row, first_key, p.n_keys, p.head_dim_v);
}

}  // namespace sm80

extern "C" __global__ void __launch_bounds__(sm80::threads, cfg::blocks_per_sm) attention_backward(const __grid_constant__ Params p) {
    using namespace sm80;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    const u32 shared = ptx::shared_address(memory);
    const Slice slice;
    KeyGradients acc;
    clear(acc);  // line 8

    for (i32 member = 0; member < p.group; ++member) {
        describe_group_member(head, p, member);
        __syncthreads();  // head is complete
        RowWalk walk(p, head.walk);
        if (!walk.next(p)) continue;
        load_keys(shared, p, head, walk.first_key());
        if constexpr (cfg::stages == 2) load_queries(shared, p, head, walk.tile, 0);
        ptx::cp_async_commit();

        i32 before = -1;  // row tile whose dS is still to be multiplied with K
        int stage = 0;
        for (i32 tile = walk.tile, next; tile >= 0; tile = next) {  // line 9
            const bool partial = walk.partial(p);
            next = walk.next(p) ? walk.tile : -1;
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
        __syncthreads();  // all of dS is complete, and nothing else of this head is read again
        if constexpr (cfg::atomic_dq) {
            add_queries(shared, head.dq_acc, before, (stage + 1) % cfg::stages);
            __syncthreads();  // k is free for the next head, or for dK
        }
    }
    store_keys(memory, shared, p, slice, acc);  // line 24
}
