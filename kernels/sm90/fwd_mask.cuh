// Element tests of partially visible tiles.  Masking is a select: an invisible score becomes -inf whatever it was.
//
// What a thread sees is worked out while the scores are being computed, as one bit per score: a word for each of its two
// rows.
#pragma once
#include "attn/mask.cuh"
#include "sm90/hidden.cuh"
#include "sm90/fwd_softmax.cuh"

namespace sm90::fwd {

using Visible = u32[2];
static_assert(cfg::block_n <= 128);

constexpr bool by_table = column_masks > 0 || block_mask || boolean_mask;  // which rows see a key

// The score of a thread's first row that belongs to a bit.  Scores come in pairs of neighbouring keys: bits count them in
// that order, or as transpose_bits leaves them.
__device__ __forceinline__ constexpr int score_of(int bit) {
    const int pair = by_table ? bit / 16 * 8 + bit % 8 : bit / 2;
    const int key = by_table ? bit / 8 % 2 : bit % 2;
    return 4 * pair + key;
}
__device__ __forceinline__ int bit_of(int pair) { return by_table ? pair / 8 * 16 + pair % 8 : 2 * pair; }  // of its first key
constexpr int second_key = by_table ? 8 : 1;                                                                // bits to that of the second

// How many of a thread's keys come before `column`, which counts from its first.
__device__ __forceinline__ i32 keys_before(i32 column) { return column / 8 * 2 + min(column % 8, 2); }

// Without a table: the end of the keys and the band.  `row` is the first of the thread's two rows, which lie 8 apart.
__device__ __forceinline__ void find_in_band(Visible& visible, const Params& p, i32 row, i32 n) {
    const i32 key = n * cfg::block_n + 2 * (threadIdx.x % 4);
    unroll<2>([&](int r) {
        const i32 diagonal = row + 8 * r - key;
        i32 end = p.n_keys - key;
        if constexpr (cfg::band_right) end = min(end, diagonal + p.band_right + 1);
        visible[r] = low_bits<u32>(keys_before(max(end, 0)));
        if constexpr (cfg::band_left) visible[r] &= ~low_bits<u32>(keys_before(max(diagonal - p.band_left, 0)));
    });
}

// Among the eight lanes g that differ in their row: bit g' of each byte of lane g becomes bit g of lane g', after calls
// with step 4, 2 and 1.
__device__ __forceinline__ void transpose_bits(Visible& x, int step) {
    const bool upper = place_of_thread() % 32 / 4 & step;
    // Bits whose number has the step's bit clear.
    const u32 low = step == 4 ? 0x0f0f0f0f : step == 2 ? 0x33333333 : 0x55555555;
    const u32 own = ptx::opaque(static_cast<i32>(upper ? ~low : low));  // opaque: one instruction merges two words
    unroll<2>([&](int r) {
        const u32 other = __shfl_xor_sync(~0u, x[r], 4 * step);
        x[r] = (x[r] & own) | (__funnelshift_l(other, other, upper ? 32 - step : step) & ~own);
    });
}

// What came with a tile's keys of the masks: their intervals, and which of the warpgroup's rows see them.
struct TileMasks {
    const int4* cols;
    const u64* bits;
};

// Which of a warp's 16 rows see keys `column` and the next of a tile: rows 0-7 of both, then rows 8-15 of both.
__device__ __forceinline__ u32 pair_rows(const Params& p, const TileMasks& masks, const Work& work, i32 first_row, i32 warp, i32 n,
                                         i32 column) {
    if (column >= cfg::block_n) return 0;
    const i32 key = n * cfg::block_n + column;
    u32 rows[2];
    unroll<2>([&](int e) {
        rows[e] = band_rows<u32>(p, first_row, key + e);
        if constexpr (column_masks > 0) rows[e] &= column_rows<u32>(masks.cols[column + e], first_row);
        if constexpr (boolean_mask) rows[e] &= reinterpret_cast<const u16*>(masks.bits + column + e)[warp];
        if constexpr (block_mask) {
            const u8* blocks = static_cast<const u8*>(p.mask.data) + slice_of(p.mask, work.batch, work.head);
            rows[e] &= block_rows<u32>(p, blocks, first_row, key + e);
        }
    });
    return __byte_perm(rows[0], rows[1], 0x5140);
}

// By a table, in five phases.  A lane finds which of its warp's 16 rows see keys 8 g + 2 q, 8 g + 2 q + 1 and the two 64
// further (g, q: its place in the fragment); the bits then change sides.
__device__ __forceinline__ void find_in_table(Visible& visible, int phase, const Params& p, const TileMasks& masks,
                                              const Work& work, i32 first_row, i32 n) {
    if (phase >= 2) return transpose_bits(visible, 16 >> phase);
    const u32 thread = place_of_thread(), lane = thread % 32;
    const i32 column = 64 * phase + 8 * (lane / 4) + 2 * (lane % 4);
    const u32 pair = pair_rows(p, masks, work, first_row + 16 * (thread / 32), thread / 32, n, column);
    if (phase == 0) {
        visible[0] = pair;
    } else {
        visible[1] = __byte_perm(visible[0], pair, 0x7632);
        visible[0] = __byte_perm(visible[0], pair, 0x5410);
    }
}

// Takes away what a mask function hides; `row` is the first of the thread's two rows.
__device__ __forceinline__ void ask_function(Visible& visible, const Params& p, const Work& work, i32 row, i32 n) {
    const FunctionHead head = FunctionHead::of(p, static_cast<i32>(slice_of(p.function, work.batch, work.head)));
    const FunctionRow rows[2] = {FunctionRow::of(p, head, max(row, 0)), FunctionRow::of(p, head, max(row + 8, 0))};
    const i32 first = n * cfg::block_n + 2 * (threadIdx.x % 4);
#pragma unroll 2
    for (int pair = 0; pair < cfg::block_n / 8; ++pair) {
        unroll<2>([&](int e) {
            const FunctionKey key = FunctionKey::of(p, head, first + 8 * pair + e);
            const u32 bit = 1u << (bit_of(pair) + e * second_key);
            unroll<2>([&](int r) { visible[r] &= function_shows(p, head, rows[r], key) ? ~0u : ~bit; });
        });
    }
}

// Takes away keys that the bias hides, whose tile's parts these are.
__device__ __forceinline__ void hide_keys(Visible& visible, u32 parts) {
    const u32 own = parts + 2 * part_bytes * (place_of_thread() % 4);
#pragma unroll 1
    for (int pair = 0; pair < cfg::block_n / 8; ++pair) {
        unroll<2>([&](int e) {
            u32 leading;
            ptx::load_shared(leading, own + part_bytes * (8 * pair + e));
            const u32 bit = BiasParts::hides(leading) ? 1u << (bit_of(pair) + e * second_key) : 0;
            unroll<2>([&](int r) { visible[r] &= ~bit; });
        });
    }
}

constexpr int search_phases = (by_table ? 5 : 1) + function_mask;  // of finding what is visible

__device__ __forceinline__ void mask_scores(Scores& s, const Visible& visible, float hidden = minus_infinity()) {
    unroll<2, 32>([&](int r, int bit) {
        const int i = score_of(bit) + 2 * r;
        if (i < cfg::block_n / 2) s[i] = visible[r] & 1u << bit ? s[i] : hidden;
    });
}

}  // namespace sm90::fwd
