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
// A row tile      S | dP    P, dS | dQ of the tile before    dV, dK      (two halves of the warps, where they take turns)
#include "ptx/barrier.cuh"
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_queries.cuh"
#include "sm80/bwd_scores.cuh"

namespace sm80 {

constexpr bool split_slices = cfg::head_dim == cfg::head_dim_v;
constexpr bool whole_slices = cfg::whole_columns && split_slices && slices / 2 * slice_columns == cfg::head_dim;  // no warp's columns end early
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

// Number of the block's tile.  From number p.shared_tile on, p.splits blocks share a tile: each takes p.split_tiles of the row tiles, and adds
// its dK and dV to zeros in memory.  Not kept in registers from one use to the next.
__device__ __forceinline__ i32 tile_number(const Params& p) {
    const i32 block = ptx::opaque(static_cast<i32>(blockIdx.x));
    return may_share && block > p.shared_tile ? p.shared_tile + (block - p.shared_tile) / p.splits : block;
}
__device__ __forceinline__ bool shares(const Params& p) { return may_share && static_cast<i32>(blockIdx.x) >= p.shared_tile; }
__device__ __forceinline__ i32 first_shared(const Params& p) { return (static_cast<i32>(blockIdx.x) - p.shared_tile) % p.splits * p.split_tiles; }
__device__ __forceinline__ i32 key_tile(const Params& p) { return tile_number(p) % p.key_tiles; }
__device__ __forceinline__ i32 flat_kv_head(const Params& p) { return tile_number(p) / p.key_tiles; }

// Describes query head number `member` of the block's group.
__device__ __forceinline__ void describe_group_member(Head& head, const Params& p, i32 member) {
    const i32 flat = flat_kv_head(p);
    describe_head(head, p, flat / p.kv_heads, flat % p.kv_heads * p.group + member);
    if (threadIdx.x != 0) return;
    describe_walk(head, p, key_tile(p));
    if (shares(p)) head.walk.end = min(head.walk.end, first_shared(p) + p.split_tiles);
}

__device__ __forceinline__ TileAt tile_k(u32 shared) { return {shared + k_at, shared + k_units_at}; }
__device__ __forceinline__ TileAt tile_v(u32 shared) { return {shared + v_at, shared + v_units_at}; }
__device__ __forceinline__ TileAt tile_q(u32 shared, int stage) {
    return {shared + q_at + stage * cfg::block_m * qk_stride, shared + q_units_at + stage * row_units};
}
__device__ __forceinline__ TileAt tile_do(u32 shared, int stage) {
    return {shared + do_at + stage * cfg::block_m * v_stride, shared + do_units_at + stage * row_units};
}
__device__ __forceinline__ TileAt tile_p(u32 shared) { return {shared + p_at, shared + p_units_at}; }
__device__ __forceinline__ TileAt tile_ds(u32 shared, int stage) {
    return {shared + ds_at + stage * cfg::block_m * p_stride, shared + ds_units_at + stage * weight_units};
}

// Algorithm 4 line 10.
__device__ __forceinline__ void load_queries(u32 shared, const Params& p, const Head& head, i32 tile, int stage) {
    load_row_tile(tile_q(shared, stage).tile, tile_do(shared, stage).tile, shared + stat_at + stage * row_numbers, p, head, tile);
}

__device__ __forceinline__ bool send_queries(u32 shared, const Params& p, const Head& head, i32 tile, int stage, u32 arrived) {
    return send_row_tile(tile_q(shared, stage).tile, tile_do(shared, stage).tile, shared + stat_at + stage * row_numbers, p, head, tile, arrived);
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

// Algorithm 4 lines 11-15, 17-20 for the rows of one tile; P and dS go to shared memory.
__device__ __forceinline__ void rows_to_shared(u32 shared, const Params& p, const Head& head, i32 tile, bool partial, int stage) {
    const WholeTiles tiles = {tile_q(shared, stage), tile_k(shared), tile_do(shared, stage), tile_v(shared), shared + exchange_at};
    const TilePlace at = {shared + stat_at + stage * row_numbers, tile * cfg::block_m, head.walk.first_key, partial};
    scores_to_shared<true>(tiles, at, p, head, tile_p(shared), tile_ds(shared, stage));
}

// acc += A^T B for a tile of weights and one of rows.  float64: ready() before the first of the weights is read, loaded() when the last of
// both are in registers.
template <int stride, class Ready, class Loaded>
__device__ __forceinline__ void add_rows(KeyGradients& acc, TileAt weights, TileAt rows, const Ready& ready, const Loaded& loaded) {
    if constexpr (sizeof(Elem) == 8) {
        constexpr int last = cfg::block_m / 8 - 1;
        const auto between = [&](int step) {
            if (step == last) loaded();
        };
        Product<Elem>::template run<cfg::block_m, Along::rows, p_stride, Along::rows, stride>(acc, weights, rows, ready, between);
    } else {
        product<cfg::block_m, Along::rows, p_stride, Along::rows, stride>(acc, weights, rows);
    }
}

// Algorithm 4 lines 16 and 22: dV += P^T dO or dK += dS^T Q, for the columns that this warp owns.
template <class Ready = Nothing, class Loaded = Nothing>
__device__ __forceinline__ void add_keys(KeyGradients& acc, u32 shared, const Slice& slice, int stage, const Ready& ready = {},
                                         const Loaded& loaded = {}) {
    const TileAt weights = part_of_weights(slice.is_k ? tile_ds(shared, stage) : tile_p(shared), 0, slice.team * team_keys);
    const TileAt q = part_of_rows<qk_stride>(tile_q(shared, stage), 0, slice.column);
    const TileAt dout = part_of_rows<v_stride>(tile_do(shared, stage), 0, slice.column);
    if constexpr (split_slices) add_rows<qk_stride>(acc, weights, slice.is_k ? q : dout, ready, loaded);
    else if (slice.is_k) add_rows<qk_stride>(acc, weights, q, ready, loaded);
    else add_rows<v_stride>(acc, weights, dout, ready, loaded);
}

// Over very many rows sums lose digits: after every cfg::flush_every row tiles (0: never) a warp adds its part of dV or dK to the result in
// memory, where nobody else adds, and starts anew.  This calls use(memory, sum) for all sums of a lane.
template <class Use>
__device__ __forceinline__ void visit_deposits(KeyGradients& acc, const Params& p, const Slice& slice, const Use& use) {
    const i32 own = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32, flat_head = flat_kv_head(p);
    const Operand& gradient = slice.is_k ? p.dk : p.dv;
    const bool summed = slice.is_k ? cfg::sum_dk : cfg::sum_dv;
    const i32 columns = slice.is_k ? p.head_dim : p.head_dim_v, first_column = slice.column + own % 4 * 2;
    const i64 stride = summed ? columns : gradient.row;
    Acc* const data = summed ? static_cast<Acc*>(slice.is_k ? p.dk_acc : p.dv_acc) + i64(flat_head) * p.n_keys * columns
                             : static_cast<Acc*>(gradient.data) + slice_offset(gradient, batch_index(p, flat_head / p.kv_heads), flat_head % p.kv_heads);
#pragma unroll
    for (int m = 0; m < team_keys / 16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i32 key = key_tile(p) * cfg::block_n + slice.team * team_keys + 16 * m + 8 * half + own / 4;
            __syncwarp();  // loads are not moved ahead of this, and their registers with them
            if (key >= p.n_keys) continue;  // its sums are never looked at
            Acc* const row = data + key * stride + first_column;
#pragma unroll
            for (int i = 0; i < 2 * slice_tiles; ++i) {
                const i32 column = i / 2 * 8 + i % 2;
                if (whole_slices || first_column + column < columns) use(row + column, acc[m][i / 2][2 * half + i % 2]);
            }
        }
}

__device__ __forceinline__ void start_deposits(KeyGradients& acc, const Params& p, const Slice& slice) {
    if (cfg::flush_every > 0 && !shares(p)) visit_deposits(acc, p, slice, [](Acc* at, Acc) { *at = 0; });
}

// Before row tile number `tile` of the block is added; group: of cfg::flush_every tiles, the one added to last, or -1.  Groups are the same for
// all masks.
__device__ __forceinline__ void deposit(KeyGradients& acc, const Params& p, const Slice& slice, i32& group, i32 tile) {
    if constexpr (cfg::flush_every > 0) {
        const i32 next = tile / cfg::flush_every;
        if (group >= 0 && group != next) {
            visit_deposits(acc, p, slice, [](Acc* at, Acc& sum) {
                ptx::red_add(at, sum);
                ptx::set_zero(sum);
            });
        }
        group = shares(p) ? -1 : next;  // a block that shares its keys has few rows
    }
}

__device__ __forceinline__ void finish_deposits(KeyGradients& acc, const Params& p, const Slice& slice) {
    if constexpr (cfg::flush_every > 0) visit_deposits(acc, p, slice, [](const Acc* at, Acc& sum) { sum += __ldcg(at); });
}

// The scale of dropout, and of dK.
__device__ __forceinline__ Acc last_factor(const Params& p, const Slice& slice) {
    return Acc(slice.is_k ? p.scale * p.dropout_scale : p.dropout_scale);
}

// Line 24 by a block that shares its keys.
__device__ __forceinline__ void add_shared(KeyGradients& acc, const Params& p, const Slice& slice) {
    scale_by(acc, last_factor(p, slice));
    visit_deposits(acc, p, slice, [](Acc* at, Acc sum) { ptx::red_add(at, sum); });
}

// This warp's columns of dV or dK, over the tile of v or k.
__device__ __forceinline__ void keys_to_shared(u32 shared, KeyGradients& acc, const Slice& slice, Acc factor) {
    scale_by(acc, factor);
    const u32 column = slice.column * int(sizeof(Elem)), key = slice.team * team_keys;
    if (slice.is_k)
        store_rounded<qk_stride, false>(shared + k_at + key * qk_stride + column, acc, cfg::head_dim - slice.column);
    else
        store_rounded<v_stride, false>(shared + v_at + key * v_stride + column, acc, cfg::head_dim_v - slice.column);
}

// Algorithm 4 line 24.  A sum over axes that k or v was broadcast along is still to come: then unrounded, to the workspace.
__device__ __forceinline__ void store_keys(const unsigned char* memory, u32 shared, const Params& p, const Slice& slice,
                                            KeyGradients& acc) {
    const i32 flat_head = flat_kv_head(p), kv_head = flat_head % p.kv_heads;
    const BatchIndex index = batch_index(p, flat_head / p.kv_heads);
    const Acc factor = last_factor(p, slice);
    const i32 first_key = key_tile(p) * cfg::block_n;
    const i64 flat = i64(flat_head) * p.n_keys;
    if (slice.is_k ? cfg::sum_dk : cfg::sum_dv) {
        const i32 columns = slice.is_k ? p.head_dim : p.head_dim_v;
        Acc* out = static_cast<Acc*>(slice.is_k ? p.dk_acc : p.dv_acc) + flat * columns;
        store_results(out, columns, acc, first_key + slice.team * team_keys, p.n_keys, slice.column, columns, factor);
    }
    if constexpr (!gradients_in_elements) {
        const Operand& gradient = slice.is_k ? p.dk : p.dv;
        if (!(slice.is_k ? cfg::sum_dk : cfg::sum_dv))
            store_results(static_cast<cfg::grad*>(gradient.data) + slice_offset(gradient, index, kv_head), gradient.row, acc,
                          first_key + slice.team * team_keys, p.n_keys, slice.column, slice.is_k ? p.head_dim : p.head_dim_v, factor);
        return;
    }
    if (cfg::sum_dk && cfg::sum_dv) return;
    keys_to_shared(shared, acc, slice, factor);
    __syncthreads();  // dK and dV are complete
    if (!cfg::sum_dk) {
        Elem* dk = static_cast<Elem*>(p.dk.data) + slice_offset(p.dk, index, kv_head);
        save_rows<cfg::block_n, cfg::head_dim>(memory + k_at, dk, p.dk.row, first_key, p.n_keys, p.head_dim);
    }
    if (!cfg::sum_dv) {
        Elem* dv = static_cast<Elem*>(p.dv.data) + slice_offset(p.dv, index, kv_head);
        save_rows<cfg::block_n, cfg::head_dim_v>(memory + v_at, dv, p.dv.row, first_key, p.n_keys, p.head_dim_v);
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
        deposit(acc, p, slice, group, first_tile + tile);
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

// What the two halves of the warps tell each other in walk_in_turns.  All but the first two barriers complete a phase with every row tile.
struct Signals {
    static constexpr int rows = 0, gradients = 2, weights = 3, keys = 4, count = 5;  // mbarriers: rows in a stage, dP, P and dS; all are used
    static constexpr u32 half = 32 * scores_warps;
    u32 barriers;  // shared address
    u32 tile;      // the row tile's number, odd or even
    u32 loads;     // of each stage, odd or even

    __device__ __forceinline__ void init() const {
        if (threadIdx.x != 0) return;
        for (int i = 0; i < count; ++i) ptx::mbarrier_init(at(i), i == keys ? threads : half);
        ptx::mbarrier_init_fence();
    }
    __device__ __forceinline__ u32 at(int signal) const { return barriers + 8 * signal; }
    __device__ __forceinline__ void give(int signal) const { ptx::mbarrier_arrive(at(signal)); }
    __device__ __forceinline__ void wait(int signal, u32 before = 0) const { ptx::mbarrier_wait(at(signal), (tile ^ before) & 1); }
    __device__ __forceinline__ void wait_rows(int stage) {
        ptx::mbarrier_wait(at(rows + stage), loads >> stage & 1);
        loads ^= 1u << stage;
    }
};

struct TurnHandover {
    const Signals& signals;
    bool first;  // row tile of a head

    __device__ __forceinline__ void before() const {
        if (!first) signals.wait(Signals::keys, 1);  // all are done with P and the row tile of before
    }
    __device__ __forceinline__ void done() const { signals.give(Signals::gradients); }
    __device__ __forceinline__ void wait() const { signals.wait(Signals::gradients); }
};

// The same by two halves of the warps.  Of one row tile a half computes S, and from it P and dS, while the other one computes dP, sends for
// the next row tile and adds dQ of the tile before.  Then each adds its part of dV and dK and goes on to the next tile, where they have
// changed places.  They wait for each other only where dP, P and dS change hands, so that there are nearly always products of two warps for
// each of the tensor cores: one warp's loads and exponentials leave gaps.
__device__ __forceinline__ void walk_in_turns(KeyGradients& acc, i32& group, Signals& signals, u32 shared, const Params& p, const Head& head,
                                              RowWalk& walk, const Slice& slice, i32 first_tile) {
    bool scores = threadIdx.x < Signals::half;
    ptx::cp_async_wait<0>();
    ptx::async_proxy_fence();  // the copy engine is next to write there
    __syncthreads();  // k, v and the first row tile have arrived
    i32 before = -1;
    int stage = 0;
    for (i32 tile = walk.tile, next; tile >= 0 || before >= 0; tile = next) {
        const bool more = tile >= 0;  // once more for dQ of the last tile
        const bool partial = more && walk.partial(p);
        next = more && walk.next(p) ? walk.tile : -1;
        if (more) deposit(acc, p, slice, group, first_tile + tile);
        if (more && before >= 0) signals.wait_rows(stage);
        const TilesInShared<TurnHandover> tiles = {tile_q(shared, stage), tile_k(shared), tile_do(shared, stage), tile_v(shared), shared + exchange_at,
                                                   {signals, before < 0}};
        if (!scores) {
            if (more) tiles.help();
            const bool sent = next < 0 || send_queries(shared, p, head, next, stage ^ 1, signals.at(Signals::rows + (stage ^ 1)));
            if (before >= 0) add_queries(shared, head.dq_acc, before, stage ^ 1);
            if (!sent) {
                finish_row_tile(tile_q(shared, stage ^ 1), tile_do(shared, stage ^ 1));
                ptx::async_proxy_fence();  // the copy engine may be next to write there
                signals.give(Signals::rows + (stage ^ 1));
            }
        } else if (more) {
            const TilePlace at = {shared + stat_at + stage * row_numbers, tile * cfg::block_m, head.walk.first_key, partial};
            score<true>(tiles, at, p, head, tile_p(shared), tile_ds(shared, stage));
            signals.give(Signals::weights);
        }
        before = tile;
        if (!more) break;
        const auto ready = [&] { signals.wait(Signals::weights); };
        const auto loaded = [&] {  // a condition found here keeps the signal from sinking behind the products
            if (ptx::opaque(tile) >= 0) signals.give(Signals::keys);
        };
        add_keys(acc, shared, slice, stage, ready, loaded);
        stage ^= 1;
        scores = !scores;
        ++signals.tile;
    }
    // Each half passes its own barrier as often as the other: racecheck counts the barriers that a thread has passed, and else takes what
    // __syncthreads parts for a race.
    if (scores && threadIdx.x >= Signals::half) ptx::barrier_sync(read_barrier, Signals::half);
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
    start_deposits(acc, p, slice);
    i32 group = -1;
    Signals signals = {ptx::shared_address(barriers), 0, 0};
    if constexpr (in_turns) signals.init();

    for (i32 member = 0; member < p.group; ++member) {
        describe_group_member(head, p, member);
        __syncthreads();  // head is complete
        RowWalk walk(p, head.walk);
        if (shares(p)) walk.tile = max(walk.tile, first_shared(p) - 1);
        if (!walk.next(p)) continue;
        if (!in_turns || threadIdx.x < number_loaders) {
            load_key_tile(shared + k_at, shared + v_at, p, head, walk.first_key(), true);  // line 7
            if constexpr (in_halves) finish_key_tile(tile_k(shared), tile_v(shared));
            if constexpr (cfg::stages == 2) load_queries(shared, p, head, walk.tile, 0);
        }
        ptx::cp_async_commit();
        if constexpr (in_turns) walk_in_turns(acc, group, signals, shared, p, head, walk, slice, member * p.row_tiles);
        else walk_together(acc, group, shared, p, head, walk, slice, member * p.row_tiles);
        __syncthreads();  // nothing of this head is read again
    }
    if (shares(p)) {
        add_shared(acc, p, slice);
        return;
    }
    finish_deposits(acc, p, slice);
    store_keys(memory, shared, p, slice, acc);  // line 24
}
