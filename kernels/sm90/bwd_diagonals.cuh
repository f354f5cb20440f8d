// dS added up along diagonals, for arrays that a score function reads by i - j, out of the tiles that lie in shared memory for dQ.
//
// A warp goes down half of the rows.  Of each row a lane reads a word, two neighbouring keys, of each slab of 64 keys, and goes on to the next word
// every other row: so it stays on three diagonals, 2 m - 1, 2 m and 2 m + 1 (rows less keys, m the lane), and on those 64 before them until
// its words come round.
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

    // To memory if told so, with what the next lane has of its first diagonal.  All lanes of a warp take part.
    __device__ __forceinline__ void add_to(float* at, float first, bool told = true) const {
        const u32 lane = threadIdx.x % 32;
        const float next = __shfl_sync(~0u, first, lane + 1);
        if (told) ptx::red_add_x2(at + 2 * lane, own, above + next);
    }
};

// Adds up half of the rows, the first of which is at an address; `before`: of the diagonals before the lane's own.
__device__ __forceinline__ void add_rows(DiagonalSums (&all)[warpgroups], DiagonalSums (&before)[warpgroups], u32 row) {
    const u32 lane = threadIdx.x % 32;
    u32 column = 4 * (32 - lane);
#pragma unroll 1
    for (u32 first = 0; first < DiagonalSums::rows / 2; first += 4) {
        unroll<4>([&](int pair) {
            u32 words[warpgroups][2];
            unroll<2>([&](int e) {
                const int i = 2 * pair + e;
                const u32 at = row + i * row_bytes + ((column + 4 * pair) & 0x7c ^ 16 * i);
                unroll<warpgroups>([&](int slab) { ptx::load_shared(words[slab][e], at + slab * cfg::block_m * row_bytes); });
            });
            unroll<warpgroups>([&](int slab) {
                if (first + pair == lane) before[slab] = all[slab];
                all[slab].take(words[slab][0], words[slab][1]);
            });
        });
        row += eight_rows;
        column += 16;
    }
    if (lane < DiagonalSums::rows / 2) return;
    unroll<warpgroups>([&](int slab) { before[slab] = all[slab]; });
}

// A tile in the buffer.  All lanes of a warp take part.
__device__ __forceinline__ void add_diagonals(const Params& p, const Shared& shared, u32 buffer, const DqPlace& place) {
    using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;
    const u32 lane = threadIdx.x % 32;
    float* const tile = static_cast<float*>(p.dbias_acc) + 1 + (place.batch * p.heads + place.head) * p.dbias.head +
                        Diagonal::owner(place.m, place.n, p.key_tiles) * Diagonal::lines + Diagonal::line(0);
#pragma unroll 1
    for (i32 first = 0; first < cfg::block_m; first += DiagonalSums::rows) {
        DiagonalSums all[warpgroups], before[warpgroups];
        add_rows(all, before, shared.ds(buffer) + first * row_bytes);
        unroll<warpgroups>([&](int slab) {
            const DiagonalSums after = {all[slab].below - before[slab].below, all[slab].own - before[slab].own, all[slab].above - before[slab].above};
            before[slab].add_to(tile + first - 64 * (slab + 1), lane == 0 ? after.below : before[slab].below);
            after.add_to(tile + first - 64 * slab, lane == 0 ? 0.0f : after.below, lane < DiagonalSums::rows / 2);
        });
    }
    ptx::mbarrier_arrive(shared.barrier(ds_empty + buffer));  // each lane for itself
}

}  // namespace sm90::bwd
