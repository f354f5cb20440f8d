// What the forward kernel keeps in shared memory, and the numbers that follow from the configuration.
#pragma once
#include "attn/mask_format.cuh"
#include "ptx/registers.cuh"
#include "sm90/split_bias.cuh"
#include "sm90/tiles.cuh"

namespace sm90::fwd {

constexpr int warpgroups = cfg::block_m / 64;  // consumers: 64 query rows each
constexpr int threads = 128 * (warpgroups + 1);
// Registers of a thread, in units of 8, as blocks that share a multiprocessor get them; the producer's warps give up theirs.
constexpr int launched_registers = (1 << 16) / (threads * cfg::min_blocks) / 8 * 8;
constexpr int producer_registers = warpgroups == 1 ? 24 : warpgroups == 2 && cfg::min_blocks == 1 ? 40 : 32;
constexpr int consumer_registers = (launched_registers * (warpgroups + 1) - producer_registers) / warpgroups / 8 * 8;

// Rows and keys that see nothing and nobody sees, also because of the bias.
constexpr bool may_hide_rows = may_have_empty_rows || cfg::bias || cfg::score, may_hide_keys = may_have_dead_keys || cfg::bias_keys;

// Short rows of three warpgroups do best with the plainest steps.
constexpr bool plain = !cfg::overlap && cfg::dropout == 0;
// Else no key tile is hidden, only a row's first one, where its keys end, may be cut, and tiles are counted, not told.
constexpr bool later_tiles_vary = !(unmasked || cfg::diagonal) || plain;
constexpr bool told_bias = cfg::split_bias && later_tiles_vary;  // each tile is asked whether its bias hides keys; else only where scores are not settled
constexpr bool keys_are_read = later_tiles_vary || cfg::bias_tiles || (cfg::bias_keys && !cfg::split_bias);  // by all threads, in what comes with them
// What comes with keys beside them is another warp's work: all that the producer does, two warps of consumers of its scheduler wait for.
constexpr bool has_companion = splits || cfg::bias_tiles;
// A tile's tangent, where there is one, lies behind it; so does the output's.
constexpr bool has_tangents = cfg::moves || cfg::tv;
constexpr int q_part = slabs * cfg::block_m * row_bytes, q_bytes = (1 + cfg::tq) * q_part;
constexpr int k_part = slabs * cfg::block_n * row_bytes, k_bytes = (1 + cfg::tk) * k_part;
constexpr int v_part = slabs_v * cfg::block_n * row_bytes, v_bytes = (1 + cfg::tv) * v_part;
constexpr int o_part = slabs_v * cfg::block_m * row_bytes, o_bytes = (1 + has_tangents) * o_part;
constexpr int bias_slabs = cfg::bias_tiles ? (cfg::block_n + 63) / 64 : 0;
constexpr int bias_bytes = bias_slabs * cfg::block_m * row_bytes;
constexpr int cols_bytes = column_masks > 0 ? cfg::block_n * 16 : 0;  // intervals of a partial tile's keys
constexpr int bits_part = cfg::block_n * 8, bits_bytes = boolean_mask ? warpgroups * bits_part : 0;  // which of its rows see them; of a warpgroup's

// The output leaves through the queries' buffer: a warpgroup has then read its rows of q for the last time.
constexpr bool stage_output = sizeof(cfg::out) == 2;  // float32 is written from registers
constexpr int q_buffer_bytes = stage_output && o_bytes > q_bytes ? o_bytes : q_bytes;

// The bias of a tile's keys.
struct alignas(16) KeyBias {
    float of[cfg::block_n];
    float hides;  // 1 where some is -inf
};

// Offsets in bytes; every tile starts on a multiple of 1024.
constexpr int q_at = 0;
constexpr int k_at = q_at + cfg::q_stages * q_buffer_bytes;
constexpr int v_at = k_at + cfg::stages * k_bytes;
constexpr int bias_tiles_at = v_at + cfg::stages * v_bytes;
constexpr int cols_at = bias_tiles_at + cfg::stages * bias_bytes;
constexpr int bits_at = cols_at + cfg::stages * cols_bytes;
constexpr int key_bias_at = bits_at + cfg::stages * bits_bytes;
constexpr int key_bias_bytes = splits ? part_bytes * cfg::block_n : cfg::bias_keys ? static_cast<int>(sizeof(KeyBias)) : 0;
constexpr int halves_at = key_bias_at + (splits ? 2 : 1) * cfg::stages * key_bias_bytes;
constexpr int barriers_at = halves_at + (splits ? halves_bytes : 0);

enum Barrier {
    q_full,
    q_empty = q_full + cfg::q_stages,
    k_full = q_empty + cfg::q_stages,
    k_empty = k_full + cfg::stages,
    v_full = k_empty + cfg::stages,
    v_empty = v_full + cfg::stages,
    raw_full = v_empty + cfg::stages,  // a tile of v that must be cleaned before it counts as full
    raw_empty,
    list_full,  // the planner's list of key tiles
    list_empty,
    barrier_count
};

// A row tile as the planner announces it, one per buffer of q.
struct alignas(16) Work {
    i32 row;          // first query row
    i32 head, batch;  // of q and o; negative head: there is no further work
    i32 instance;     // of the mask; where tiles are counted and rows' keys differ, the first one counted and, << 24 (cfg::split: << 16), the last one
};

// Which part of its row tile's keys it has, of how many (0: whatever they are, it is whole), and the number of the row tile, of those in parts; of its head, where only the first row tile has parts.
struct alignas(16) Part {
    i32 number, count, tile;
};

// A key tile as it travels to the consumers, with its buffer of k.
struct KeyTile {
    u32 code;  // number (of tiles there are fewer than 2^24, or 2^22 where the bias is made of parts or warpgroups are four, 2^21 where both) and, in the low bits, what the consumers must know
    static constexpr int most = warpgroups > 3 ? warpgroups : 3, flags = 2 * most + 2 + cfg::split_bias;
    static constexpr i32 hidden_bit = 1, partial_bit = 1 << most;  // << warpgroup
    static constexpr i32 hidden_bits = partial_bit - 1, partial_bits = hidden_bits << most;
    static constexpr i32 dead_bit = partial_bit << most, last_bit = 2 * dead_bit, hides_bit = 2 * last_bit;
    __device__ __forceinline__ static constexpr KeyTile make(i32 n, i32 bits) { return {static_cast<u32>(n << flags | bits)}; }
    __device__ __forceinline__ static constexpr KeyTile none() { return {~0u}; }
    __device__ __forceinline__ constexpr bool exists() const { return code != ~0u; }
    __device__ __forceinline__ constexpr i32 n() const { return code >> flags; }
    // The warpgroup's rows see nothing of it, and others' do.
    __device__ __forceinline__ bool hidden(u32 warpgroup) const { return code & hidden_bit << warpgroup; }
    // The warpgroup must test elements.
    __device__ __forceinline__ bool partial(u32 warpgroup) const { return code & partial_bit << warpgroup; }
    __device__ __forceinline__ bool partial() const { return code & partial_bits; }
    __device__ __forceinline__ bool dead() const { return code & dead_bit; }  // no row sees some key: its v may be NaN
    __device__ __forceinline__ bool last() const { return code & last_bit; }  // of its row tile
    // Where tensor cores add the bias of keys: it hides one.
    __device__ __forceinline__ bool hides() const { return cfg::split_bias && code & hides_bit; }
    // Nothing need be done to single scores.
    __device__ __forceinline__ bool ordinary() const { return !(code & (hidden_bits | partial_bits | hides_bit)); }
};

// The first query row of what is told, where its masks depend on it.
struct NoRow {
    __device__ __forceinline__ void set_row(i32) {}
    __device__ __forceinline__ i32 row() const { return 0; }
};
struct FirstRow {
    i32 first;
    __device__ __forceinline__ void set_row(i32 row) { first = row; }
    __device__ __forceinline__ i32 row() const { return first; }
};
using MaskRow = Either<boolean_mask, FirstRow, NoRow>::type;

// Up to 32 key tiles that a row tile visits, from the planner to the producer.
struct TileList : MaskRow {
    KeyTile tiles[32];
    i32 count;           // negative: there is no further work
    i32 head, batch;     // of k and v
    i32 instance;        // of the mask
};

// Beside a list and beside mail: whose bias it is, and from which row on.
struct BiasPlace {
    i32 query_head, batch, row;
};

// What a bias that is made of parts does in a tile: to most of padding's nothing.
constexpr int key_words = (cfg::block_n + 31) / 32;
struct HiddenKeys {
    i32 told;             // adds_bit, unless the bias of all keys is 0, and their parts are not stored; KeyTile::hides_bit, if it hides one
    u32 keys[key_words];  // which; else anything
    static constexpr i32 adds_bit = 1;
};

struct Mail {  // to the cleaner: which buffer of v (and of HiddenKeys), which keys; negative place: no more work
    i32 place, n, instance;
};

// What else comes with queries, keys and values: nothing, or their tangents (sm90/jvp.cu).  `full` counts its bytes.
struct Alone {
    static constexpr int first_parts = 1;  // of a head's first row tile, by keys
    __device__ __forceinline__ void load_queries(u32, u32 full, const Work&) const {}
    __device__ __forceinline__ void load_keys(u32, u32 full, i32 key, i32 head, i32 batch) const {}
    __device__ __forceinline__ void load_values(u32, u32 full, i32 key, i32 head, i32 batch) const {}
};

constexpr int work_at = (barriers_at + 8 * barrier_count + 15) / 16 * 16;
constexpr int list_at = work_at + 16 * cfg::q_stages;
constexpr int codes_at = list_at + static_cast<int>(sizeof(TileList));
constexpr int mail_at = codes_at + 4 * cfg::stages;
constexpr int bias_places_at = mail_at + static_cast<int>(sizeof(Mail));
constexpr int hiding_at = bias_places_at + (cfg::bias || cfg::split_score ? 2 * static_cast<int>(sizeof(BiasPlace)) : 0);
constexpr int hiding_end = hiding_at + (cfg::split_bias ? 2 * cfg::stages * static_cast<int>(sizeof(HiddenKeys)) : 0);
constexpr int parts_at = cfg::split ? (hiding_end + 15) / 16 * 16 : hiding_end;
constexpr int last_at = parts_at + (cfg::split ? static_cast<int>(sizeof(Part)) * cfg::q_stages : 0);
constexpr int shared_bytes = last_at + (cfg::split && has_tangents ? 4 * warpgroups : 0);

// A thread's place in its warpgroup.  What follows from it is not kept in registers from one tile to the next: they are
// too few.
__device__ __forceinline__ u32 place_of_thread() { return ptx::opaque(static_cast<i32>(threadIdx.x % 128)); }

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 barrier(int number) const { return address + barriers_at + 8 * number; }
    __device__ __forceinline__ u32 q(u32 stage) const { return address + q_at + stage * q_buffer_bytes; }
    __device__ __forceinline__ u32 k(u32 stage) const { return address + k_at + stage * k_bytes; }
    __device__ __forceinline__ u32 v(u32 stage) const { return address + v_at + stage * v_bytes; }
    __device__ __forceinline__ Work& work(u32 stage) const { return at<Work>(work_at, stage); }
    __device__ __forceinline__ Part& part(u32 stage) const { return at<Part>(parts_at, stage); }
    // Along tangents: was a warpgroup's part the last to be done?
    __device__ __forceinline__ u32& last(u32 warpgroup) const { return at<u32>(last_at, warpgroup); }
    __device__ __forceinline__ TileList& list() const { return at<TileList>(list_at); }
    __device__ __forceinline__ KeyTile& code(u32 stage) const { return at<KeyTile>(codes_at, stage); }
    __device__ __forceinline__ u32 bias(u32 stage) const { return address + bias_tiles_at + stage * bias_bytes; }
    __device__ __forceinline__ u32 key_bias(u32 stage) const { return address + key_bias_at + stage * key_bias_bytes; }
    // What tensor cores add to a tile's keys, and what a bias hides of them, of two rounds of the ring: both are asked for when keys have gone.
    __device__ __forceinline__ u32 parts(const Slot<cfg::stages>& k) const { return key_bias(k.place()); }
    __device__ __forceinline__ u32 halves() const { return address + halves_at; }
    __device__ __forceinline__ HiddenKeys& hidden_keys(u32 place) const { return at<HiddenKeys>(hiding_at, place); }
    __device__ __forceinline__ i32 hiding(u32 place) const { return hidden_keys(place).told & KeyTile::hides_bit; }
    __device__ __forceinline__ i32 hiding(const Slot<cfg::stages>& k) const { return hiding(k.place()); }
    __device__ __forceinline__ bool adds(const Slot<cfg::stages>& k) const { return hidden_keys(k.place()).told & HiddenKeys::adds_bit; }
    __device__ __forceinline__ int4* cols(u32 stage) const { return &at<int4>(cols_at + stage * cols_bytes); }
    __device__ __forceinline__ u64* bits(u32 stage, u32 warpgroup) const { return &at<u64>(bits_at + stage * bits_bytes + warpgroup * bits_part); }
    __device__ __forceinline__ Mail& mail() const { return at<Mail>(mail_at); }
    __device__ __forceinline__ BiasPlace& bias_of_list() const { return at<BiasPlace>(bias_places_at, 0); }
    __device__ __forceinline__ BiasPlace& bias_of_mail() const { return at<BiasPlace>(bias_places_at, 1); }
};

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    constexpr u32 warps = 4 * warpgroups;
    for (int stage = 0; stage < cfg::q_stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(q_full + stage), 1);
        // Freed by all threads, who read the announcement, when the output is stored or the last scores are there.
        ptx::mbarrier_init(shared.barrier(q_empty + stage), 32 * warps);
    }
    for (int stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(k_full + stage), splits || cfg::bias_keys ? 1 + 32 : has_companion ? 2 : 1);
        ptx::mbarrier_init(shared.barrier(k_empty + stage), keys_are_read ? 32 * warps : warps);
        ptx::mbarrier_init(shared.barrier(v_full + stage), 1);
        ptx::mbarrier_init(shared.barrier(v_empty + stage), warps);
    }
    ptx::mbarrier_init(shared.barrier(raw_full), 1);
    // All lanes write lists, and all read lists and mail.
    ptx::mbarrier_init(shared.barrier(raw_empty), 32);
    ptx::mbarrier_init(shared.barrier(list_full), 32);
    ptx::mbarrier_init(shared.barrier(list_empty), has_companion ? 64 : 32);
    ptx::mbarrier_init_fence();
}

