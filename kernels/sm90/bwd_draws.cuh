// The drawers: a warpgroup that draws, a row tile ahead, what dropout drops of a tile, so that the consumers only look it up.
//
// A tile is drawn in parts of 16 keys by 64 rows, what a warp of a consumer works on.  The generator serves rows (the contract is
// in cuattn/rng.py): a call of lane (g, q) = (lane / 4, lane % 4) covers rows g, g + 8 and keys 2 q, 2 q + 1, + 8 of 16 x 16.  Consumers
// hold keys g, g + 8 and rows 2 q, 2 q + 1, + 8: neighbouring rows exchange what they drew, so that one has both for the even key and
// the other for the odd one.
#pragma once
#include "attn/philox.cuh"
#include "ptx/mbarrier.cuh"
#include "sm90/bwd_layout.cuh"

namespace sm90 {

constexpr int part_rows = 64, key_blocks = cfg::block_n / 16;
constexpr int parts = cfg::block_m / part_rows * key_blocks;  // [rows / 64][keys / 16]

// What is kept of 64 rows from `row` and 16 keys from `key`, for thread `receiver` of a consumer's warp: in
// byte i for block i of 16 rows, bit 4 e + j for element e of register j of the fragment.
__device__ __forceinline__ u32 draw_part(const Params& p, const RandomStream& stream, i32 row, i32 key) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const u32 lane = threadIdx.x % 32, odd_row = lane / 4 % 2;
    u32 kept[2] = {0, 0};  // of two blocks each: even key in the low half
#pragma unroll
    for (int block = 0; block < part_rows / 16; ++block) {
        u32 words[4];
        random_words(words, p.dropout, stream, row + 16 * block + lane / 4, key + 2 * (lane % 4));
#pragma unroll
        for (int w = 0; w < 4; ++w)
            kept[block / 2] |= drop_pair<threshold>(~0u, words[w]) & (0x00010001u << (8 * (block % 2) + (w >> 1 | (w & 1) << 1)));
    }
    const u32 even = ptx::prmt(kept[0], kept[1], 0x5410) << 4 * odd_row, odd = ptx::prmt(kept[0], kept[1], 0x7632) << 4 * odd_row;
    return (odd_row ? odd : even) | __shfl_xor_sync(~0u, odd_row ? even : odd, 4);
}

__device__ __forceinline__ void draw_ahead(const Params& p, const Shared& shared, u32 warp) {
    const u32 lane = threadIdx.x % 32, receiver = 8 * (lane % 4) + 4 * (lane / 4 % 2) + lane / 8;
    for (Slot<cfg::stages> slot;; slot.advance()) {
        ptx::mbarrier_wait(shared.barrier(draws_told + slot.stage), slot.phase);
        const DrawPlace at = shared.draw_place(slot.stage);
        if (uniform(at.n < 0)) return;
        const RandomStream stream = random_stream(p.dropout, at.batch, at.head);
#pragma unroll 1
        for (u32 part = warp; part < parts; part += drawers) {
            const u32 kept = draw_part(p, stream, at.m * cfg::block_m + part / key_blocks * part_rows, at.n * cfg::block_n + part % key_blocks * 16);
            ptx::mbarrier_wait(shared.barrier(draws_empty + (slot.stage ^ 1)), slot.phase ^ slot.stage ^ 1);  // of the row tile before
            shared.draws(part / key_blocks, part % key_blocks, receiver) = kept;
        }
        ptx::mbarrier_arrive(shared.barrier(draws_full + slot.stage));  // each lane for itself
    }
}

}  // namespace sm90
