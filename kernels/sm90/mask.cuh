// Element tests of partially visible tiles.  Masking is a select: an invisible score becomes -inf whatever it was.
//
// What a thread sees is worked out while the scores are being computed, as one bit per score: a word for each of its two
// rows.
#pragma once
#include "attn/mask.cuh"
#include "sm90/mask_bits.cuh"
#include "sm90/softmax.cuh"

namespace sm90 {

using Visible = u32[2];

// The score of a thread's first row that belongs to a bit.  Scores come in pairs of neighbouring keys: bits count them in
// that order, or as turn_bits leaves them.
__device__ __forceinline__ constexpr int score_of(int bit) {
    const int pair = cfg::mask == kMaskNone ? bit / 2 : bit / 16 * 8 + bit % 8;
    const int key = cfg::mask == kMaskNone ? bit % 2 : bit / 8 % 2;
    return 4 * pair + key;
}

// How many of a thread's keys come before `column`, which counts from its first.
__device__ __forceinline__ i32 keys_before(i32 column) { return column / 8 * 2 + min(column % 8, 2); }

// Without a table: the end of the keys and the band.  `row` is the first of the thread's two rows, which lie 8 apart.
__device__ __forceinline__ void find_in_band(Visible& visible, const Params& p, i32 row, i32 n) {
    const i32 key = n * cfg::block_n + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i32 diagonal = row + 8 * r + p.band_offset - key;
        i32 end = p.n_keys - key;
        if constexpr (cfg::band_right) end = min(end, diagonal + p.band_right + 1);
        visible[r] = low_bits<u32>(keys_before(max(end, 0)));
        if constexpr (cfg::band_left) visible[r] &= ~low_bits<u32>(keys_before(max(diagonal - p.band_left, 0)));
    }
}

// Among the eight lanes g that differ in their row: bit g' of each byte of lane g becomes bit g of lane g'.
__device__ __forceinline__ void turn_bits(Visible& x) {
    const u32 g = place_of_thread() % 32 / 4;
    u32 low = 0x0f0f0f0f;  // bits whose number has the step's bit clear
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
        const bool upper = g & step;
        const u32 own = ptx::opaque(static_cast<i32>(upper ? ~low : low));  // opaque: one instruction merges two words
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const u32 other = __shfl_xor_sync(~0u, x[r], 4 * step);
            x[r] = (x[r] & own) | (__funnelshift_l(other, other, upper ? 32 - step : step) & ~own);
        }
        low ^= low << (step / 2);
    }
}

// By a table.  A lane finds which of its warp's 16 rows see keys 8 g + 2 q, 8 g + 2 q + 1 and the two 64 further (g, q: its
// place in the fragment); the bits then change sides.  `cols` are the intervals of the tile's keys.
__device__ __forceinline__ void find_in_table(Visible& visible, const Params& p, const int4* cols, const Work& work,
                                              i32 first_row, i32 n) {
    const u8* blocks = nullptr;
    if constexpr (cfg::mask == kMaskBlock)
        blocks = static_cast<const u8*>(p.mask.data) + slice_of(p.mask, work.batch, work.head);
    const u32 thread = place_of_thread(), lane = thread % 32;
    first_row += 16 * (thread / 32);
    u32 pairs[2];  // rows 0-7 of both keys, then rows 8-15 of both
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const i32 column = 64 * half + 8 * (lane / 4) + 2 * (lane % 4), key = n * cfg::block_n + column;
        u32 rows[2] = {0, 0};
        if (column < cfg::block_n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                rows[e] = band_rows<u32>(p, first_row, key + e);
                if constexpr (cfg::mask == kMaskColumn) rows[e] &= column_rows<u32>(cols[column + e], first_row);
                if constexpr (cfg::mask == kMaskBlock) rows[e] &= block_rows<u32>(p, blocks, first_row, key + e);
            }
        }
        pairs[half] = __byte_perm(rows[0], rows[1], 0x5140);
    }
    visible[0] = __byte_perm(pairs[0], pairs[1], 0x5410);
    visible[1] = __byte_perm(pairs[0], pairs[1], 0x7632);
    turn_bits(visible);
}

__device__ __forceinline__ void mask_scores(Scores& s, const Visible& visible) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int bit = 0; bit < 32; ++bit) {
            const int i = score_of(bit) + 2 * r;
            if (i < cfg::block_n / 2) s[i] = visible[r] & 1u << bit ? s[i] : minus_infinity();
        }
}

}  // namespace sm90
