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

// Bit j of lane i becomes bit i of lane j.
__device__ __forceinline__ u32 transpose_bits(u32 x) {
    const u32 lane = place_of_thread() % 32;
    u32 low = 0x0000ffff;  // bits whose number has the step's bit clear
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const bool upper = lane & step;
        const u32 other = __shfl_xor_sync(~0u, x, step), own = upper ? ~low : low;
        x = (x & own) | (__funnelshift_l(other, other, upper ? 32 - step : step) & ~own);
        low ^= low << (step / 2);
    }
    return x;
}

// The element mask of a partial tile, in the order in which a thread holds its scores: word q of a row has the keys
// 8 j + 2 q and 8 j + 2 q + 1 in bits 2 j and 2 j + 1.  A thread finds the 64 rows that see one key; the bits then
// change sides in each warp.  While the scores are being computed, this costs nothing.  `cols` are the intervals of the
// tile's keys.
__device__ __forceinline__ void make_bits(const Params& p, MaskBits& bits, const int4* cols, const Work& work,
                                          i32 first_row, i32 n) {
    const u8* blocks = nullptr;
    if constexpr (cfg::mask == kMaskBlock)
        blocks = static_cast<const u8*>(p.mask.data) + slice_of(p.mask, work.batch, work.head);
    const u32 thread = place_of_thread(), lane = thread % 32, warp = thread / 32;
    const i32 i = 32 * warp + 8 * (lane / 2 % 4) + 2 * (lane / 8) + lane % 2, key = n * cfg::block_n + i;
    u64 rows = 0;
    if (i < cfg::block_n) {
        rows = band_rows(p, first_row, key);
        if constexpr (cfg::mask == kMaskColumn) rows &= column_rows(cols[i], first_row);
        if constexpr (cfg::mask == kMaskBlock) rows &= block_rows(p, blocks, first_row, key);
    }
    const u32 words[2] = {transpose_bits(static_cast<u32>(rows)), transpose_bits(static_cast<u32>(rows >> 32))};
    u8* bytes = reinterpret_cast<u8*>(bits[lane]) + warp;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
        bytes[4 * q] = static_cast<u8>(words[0] >> (8 * q));
        bytes[sizeof(bits) / 2 + 4 * q] = static_cast<u8>(words[1] >> (8 * q));
    }
}

__device__ __forceinline__ void mask_bits(Scores& s, const MaskBits& bits) {
    const u32 thread = place_of_thread(), lane = thread % 32, row = 16 * (thread / 32) + lane / 4;
    const u32 words[2] = {bits[row][lane % 4], bits[row + 8][lane % 4]};
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < cfg::block_n / 4; ++i) {
            float& score = s[4 * (i / 2) + 2 * r + i % 2];
            score = words[r] & 1u << i ? score : minus_infinity();
        }
}

}  // namespace sm90
