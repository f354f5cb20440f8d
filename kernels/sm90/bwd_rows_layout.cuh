// What the row kernel of the backward keeps in shared memory.
#pragma once
#include "attn/mask.cuh"
#include "sm90/tiles.cuh"

namespace sm90::rows {

constexpr int warpgroups = cfg::block_m / 64;  // consumers: 64 query rows each

// A bias hides as masks do, and so does a function of the scores.
constexpr bool may_hide_rows = may_have_empty_rows || cfg::bias || cfg::score, may_hide_keys = may_have_dead_keys || cfg::bias_keys;
constexpr int threads = 128 * (warpgroups + 1);
// A wide tile leaves the producer few; walking blocks takes many.
constexpr int producer_registers = cfg::head_dim > 128 && cfg::block_n == 64 ? 24 : cfg::mask == kMaskBlock ? 56 : 40;
constexpr int consumer_registers = (504 - producer_registers) / 2;
static_assert(warpgroups == 2);

constexpr int q_bytes = slabs * cfg::block_m * row_bytes;
constexpr int do_bytes = slabs_v * cfg::block_m * row_bytes;
constexpr int k_bytes = slabs * cfg::block_n * row_bytes;
constexpr int v_bytes = slabs_v * cfg::block_n * row_bytes;

// Offsets in bytes; every tile starts on a multiple of 1024.
constexpr int q_at = 0;
constexpr int do_at = q_at + q_bytes;
constexpr int k_at = do_at + do_bytes;
constexpr int v_at = k_at + cfg::stages * k_bytes;
constexpr int numbers_bytes = cfg::block_m * 4;  // stat or delta of the rows
constexpr int stat_at = v_at + cfg::v_stages * v_bytes;
constexpr int delta_at = stat_at + numbers_bytes;
constexpr int barriers_at = delta_at + numbers_bytes;

enum Barrier {
    rows_full,   // q and do
    rows_empty,  // dQ has left through the buffer of q
    k_full,
    k_empty = k_full + cfg::stages,
    v_full = k_empty + cfg::stages,
    v_empty = v_full + cfg::v_stages,
    raw_full = v_empty + cfg::v_stages,  // tiles that must be cleaned before they count as full
    raw_empty,
    barrier_count
};

// A row tile as the producer announces it.
struct alignas(16) Work {
    i32 tile;         // number of the row tile; negative: there is no further work
    i32 head, batch;  // of q and do
    i32 steps;        // 0: it sees no key
};

// A key tile as it travels with its buffer of k.
struct Step {
    i32 code;
    static constexpr i32 partial_bit = 1, last_bit = 2, far_bit = 4;
    __device__ __forceinline__ i32 n() const { return code >> 3; }
    __device__ __forceinline__ bool partial() const { return code & partial_bit; }  // elements must be tested
    __device__ __forceinline__ bool last() const { return code & last_bit; }        // of its row tile
    __device__ __forceinline__ bool far() const { return code & far_bit; }          // some row is (attn/bwd_workspace.cuh); partial, too
};

// To the cleaner: a key tile that has just arrived raw.  Negative stage: no more work.
struct Mail {
    i32 k_stage, v_stage, n;
    i64 instance;  // with cfg::bias_keys the number of the head, batches counted in, stands in its high half
};

constexpr int work_at = (barriers_at + 8 * barrier_count + 15) / 16 * 16;
constexpr int place_at = work_at + int(sizeof(Work));
constexpr int mail_at = place_at + int(sizeof(MaskPlace));
constexpr int steps_at = mail_at + int(sizeof(Mail));
constexpr int shared_bytes = steps_at + 4 * cfg::stages;

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 barrier(int number) const { return address + barriers_at + 8 * number; }
    __device__ __forceinline__ u32 q() const { return address + q_at; }
    __device__ __forceinline__ u32 dout() const { return address + do_at; }
    __device__ __forceinline__ u32 k(u32 stage) const { return address + k_at + stage * k_bytes; }
    __device__ __forceinline__ u32 v(u32 stage) const { return address + v_at + stage * v_bytes; }
    __device__ __forceinline__ const float* stat() const { return &at<const float>(stat_at); }
    __device__ __forceinline__ const float* delta() const { return &at<const float>(delta_at); }
    __device__ __forceinline__ Work& work() const { return at<Work>(work_at); }
    __device__ __forceinline__ MaskPlace& place() const { return at<MaskPlace>(place_at); }
    __device__ __forceinline__ Mail& mail() const { return at<Mail>(mail_at); }
    __device__ __forceinline__ Step& step(u32 stage) const { return at<Step>(steps_at, stage); }
};

}  // namespace sm90::rows
