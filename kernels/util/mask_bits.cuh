// What a warp makes of the elements of 64 rows and 128 keys: bits, states of tiles, and which keys some row sees.
#pragma once
#include "util/mask_params.cuh"

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kRows = 64, kKeys = 128, kOwn = kKeys / 32;  // of a warp; keys of a lane, which are neighbours and of one tile
static_assert(cfg::block_n % kOwn == 0);

// Where a warp looks; a grid of instances x groups of rows (an even number) x groups of keys (fastest), in one axis, a warp each.
struct Place {
    i32 instance, row, rows;    // rows: how many there are of them
    i32 first_key, key, count;  // key: a lane's first, and how many there are of its own

    __device__ __forceinline__ explicit Place(const MaskParams& p) {
        const i32 key_groups = (p.keys_padded + kKeys - 1) / kKeys, row_groups = (p.n_queries + 2 * kRows - 1) / (2 * kRows) * 2;
        const i64 warp = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32, group = warp / key_groups;
        instance = static_cast<i32>(group / row_groups), row = static_cast<i32>(group % row_groups) * kRows;
        first_key = static_cast<i32>(warp % key_groups) * kKeys, key = first_key + kOwn * (threadIdx.x % 32);
        rows = min(kRows, max(p.n_queries - row, 0)), count = min(max(p.n_keys - key, 0), kOwn);
    }
};

// Rows [begin, end) of 64.
__device__ __forceinline__ u64 row_range(i32 begin, i32 end) {
    const auto below = [](i32 n) { return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1; };
    return below(end) & ~below(begin);
}

// Those of a warp's rows that are in a row tile.
__device__ __forceinline__ u64 tile_rows(const Place& at, i32 m) { return row_range(m * cfg::block_m - at.row, min((m + 1) * cfg::block_m - at.row, at.rows)); }

// Which of 64 rows from `row` on the band and the column masks show a key.
__device__ __forceinline__ u64 shown_beside(const MaskParams& p, i32 instance, i32 row, i32 key) {
    const RowRange band = band_rows(p, key);
    u64 rows = row_range(band.first - row, band.end - row);
#pragma unroll
    for (int c = 0; c < column_masks; ++c) {
        const int4 x = source_bounds(p.column[c], source_offset(p, p.column[c], instance), key);
        const auto from_here = [&](i32 bound) { return min(max(bound, 0), p.n_queries) - row; };
        rows &= ~row_range(from_here(x.x), from_here(x.y)) & ~row_range(from_here(x.z), from_here(x.w));
    }
    return rows;
}

// Adds to the states of the tiles that the warp's keys are in.
__device__ __forceinline__ void add_states(const MaskParams& p, const Place& at, const u64 (&bits)[kOwn]) {
    const i32 mine = at.key / cfg::block_n, last = (min(at.first_key + kKeys, p.n_keys) - 1) / cfg::block_n;
    for (i32 m = at.row / cfg::block_m; m * cfg::block_m < at.row + at.rows; ++m) {
        const u64 there = tile_rows(at, m);
        u32 state = 0;
#pragma unroll
        for (int i = 0; i < kOwn; ++i)
            if (i < at.count) state |= ((bits[i] & there) != 0 ? kSomeSeen : 0) | ((~bits[i] & there) != 0 ? kSomeHidden : 0);
        for (i32 n = at.first_key / cfg::block_n; n <= last; ++n) {
            const u32 found = __reduce_or_sync(~0u, n == mine ? state : 0);
            if (threadIdx.x % 32 == 0 && found)
                atomicOr(p.states + at.instance * p.states_instance + state_word(m, n, p.key_tiles), found << state_shift(m, n));
        }
    }
}

__device__ __forceinline__ void store_bits(const MaskParams& p, const Place& at, const u64 (&bits)[kOwn]) {
    if (p.bits == nullptr || at.key >= p.keys_padded || (at.row > 0 && !p.bits_row) || (at.key >= cfg::block_n && !p.bits_tile)) return;
    const i64 tile = at.instance * p.bits_instance + at.row / kRows * p.bits_row + at.key / cfg::block_n * p.bits_tile;
    ulonglong2* to = reinterpret_cast<ulonglong2*>(p.bits + tile + at.key % cfg::block_n);
    to[0] = {bits[0], bits[1]}, to[1] = {bits[2], bits[3]};
}

// Marks the keys that one of the rows sees, by what stands beside, too.
__device__ __forceinline__ void mark_alive(const MaskParams& p, const Place& at, const u64 (&bits)[kOwn]) {
    u32 alive = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
        if (i < at.count && bits[i] & row_range(0, at.rows) & shown_beside(p, at.instance, at.row, at.key + i)) alive |= 1u << i;
    alive <<= kOwn * (threadIdx.x % 8);
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) alive |= __shfl_xor_sync(~0u, alive, lanes);
    u32* to = p.alive + at.instance * ((p.n_keys + 31) / 32ll) + at.key / 32;
    if (threadIdx.x % 8 == 0 && alive) atomicOr(to, alive);
}
