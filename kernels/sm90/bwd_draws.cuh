// The drawers: a warpgroup that draws (algorithm 4, line 14), a row tile ahead, what dropout drops of a tile, so that the consumers only look it up.
//
// A tile is drawn in parts of 16 keys by 64 rows, what a warp of a consumer works on.  The generator serves rows (the contract is
// in cuattn/rng.py): a call covers rows i, i + 8 and keys j, j + 1, + 8, of 16 x 16.  The consumer's lane (g, q) = (lane / 4, lane % 4)
// holds keys g, g + 8 and rows 2 q, 2 q + 1, + 8: two calls, which serve the lane of the next key as well.  So a drawer's lane draws
// for both keys, 2 (lane / 8) and the next, in two blocks of 16 rows, those of the rows' half lane % 2, where q = lane / 2 % 4.
#pragma once
#include "attn/philox.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_layout.cuh"

namespace sm90::bwd {

// Where nothing is masked narrow heads leave registers for two calls of the generator side by side.
constexpr bool drawn_in_pairs = cfg::block_m == 128 && unmasked;
constexpr int part_rows = 64, key_blocks = cfg::block_n / 16;
constexpr int side_by_side = drawn_in_pairs ? 2 : 1;  // parts of the same rows and of keys 16 * drawers apart
constexpr int row_passes = drawers ? key_blocks / (drawers * side_by_side) : 1;  // of a warp, for 64 rows
constexpr int passes = row_passes * (cfg::block_m / part_rows);
constexpr bool unrolled = cfg::block_m == part_rows;
static_assert(!drawers || key_blocks == drawers * side_by_side * row_passes);

// row and key: numbers in the whole problem, or with cfg::runs among the operands' own.  What is kept, in each of these parts, of 2 x 2 rows in each of two blocks of 16, and 2 x 2 keys from `key` on: in the low half the
// even keys', in byte i of it those of block i, in bit 4 e + j that of element e of register j of the fragment.
__device__ __forceinline__ void draw_parts(u32 (&kept)[side_by_side], const Params& p, const StreamWords& stream, u32 row, u32 key) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const u32 first = (cfg::runs ? global_row(p, row) : row) ^ stream.row;
    const u32 second = (cfg::runs ? global_row(p, row + 16) : row + 16) ^ stream.row;
    KeyProducts keys[side_by_side];
    unroll<side_by_side>([&](int i) {
        kept[i] = 0;
        const u32 own = key + 16 * drawers * i;
        keys[i] = key_products(stream, cfg::runs ? global_key(p, own) : own);
    });
#pragma unroll(cfg::runs && cfg::block_m == 128 ? 1 : 4 / side_by_side)  // as far as registers go
    for (int call = 3; call >= 0; --call) {
        unroll<side_by_side>([&](int i) {
            u32 words[4];
            random_words(words, p.dropout, (call / 2 ? second : first) ^ call % 2, keys[i]);
#pragma unroll
            for (int j = 3; j >= 0; --j) kept[i] = 2 * kept[i] + clamp_draws<threshold>(words[j >> 1 | (j & 1) << 1]);
        });
    }
    // Sixteen times threshold - 1 too many, in bits 0 to 15 of either half: 0xffff * 0x10001 = -1 times.
    unroll<side_by_side>([&](int i) { kept[i] += threshold - 1; });
}

__device__ __forceinline__ void draw_ahead(const Params& p, const Shared& shared, u32 warp) {
    const i32 own_lane = threadIdx.x % 32;
    const u32 offset = __shfl_sync(~0u, random_offset(p.dropout), 0);  // the shuffle puts it into a uniform register
    using Position = Either<unrolled, Positions, Slot<cfg::stages>>::type;
    for (Position position;; position.advance()) {
        const Slot<cfg::stages> slot = position;
        ptx::mbarrier_wait(shared.barrier(draws_told + slot.stage), slot.phase);
        const DrawPlace at = shared.draw_place(slot.stage);
        if (uniform(at.n < 0)) return;
        const StreamWords stream = stream_words(p.dropout, {at.batch, offset});
#pragma unroll(unrolled ? passes : 1)
        for (u32 pass = 0; pass < passes; ++pass) {
            // Unrolled, what the generator makes of the rows would be kept for the next pass, in registers that are not there, if the
            // compiler knew that this is the same stream.
            const StreamWords own = unrolled ? stream_words(p.dropout, {shared.draw_place(slot.stage).batch, offset}) : stream;
            const u32 rows = pass / row_passes, keys = warp + drawers * side_by_side * (pass % row_passes);
            u32 lane = ptx::opaque(own_lane);  // found again where it is needed: of registers there are few
            const u32 row = (cfg::runs ? 0 : p.dropout.row) + at.m * cfg::block_m + rows * part_rows + lane % 2 * 32 + (lane & 6);
            const u32 key = (cfg::runs ? 0 : p.dropout.key) + at.n * cfg::block_n + 16 * keys + lane / 8 * 2;
            u32 kept[side_by_side];
            draw_parts(kept, p, own, row, key);
            // Until the row tile before has been looked up.  Asked behind the first pass, so that the second does not mix with it.
            if (!unrolled || pass == 0)
                ptx::mbarrier_wait(shared.barrier(draws_empty + (slot.stage ^ 1)), slot.phase ^ slot.stage ^ 1);
            lane = ptx::opaque(own_lane);
            u16* const even = reinterpret_cast<u16*>(&shared.draws(rows, keys, 0)) + lane + (lane & 24);
            unroll<side_by_side>([&](int i) {
                even[64 * drawers * i] = static_cast<u16>(kept[i]);
                even[64 * drawers * i + 8] = static_cast<u16>(kept[i] >> 16);  // 4 lanes on
            });
        }
        ptx::mbarrier_arrive(shared.barrier(draws_full + slot.stage));  // each lane for itself
    }
}

}  // namespace sm90::bwd
