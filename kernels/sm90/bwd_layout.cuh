// What the backward kernel keeps in shared memory, and the numbers that follow from the configuration.
#pragma once
#include "attn/bwd_workspace.cuh"
#include "attn/diagonals.cuh"
#include "attn/row_walk.cuh"
#include "sm90/split_bias.cuh"
#include "sm90/tiles.cuh"

namespace sm90::bwd {

constexpr int warpgroups = 2;  // consumers

// A bias hides as masks do, and so does a function of the scores.
constexpr bool may_hide_rows = may_have_empty_rows || cfg::bias || cfg::score, may_hide_keys = may_have_dead_keys || cfg::bias_keys;

// Two ways to share a key tile's work.  By keys: 64 for each warpgroup, and dQ is computed as well, unless heads are wide (sm90/bwd_keys.cuh).
// By function, for the widest: both have the same 64 keys, one computes P and dV, the other dS and dK.  What computes no dQ leaves it to
// sm90/bwd_rows.cu.
constexpr bool by_function = cfg::block_n == 64, dq_elsewhere = by_function || slabs > 2;
static_assert(by_function || cfg::block_n == 64 * warpgroups);

// Warps that draw what dropout drops (sm90/bwd_draws.cuh): a warpgroup of their own, or those that would reduce dQ.
constexpr int drawers = !cfg::dropout ? 0 : by_function ? 2 : 4;
constexpr int drawing_warpgroups = drawers / 4;
constexpr int threads = 128 * (warpgroups + 1 + drawing_warpgroups);
constexpr bool sums_diagonals = cfg::dbias == kDbiasDiagonals;  // the reducers do (sm90/bwd_diagonals.cuh)

// dQ of a row tile is shared out by rows where there are enough of them, else by columns.
constexpr bool dq_by_rows = cfg::block_m == 128;
constexpr int dq_columns = !dq_by_rows ? 64 * slabs / warpgroups : cfg::head_dim <= 32 ? 32 : 64 * slabs;
constexpr int dq_part_bytes = 64 * dq_columns * 4;  // one warpgroup's part, float32
// Of the last warpgroup's columns those behind the head dimension are not added up.
constexpr int dq_last_columns = !dq_by_rows && !by_function && slabs == 2 ? cfg::head_dim - dq_columns : dq_columns;
constexpr int dq_bytes = (warpgroups - 1) * dq_part_bytes + 64 * dq_last_columns * 4;
__device__ __forceinline__ int own_dq_columns(u32 warpgroup) { return warpgroup == warpgroups - 1 ? dq_last_columns : dq_columns; }
static_assert(dq_by_rows || cfg::block_m == 64);
static_assert(!dq_by_rows || !by_function);

// Few rows: a block goes through all key tiles of a head, and sums dQ of its row tiles in shared memory, each thread its own elements, in order.
// Few keys: those of one key tile are all that a row sees, so that its dQ leaves at once.
constexpr bool dq_held = cfg::dq_tiles > 0, dq_whole = !dq_elsewhere && !cfg::atomic_dq;
constexpr int held_bytes = cfg::dq_tiles * warpgroups * dq_part_bytes;
static_assert(!dq_held || (dq_by_rows && dq_whole));

// Sums of 64 columns leave room for one buffer of dS, and for none of what would be handed on.
constexpr int ds_stages = dq_held && dq_columns == 64 ? 1 : 2;

// Who makes dQ in its buffer visible to the copy engine: the reducer, or (faster with 64 rows) each warp that wrote it.
constexpr bool reducer_fences = dq_by_rows;

constexpr int k_bytes = slabs * cfg::block_n * row_bytes;
constexpr int v_bytes = slabs_v * cfg::block_n * row_bytes;
constexpr int q_bytes = slabs * cfg::block_m * row_bytes;
constexpr int do_bytes = slabs_v * cfg::block_m * row_bytes;
constexpr int ds_bytes = dq_elsewhere ? 0 : warpgroups * cfg::block_m * row_bytes;  // a slab per 64 keys
// What a warpgroup hands on: its part of dQ to a reducer warp, or (two buffers) float32 P to the other warpgroup.
constexpr int handed_bytes = by_function ? 64 * cfg::block_m * 4 : dq_elsewhere ? 32 * cfg::block_m * 4 : dq_part_bytes, handed_stages = ds_stages == 1 ? 0 : 2;
constexpr int numbers_bytes = cfg::block_m * 4;                  // stat or delta of a row tile
// A split delta's parts are the first rows of 128 bytes of an operand of eight, of which the others remain zero.
constexpr int delta_bytes = cfg::split_delta ? kDeltaParts * row_bytes : numbers_bytes;  // that arrive
constexpr int delta_stride = cfg::split_delta ? 8 * row_bytes : numbers_bytes;
constexpr int draws_bytes = drawers ? cfg::block_m * cfg::block_n / 8 : 0;  // a bit per element

// A tile of the bias arrives where dS will be.
constexpr int bias_bytes = cfg::bias_tiles ? ds_bytes : 0;
static_assert(!cfg::bias_tiles || (!by_function && ds_stages == 2 && sizeof(cfg::bias_elem) == 2));

// Offsets in bytes; every tile starts on a multiple of 1024.
constexpr int k_at = 0;
constexpr int k_stages = by_function ? 1 : 2;  // the next key tile arrives while this one is worked on
constexpr int v_at = k_at + k_stages * (by_function && v_bytes > k_bytes ? v_bytes : k_bytes);  // the gradients leave through both
constexpr int q_at = v_at + (by_function && k_bytes > v_bytes ? k_bytes : v_bytes);
constexpr int do_at = q_at + cfg::stages * q_bytes;
constexpr int ds_at = do_at + cfg::stages * do_bytes;
constexpr int handed_at = ds_at + ds_stages * ds_bytes;
constexpr int held_at = handed_at + handed_stages * handed_bytes;
constexpr int delta_at = held_at + held_bytes;
constexpr int stat_at = delta_at + cfg::stages * delta_stride;
constexpr int draws_at = stat_at + cfg::stages * numbers_bytes;
// Tensor cores add what an affine function leaves to rows, too, where these are consecutive.
constexpr bool splits_rows = cfg::row_offsets && !cfg::runs;
// Ones, numbers: of eight rows of a tile each as 16 bytes, of the next eight behind them.  As eight such units, of which all but the first two are
// those of later rows, they are what tensor cores multiply to add such numbers to scores, and dS to sum it over rows (sm90/bwd_sums.cuh).
constexpr int counting_bytes = (cfg::block_m / 8 + 3) * 32;
constexpr bool counts = cfg::dbias >= kDbiasWeighted;
// Below delta's parts there is room for what multiplies those of a bias, and for what dS is multiplied with.
static_assert(!splits || !by_function);
static_assert(!cfg::split_delta || counting_bytes <= 4 * row_bytes);
constexpr int own_halves_bytes = !splits ? 0 : splits_rows ? counting_bytes : halves_bytes;
constexpr int own_halves_at = draws_at + draws_bytes, halves_at = cfg::split_delta ? delta_at + 4 * row_bytes : own_halves_at;
constexpr int own_counting_at = own_halves_at + (cfg::split_delta ? 0 : own_halves_bytes);
constexpr int counting_at = cfg::split_delta ? halves_at + delta_stride : own_counting_at;
// The parts themselves are fragments in registers, or in shared memory where tiles leave room.
constexpr bool parts_held = slabs > 1 || slabs_v > 1 || splits_rows;
constexpr int parts_at = own_counting_at + (counts && !cfg::split_delta ? counting_bytes : 0);
constexpr int barriers_at = parts_at + (splits && !parts_held ? part_bytes * cfg::block_n : 0);

enum Barrier {
    k_full,
    k_empty = k_full + k_stages,
    v_full = k_empty + k_stages,
    v_empty,
    q_full,
    q_empty = q_full + cfg::stages,
    do_full = q_empty + cfg::stages,
    do_empty = do_full + cfg::stages,
    handed = do_empty + cfg::stages,
    taken = handed + 2,
    foretold = taken + 2,  // + stage: where the next dQ belongs
    raw_full = foretold + 2,  // tiles that must be cleaned before they count as full
    raw_empty,
    draws_told,  // which row tile to draw for; + stage
    draws_full = draws_told + (drawers ? cfg::stages : 0),
    draws_empty = draws_full + (drawers ? cfg::stages : 0),
    ds_empty = draws_empty + (drawers ? cfg::stages : 0),  // nobody sums its diagonals any more; + stage
    barrier_count = ds_empty + (sums_diagonals ? cfg::stages : 0)
};

// A key tile as the producer announces it.
struct alignas(16) Work {
    i32 tile;         // number of the key tile; negative: there is no further work
    i32 head, batch;  // of k and v, or of a part (below)
    i32 flags;        // and behind them the number of a slice
    static constexpr int slice_at = 8;
    static constexpr i32 seen_bit = 1, dead_bit = 2, odd_bit = 4, sunk_bit = 8, hides_bit = 16, sliced_bit = 32;
    __device__ __forceinline__ bool seen() const { return flags & seen_bit; }  // by some row
    __device__ __forceinline__ bool dead() const { return flags & dead_bit; }  // masks hide some key of it from every row of the first head
    __device__ __forceinline__ bool odd() const { return flags & odd_bit; }    // the producer's own: where it noted the head of its last step
    __device__ __forceinline__ bool sunk() const { return flags & sunk_bit; }  // the same: the head's bias sinks or hides all of its keys
    __device__ __forceinline__ bool hides() const { return flags & hides_bit; }  // the same: it hides some of them
    __device__ __forceinline__ bool sliced() const { return cfg::tail && flags & sliced_bit; }  // dK and dV are those of one of p.split_tiles slices
    __device__ __forceinline__ i32 slice() const { return flags >> slice_at; }
};

// Where key tiles alone would leave multiprocessors without work, several blocks share each (cfg::in_parts): p.splits parts, of which each has
// p.group of the query heads that share k and v, or one of p.split_tiles slices of one's rows.  p.kv_heads counts parts, Work::head those that
// differ in heads.  dK and dV go to the workspace, unrounded: added up there as they come, or each part's its own (sm90/bwd_add_parts.cu).
constexpr bool adds_parts = cfg::in_parts && !cfg::deterministic;
__device__ __forceinline__ i32 key_head(const Params& p, const Work& work) {
    return cfg::in_parts ? work.head * p.split_tiles / p.splits : work.head;
}
// Of dK and dV.
__device__ __forceinline__ i32 key_slice(const Params& p, const Work& work) {
    const i32 head = cfg::in_parts ? work.head * p.split_tiles + work.slice() : work.head, slice = work.batch * p.kv_heads + head;
    return adds_parts ? slice / p.splits : slice;
}
__device__ __forceinline__ void* key_gradient(const Operand& gradient, void* parts) { return cfg::in_parts ? parts : gradient.data; }
__device__ __forceinline__ void* key_gradient(const Operand& gradient, void* parts, const Work& work) {
    return work.sliced() ? parts : key_gradient(gradient, parts);
}

// Of key tiles of equal length a last round would leave most multiprocessors without work.  So those of it, from number p.shared_tile on, are
// shared by p.split_tiles blocks each (cfg::tail): slices of rows, whose dK and dV go to the workspace unrounded, [slice][warpgroup] in the
// order of the registers; sm90/bwd_convert.cuh adds them up in order.
__device__ __forceinline__ i32 tile_number(const Params& p, const Work& work) {
    return (work.batch * p.kv_heads + work.head) * p.key_tiles + work.tile;
}

// A row tile as the producer finds it, packed into one register.
struct StepCode {
    i32 code;
    static constexpr i32 partial_bit = 1, last_bit = 2, dirty_bit = 4, odd_bit = 8, far_bit = 16, first_bit = 32;
    __device__ __forceinline__ static StepCode none() { return {-1}; }
    __device__ __forceinline__ bool exists() const { return code >= 0; }
    __device__ __forceinline__ i32 m() const { return code >> 6; }
    __device__ __forceinline__ bool partial() const { return code & partial_bit; }  // elements must be tested
    __device__ __forceinline__ bool first() const { return code & first_bit; }      // of its key tile
    __device__ __forceinline__ bool last() const { return code & last_bit; }
    __device__ __forceinline__ bool dirty() const { return code & dirty_bit; }      // some row of it sees nothing: its q and do may be NaN
    __device__ __forceinline__ bool odd() const { return code & odd_bit; }          // which of two notes its head has
    __device__ __forceinline__ bool far() const { return code & far_bit; }      // some row of it is (attn/bwd_workspace.cuh); partial, too
};

// A row tile as it travels with its buffers of q and do.
struct alignas(16) Step : StepCode {
    i32 head;     // of q and do
    i32 dq_tile;  // its place in the accumulator of dq, in row tiles
};

// What the producer looks up of one query head; two of them, since it looks ahead.
struct HeadPlace {
    i32 head, first_dq_tile;
    i32 flat;  // number of the head, batches counted in
};

// To a reducer: where the dQ of a row tile belongs that is about to be computed.
struct DqPlace {
    i32 tile;  // in the accumulator, in row tiles; negative: no more work
    i32 m, n, head, batch;
};

// To the drawers: the tile that is drawn for next.
struct alignas(16) DrawPlace {
    i32 n;  // number of the key tile; negative: no more work
    i32 m;
    u32 batch;  // of the random stream
};

struct Maps {
    const ptx::TensorMap &q, &k, &v, &dout, &dk, &dv, &bias, &dbias;
};

// To the cleaner: which tiles have just arrived raw.  Stage: of q and do; keys_stage - i: v and k in buffer i; done_stage: no
// more work.
struct alignas(16) Mail {
    static constexpr i32 keys_stage = -1, done_stage = -9;
    i32 stage;
    Work work;
};

constexpr int work_at = (barriers_at + 8 * barrier_count + 15) / 16 * 16;
constexpr int draw_places_at = work_at + k_stages * int(sizeof(Work));
constexpr int steps_at = draw_places_at + (drawers ? cfg::stages * int(sizeof(DrawPlace)) : 0);
constexpr int mail_at = steps_at + cfg::stages * int(sizeof(Step));
constexpr int walk_at = mail_at + int(sizeof(Mail));
constexpr int pending_at = walk_at + int(sizeof(WalkTables));
constexpr int heads_at = pending_at + int(sizeof(Work));
constexpr int dq_places_at = heads_at + 2 * int(sizeof(HeadPlace));
constexpr int used_bytes = dq_places_at + 2 * int(sizeof(DqPlace));
// The eight rows that hold delta's parts are read twice, as sixteen; compute-sanitizer takes the second time for what follows them.
constexpr int shared_bytes = cfg::split_delta ? (used_bytes + delta_stride - 1) / delta_stride * delta_stride : used_bytes;

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 barrier(int number) const { return address + barriers_at + 8 * number; }
    __device__ __forceinline__ u32 k(u32 stage) const { return address + k_at + stage * k_bytes; }
    __device__ __forceinline__ u32 v() const { return address + v_at; }
    __device__ __forceinline__ u32 q(u32 stage) const { return address + q_at + stage * q_bytes; }
    __device__ __forceinline__ u32 dout(u32 stage) const { return address + do_at + stage * do_bytes; }
    __device__ __forceinline__ u32 ds(u32 buffer) const { return address + ds_at + (ds_stages == 1 ? 0 : buffer) * ds_bytes; }
    __device__ __forceinline__ u32 handed_on(u32 buffer) const { return address + handed_at + buffer * handed_bytes; }
    __device__ __forceinline__ u32 halves() const { return address + halves_at; }
    __device__ __forceinline__ u32 counting() const { return address + counting_at; }
    // Of the warpgroup's keys.
    __device__ __forceinline__ u32 parts(u32 warpgroup) const { return address + parts_at + 64 * part_bytes * warpgroup; }
    __device__ __forceinline__ u32 held(i32 m, u32 warpgroup) const { return address + held_at + (m * warpgroups + warpgroup) * dq_part_bytes; }
    __device__ __forceinline__ u32 stat(u32 stage) const { return address + stat_at + stage * numbers_bytes; }
    __device__ __forceinline__ u32 delta(u32 stage) const { return address + delta_at + stage * delta_stride; }
    // Of the buffer of k with this number.
    __device__ __forceinline__ Work& work(u32 stage) const { return at<Work>(work_at, stage); }
    __device__ __forceinline__ Step& step(u32 stage) const { return at<Step>(steps_at, stage); }
    __device__ __forceinline__ Mail& mail() const { return at<Mail>(mail_at); }
    // The key tile that the producer is at; `work` is the one that the consumers are at.
    __device__ __forceinline__ Work& pending() const { return at<Work>(pending_at); }
    __device__ __forceinline__ WalkTables& walk() const { return at<WalkTables>(walk_at); }
    __device__ __forceinline__ HeadPlace& head(bool odd) const { return at<HeadPlace>(heads_at, odd); }
    __device__ __forceinline__ DqPlace& dq_place(u32 stage) const { return at<DqPlace>(dq_places_at, stage); }
    __device__ __forceinline__ DrawPlace& draw_place(u32 stage) const { return at<DrawPlace>(draw_places_at, stage); }
    // What is kept of 64 rows and 16 keys for a lane of the warp that works on them; both counted in such blocks.
    __device__ __forceinline__ u32& draws(u32 rows, u32 keys, u32 lane) const {
        return at<u32>(draws_at, (rows * (cfg::block_n / 16) + keys) * 32 + lane);
    }
};

}  // namespace sm90::bwd
