// dS added up along diagonals, for arrays that a score function reads by i - j, out of the tiles that lie in shared memory
// for dQ.
//
// A warp takes 64 keys of half of the rows.  Of each row a lane reads a word, two neighbouring keys, and goes on to the next word every other row:
// so it stays on three diagonals, 2 m - 1, 2 m and 2 m + 1 (rows less keys, m the lane), and on those 64 before them until its words come round.
//
// The sums are [head][diagonal of tiles][line] of Diagonals (attn/diagonals.cuh), lines behind an odd number of others, so that pairs of them from
// an even diagonal on are aligned.
#pragma once
#include "ptx/global.cuh"
#include "ptx/barrier.cuh"
#include "sm90/bwd_scores.cuh"

namespace sm90::bwd {

struct DiagonalSums {
    static constexpr int rows = cfg::block_m / 2;
    float below = 0, own = 0, above = 0;  // diagonals 2 m - 1, 2 m, 2 m + 1

    __device__ __forceinline__ void take(u32 even, u32 odd) {
        const float2 first = unpack<cfg::elem>(even), second = unpack<cfg::elem>(odd);
        below += first.y;
        own += first.x;
        own += second.y;
        above += second.x;
    }

    __device__ __forceinline__ DiagonalSums operator-(const DiagonalSums& other) const {
        return {below - other.below, own - other.own, above - other.above};
    }

    // To memory if told so, with what the next lane has of its first diagonal.  All lanes of a warp take part.
    __device__ __forceinline__ void add_to(float* at, float first, bool told = true) const {
        const u32 lane = threadIdx.x % 32;
        const float next = __shfl_sync(~0u, first, lane + 1);
        if (told) ptx::red_add_x2(at + 2 * lane, own, above + next);
    }
};

// Adds up the warp's part of a tile, whose first row is at an address; `before`: of the diagonals before the lane's own.
__device__ __forceinline__ void add_part(DiagonalSums& all, DiagonalSums& before, u32 row) {
    const u32 lane = threadIdx.x % 32;
    u32 column = 4 * (32 - lane);
#pragma unroll 1
    for (u32 pair = 0; pair < DiagonalSums::rows / 2; pair += 4, row += eight_rows, column += 16) {
        u32 words[8];
        unroll<8>([&](int i) { ptx::load_shared(words[i], row + i * row_bytes + ((column + i / 2 * 4) & 0x7c ^ 16 * i)); });
        unroll<4>([&](int i) {
            if (pair + i == lane) before = all;
            all.take(words[2 * i], words[2 * i + 1]);
        });
    }
    if (lane >= DiagonalSums::rows / 2) before = all;
}

// The warp's share of a tile in the buffer, where so many warps have one each.  All lanes take part.
template <int warps>
__device__ __forceinline__ void add_diagonals(const Params& p, const Shared& shared, u32 buffer, const DiagonalPlace& place, u32 warp) {
    using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;
    const u32 lane = threadIdx.x % 32;
    __syncwarp();  // all lanes know that dS is there
#pragma unroll 1
    for (i32 part = warp; part < 4; part += warps) {
        const i32 slab = part % 2, half = part / 2 * DiagonalSums::rows;
        DiagonalSums all, before;
        add_part(all, before, shared.ds(buffer) + (slab * cfg::block_m + half) * row_bytes);
        if (part + warps >= 4) ptx::mbarrier_arrive(shared.barrier(ds_empty + buffer));  // each lane for itself
        const DiagonalSums after = all - before;
        float* const tile = static_cast<float*>(p.dbias_acc) + 1 + place.flat * p.dbias.head +
                            Diagonal::owner(place.m, place.n, p.key_tiles) * Diagonal::lines + Diagonal::line(half - 64 * slab);
        before.add_to(tile - 64, lane == 0 ? after.below : before.below);
        after.add_to(tile, lane == 0 ? 0.0f : after.below, lane < DiagonalSums::rows / 2);
    }
}

// A warpgroup that does nothing else.
__device__ __forceinline__ void add_steps(const Params& p, const Shared& shared, u32 warp) {
    for (Slot<cfg::stages> slot;; slot.advance()) {
        ptx::mbarrier_wait(shared.barrier(ds_full + slot.stage), slot.phase);
        const DiagonalPlace place = shared.diagonal_place(slot.stage);
        if (uniform(place.n < 0)) return;
        add_diagonals<adders>(p, shared, slot.stage, place, warp);
    }
}

}  // namespace sm90::bwd
