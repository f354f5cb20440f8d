// Element tests of partially visible tiles.  Masking is a select: an invisible score becomes -inf whatever it was.
#pragma once
#include "attn/mask.cuh"
#include "sm90/mask_bits.cuh"
#include "sm90/softmax.cuh"

namespace sm90 {

// Without a table: the end of the keys and the band.  `row` is the first of the thread's two rows, which lie 8 apart.
__device__ __forceinline__ void mask_band(Scores& s, const Params& p, i32 row, i32 n) {
    const i32 key = n * cfg::block_n + 2 * (threadIdx.x % 4);
    i32 begin[2], end[2];  // visible keys of each row, relative to the thread's first
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const i32 diagonal = row + 8 * r + p.band_offset - key;
        begin[r] = cfg::band_left ? diagonal - p.band_left : 0;
        end[r] = p.n_keys - key;
        if constexpr (cfg::band_right) end[r] = min(end[r], diagonal + p.band_right + 1);
    }
#pragma unroll
    for (int i = 0; i < cfg::block_n / 2; ++i) {
        const int column = 8 * (i / 4) + i % 2, r = half_of(i);
        const bool visible = column < end[r] && (!cfg::band_left || column >= begin[r]);
        s[i] = visible ? s[i] : minus_infinity();
    }
}

// The element mask of a partial tile as one bit per row and key, [warp][key]: 16 rows of a warp in 16 bits.  A thread
// does a key; while the scores are being computed, this costs nothing.
__device__ __forceinline__ void make_bits(const Params& p, u16 (&bits)[4][cfg::block_n], const int4* cols,
                                          const Work& work, i32 first_row, i32 n) {
    const u8* blocks = nullptr;
    if constexpr (cfg::mask == kMaskBlock)
        blocks = static_cast<const u8*>(p.mask.data) + slice_offset(p.mask, batch_index(p, work.batch), work.head);
    for (i32 i = threadIdx.x % 128; i < cfg::block_n; i += 128) {
        const i32 key = n * cfg::block_n + i;
        u64 rows = band_rows(p, first_row, key);
        if constexpr (cfg::mask == kMaskColumn) rows &= column_rows(cols[i], first_row);
        if constexpr (cfg::mask == kMaskBlock) rows &= block_rows(p, blocks, first_row, key);
#pragma unroll
        for (int warp = 0; warp < 4; ++warp) bits[warp][i] = static_cast<u16>(rows >> (16 * warp));
    }
}

__device__ __forceinline__ void mask_bits(Scores& s, const u16 (&bits)[4][cfg::block_n]) {
    const u32 lane = threadIdx.x % 32;
    const u32* mine = reinterpret_cast<const u32*>(bits[threadIdx.x % 128 / 32]) + lane % 4;
#pragma unroll
    for (int i = 0; i < cfg::block_n / 2; i += 4) {
        const u32 word = mine[i] >> (lane / 4);  // two keys: bits 0 and 8, bits 16 and 24 are this thread's rows
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const u32 bit = 1u << (16 * (e % 2) + 8 * (e / 2));
            s[i + e] = word & bit ? s[i + e] : minus_infinity();
        }
    }
}

}  // namespace sm90