constexpr u32 ping_pong_barrier = 1;  // + warpgroup

// Warpgroups take turns at the tensor cores, except where there is one.
__device__ __forceinline__ void await_turn(u32 warpgroup) {
    if constexpr (warpgroups > 1) ptx::barrier_sync(ping_pong_barrier + warpgroup, 256);
}
__device__ __forceinline__ void pass_turn(u32 warpgroup) {
    if constexpr (warpgroups > 1) ptx::barrier_arrive(ping_pong_barrier + (warpgroup + 1 == warpgroups ? 0 : warpgroup + 1), 256);
}

// Where all key tiles of a row are visited: its first one, or that which follows `before`; of `lowest` it has no further one.
__device__ __forceinline__ i32 top_tile(const Params& p, const Work& work) { return cfg::split || cfg::diagonal ? work.instance & 0xffff : cfg::bias_keys ? work.instance & 0xffffff : p.key_tiles - 1; }
__device__ __forceinline__ i32 lowest_tile(const Work& work) { return cfg::split ? work.instance >> 16 : cfg::bias_keys ? work.instance >> 24 : 0; }
__device__ __forceinline__ KeyTile counted_tile(const Params& p, bool first, i32 top, const KeyTile& before, i32 lowest) {
    const i32 n = first ? top : before.n() - 1;
    const bool whole = !first || (!cfg::diagonal && (n + 1) * cfg::block_n <= p.n_keys);
    return KeyTile::make(n, (whole ? 0 : KeyTile::partial_bits) | (n == lowest ? KeyTile::last_bit : 0));
}

}  // namespace sm90::fwd
