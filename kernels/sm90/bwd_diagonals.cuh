// dS added up along diagonals, for arrays that a score function reads by i - j, out of the tiles that lie in shared memory for dQ.
//
// A warp goes down half of the rows.  Of each row a lane reads a word, two neighbouring keys, of each slab of 64 keys, and goes on to the next word
// every other row: so it stays on three diagonals, 2 m - 1, 2 m and 2 m + 1 (rows less keys, m the lane), and on those 64 before them until
// its words come round.
//
// The sums are [head][key tile, in a fixed order][diagonal of tiles][line] of Diagonals (attn/diagonals.cuh), behind an odd number of others, so that
// pairs of lines from an even diagonal on are aligned.  Of a key tile's own no more than two numbers are added to one, whose order changes nothing.
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

    __device__ __forceinline__ DiagonalSums operator+(const DiagonalSums& other) const {
        return {below + other.below, own + other.own, above + other.above};
    }
    __device__ __forceinline__ DiagonalSums operator-(const DiagonalSums& other) const {
        return {below - other.below, own - other.own, above - other.above};
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

// A tile in the buffer: adds each of its diagonals to memory once for each half of the rows.  All lanes of a warp take part.
__device__ __forceinline__ void add_diagonals(const Params& p, const Shared& shared, u32 buffer, const DqPlace& place) {
    using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;
    const u32 lane = threadIdx.x % 32;
    float* const tile = static_cast<float*>(p.dbias_acc) + 1 + (place.batch * p.heads + place.head) * p.dbias.head + place.n * p.dbias.row +
                        Diagonal::owner(place.m, place.n, p.key_tiles) * Diagonal::lines + Diagonal::line(0);
#pragma unroll 1
    for (i32 first = 0; first < cfg::block_m; first += DiagonalSums::rows) {
        DiagonalSums all[warpgroups], before[warpgroups];
        add_rows(all, before, shared.ds(buffer) + first * row_bytes);
        const DiagonalSums runs[] = {all[0] - before[0], before[0] + (all[1] - before[1]), before[1]};  // of 64 diagonals
        float behind = 0.0f;  // what the run above has of this one's last diagonal
        unroll<3>([&](int run) {
            const float next = __shfl_down_sync(~0u, runs[run].below, 1);
            if (run > 0 || lane < DiagonalSums::rows / 2)
                ptx::red_add_x2(tile + first - 64 * run + 2 * lane, runs[run].own, runs[run].above + (lane == 31 ? behind : next));
            behind = __shfl_sync(~0u, runs[run].below, 0);
        });
    }
    ptx::mbarrier_arrive(shared.barrier(ds_empty + buffer));  // each lane for itself
}

}  // namespace sm90::bwd
