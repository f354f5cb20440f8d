// The drawers: a warpgroup that draws, a row tile ahead, what dropout drops of a tile, so that the consumers only look it up.
//
// A tile is drawn in parts of 16 keys by 64 rows, what a warp of a consumer works on.  The generator serves rows (the contract is
// in cuattn/rng.py): a call covers rows i, i + 8 and keys j, j + 1, + 8, of 16 x 16.  The consumer's lane (g, q) = (lane / 4, lane % 4)
// holds keys g, g + 8 and rows 2 q, 2 q + 1, + 8: two calls, which serve the lane of the next key as well.  So a drawer's lane draws
// for both keys, in two blocks of 16 rows.
#pragma once
#include "attn/philox.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "sm90/bwd_layout.cuh"

namespace sm90 {

constexpr int part_rows = 64, key_blocks = cfg::block_n / 16;
constexpr int parts = cfg::block_m / part_rows * key_blocks;  // [rows / 64][keys / 16]

constexpr int chains = drawn_in_pairs ? 2 : 1;  // parts of the same rows that are drawn side by side
static_assert(!drawers || !drawn_in_pairs || key_blocks == drawers * chains);

// What is kept, in each of these parts, of 2 x 2 rows in each of two blocks of 16, and 2 x 2 keys, from `row` and `key` on: in the low
// half the even keys', in byte i of it those of block i, in bit 4 e + j that of element e of register j of the fragment.
__device__ __forceinline__ void draw_parts(u32 (&kept)[chains], const Params& p, const RandomStream& stream, i32 row, i32 key) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
#pragma unroll
    for (int chain = 0; chain < chains; ++chain) kept[chain] = 0;
#pragma unroll(4 / chains)  // as far as registers go
    for (int call = 3; call >= 0; --call) {
#pragma unroll
        for (int chain = 0; chain < chains; ++chain) {
            u32 words[4];
            random_words(words, p.dropout, stream, row + 16 * (call / 2) + call % 2, key + 16 * drawers * chain);
#pragma unroll
            for (int j = 3; j >= 0; --j) kept[chain] = 2 * kept[chain] + kept_ones<threshold>(words[j >> 1 | (j & 1) << 1]);
        }
    }
}

__device__ __forceinline__ void draw_ahead(const Params& p, const Shared& shared, u32 warp) {
    const i32 own_lane = threadIdx.x % 32;
    for (Slot<cfg::stages> slot;; slot.advance()) {
        ptx::mbarrier_wait(shared.barrier(draws_told + slot.stage), slot.phase);
        const DrawPlace at = shared.draw_place(slot.stage);
        if (uniform(at.n < 0)) return;
        const RandomStream stream = random_stream(p.dropout, at.batch, at.head);
        // Of the lane in the first part; followed from part to part in pairs, else found for each: registers decide.
        u32 lane = ptx::opaque(own_lane);
        i32 row = at.m * cfg::block_m + 32 * (lane / 16) + 2 * (lane / 4 % 4), key = at.n * cfg::block_n + 16 * warp + 2 * (lane % 4);
#pragma unroll 1
        for (u32 part = warp; part < parts; part += drawers * chains) {
            const u32 keys = part % key_blocks, rows = part / key_blocks;
            lane = ptx::opaque(own_lane);
            if constexpr (!drawn_in_pairs) {
                row = at.m * cfg::block_m + rows * part_rows + 32 * (lane / 16) + 2 * (lane / 4 % 4);
                key = at.n * cfg::block_n + keys * 16 + 2 * (lane % 4);
            }
            u32 kept[chains];
            draw_parts(kept, p, stream, drawn_in_pairs ? ptx::opaque(row) : row, key);
            ptx::mbarrier_wait(shared.barrier(draws_empty + (slot.stage ^ 1)), slot.phase ^ slot.stage ^ 1);  // of the row tile before
            if constexpr (drawn_in_pairs) lane = ptx::opaque(own_lane), row += part_rows;
            u16* const even = reinterpret_cast<u16*>(&shared.draws(rows, keys, 8 * (lane % 4) + lane / 4 % 4)) + lane / 16;
#pragma unroll
            for (int chain = 0; chain < chains; ++chain) {
                even[64 * drawers * chain] = static_cast<u16>(kept[chain]);
                even[64 * drawers * chain + 8] = static_cast<u16>(kept[chain] >> 16);  // 4 lanes on
            }
        }
        ptx::mbarrier_arrive(shared.barrier(draws_full + slot.stage));  // each lane for itself
    }
}

}  // namespace sm90
