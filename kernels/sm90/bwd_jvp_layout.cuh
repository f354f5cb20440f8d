// What the gradients' kernel along tangents keeps in shared memory: the owner's rows with their tangents, and a ring of tiles of the other side.
#pragma once
#include "attn/row_walk.cuh"
#include "attn/tangents.cuh"
#include "sm90/tiles.cuh"

namespace sm90::moved {

// Whose gradients are summed: those of a key tile (dK and dV), or of a row tile (dQ).
constexpr bool keys_own = cfg::keys_own;
constexpr int warpgroups = 2, own_rows = 64 * warpgroups, streamed = keys_own ? cfg::block_m : cfg::block_n;
static_assert((keys_own ? cfg::block_n : cfg::block_m) == own_rows);

// Does a launch that owns keys add up dQ. in memory, too?  dX of a warpgroup's 64 keys and so many queries are slabs in one of two
// buffers then.
constexpr bool one_pass = cfg::one_pass;
constexpr int slab_bytes = streamed * row_bytes, slabs_bytes = one_pass ? 2 * warpgroups * slab_bytes : 0;
static_assert(!one_pass || (keys_own && streamed == 64 && slabs == 1));

// A bias hides as masks do, and so does a function of the scores.
constexpr bool told_by_scores = cfg::bias || cfg::score, may_hide = !unmasked || told_by_scores;
constexpr bool moved_dp = cfg::tv || cfg::tdo;  // has dP a tangent?
constexpr int threads = 128 * (warpgroups + 1);
constexpr int producer_registers = cfg::mask == kMaskNone ? 24 : block_mask ? 56 : 40;
constexpr int consumer_registers = (504 - producer_registers) / 16 * 8;

// Offsets in bytes of q, q., do, do. (or k, k., v, v.) among the rows of a side; every tile starts on a multiple of 1024.
template <bool of_keys, int rows>
struct Side {
    static constexpr bool moved = of_keys ? cfg::tk : cfg::tq, moved_v = of_keys ? cfg::tv : cfg::tdo;
    static constexpr int x_bytes = slabs * rows * row_bytes, v_bytes = slabs_v * rows * row_bytes;
    static constexpr int tx_at = x_bytes, v_at = tx_at + (moved ? x_bytes : 0), tv_at = v_at + v_bytes;
    static constexpr int bytes = tv_at + (moved_v ? v_bytes : 0);
};
using OwnSide = Side<keys_own, own_rows>;
using StreamSide = Side<!keys_own, streamed>;

// Five numbers of every row (kernels/sm90/bwd_jvp_rows.cu): [head][cfg::unit rows][number][row], padded to whole tiles of 128 rows.
enum Number { maximum, exponent, delta, moved_delta, mean, numbers };
constexpr int numbers_bytes = keys_own ? numbers * streamed * 4 : 0;
static_assert(!keys_own || streamed == cfg::unit);

__device__ __forceinline__ const float* numbers_of(const TangentParams& p, i32 flat, i32 row) {
    const i64 padded = (p.n_queries + 127) / 128 * 128;
    return static_cast<const float*>(p.rows) + (flat * padded + row / cfg::unit * cfg::unit) * numbers + row % cfg::unit;
}

// A streamed tile, as it travels.
struct alignas(16) Step {
    i32 number;  // negative: there are no more
    i32 head;    // of q
    i32 flags;
    static constexpr i32 partial_bit = 1;
    __device__ __forceinline__ bool partial() const { return flags & partial_bit; }  // elements must be tested
};

struct Work {
    i32 tile, head, batch;  // of the owner
    i32 part;               // of the first tile, by tiles of the other side

    __device__ __forceinline__ bool in_parts() const { return cfg::first_parts > 1 && tile == 0; }
    // Where the part begins, or with 1 more ends, among so many tiles of the other side.
    __device__ __forceinline__ i32 first_of(i32 tiles, i32 more = 0) const { return tiles * (part + more) / cfg::first_parts; }
};

constexpr int stage_bytes = StreamSide::bytes, slabs_at = OwnSide::bytes + cfg::stages * stage_bytes, numbers_at = slabs_at + 2 * slabs_bytes;
constexpr int steps_at = numbers_at + cfg::stages * numbers_bytes, barriers_at = steps_at + cfg::stages * int(sizeof(Step));
constexpr int walk_at = (barriers_at + 8 * (3 * cfg::stages + 2) + 15) / 16 * 16;
constexpr int shared_bytes = walk_at + int(keys_own ? sizeof(WalkTables) : sizeof(MaskPlace));

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 own() const { return address; }
    __device__ __forceinline__ u32 stage(u32 number) const { return address + OwnSide::bytes + number * stage_bytes; }
    __device__ __forceinline__ Step& step(u32 number) const { return at<Step>(steps_at, number); }
    __device__ __forceinline__ u32 full(u32 number) const { return address + barriers_at + 8 * number; }
    __device__ __forceinline__ u32 empty(u32 number) const { return full(cfg::stages + number); }
    // Where a tile arrives: what it holds of keys or rows that are never seen becomes zero before it counts as full.
    __device__ __forceinline__ u32 raw(u32 number) const { return may_hide ? full(2 * cfg::stages + number) : full(number); }
    __device__ __forceinline__ u32 own_full() const { return full(3 * cfg::stages); }
    __device__ __forceinline__ u32 own_raw() const { return full(3 * cfg::stages + (one_pass && may_hide)); }
    // A warpgroup's dX. and dX.
    __device__ __forceinline__ u32 own_slabs(u32 warpgroup, u32 buffer) const { return address + slabs_at + buffer * slabs_bytes + 2 * warpgroup * slab_bytes; }
    __device__ __forceinline__ WalkTables& walk() const { return at<WalkTables>(walk_at); }
    __device__ __forceinline__ MaskPlace& place() const { return at<MaskPlace>(walk_at); }
    __device__ __forceinline__ const float2* row_numbers(u32 number) const { return &at<const float2>(numbers_at + number * numbers_bytes); }
};

struct Maps {
    const ptx::TensorMap &q, &k, &v, &dout, &tq, &tk, &tv, &tdo;
};

__device__ __forceinline__ MaskSlices mask_slices(const Params& p, i32 batch, i32 head) {
    return {cfg::mask != kMaskNone ? slice_of(p.table, batch, head) : 0, block_mask ? slice_of(p.mask, batch, head) : 0,
            boolean_mask ? slice_of(p.boolean, batch, head) : 0, function_mask ? static_cast<i32>(slice_of(p.function, batch, head)) : 0};
}

}  // namespace sm90::moved
