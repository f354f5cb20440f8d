// Where the kernels that sum what arrays of a score function need of dS (kernels/sm80/bwd_score.cu, kernels/sm90/bwd_score.cu) walk, and what shares a sum.
#pragma once
#include "attn/math.cuh"
#include "attn/score_sums.cuh"

constexpr int weights = cfg::weights;
using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;

// Which scores share an index in weight k; and how many weights before it share as much.
__device__ __forceinline__ constexpr int shared_by(int k) { return cfg::shared >> (3 * k) & 7; }
__device__ __forceinline__ constexpr int count_alike(int k) {
    int count = 0;
    for (int other = 0; other < k; ++other) count += shared_by(other) == shared_by(k);
    return count;
}
__device__ __forceinline__ constexpr bool is_summed(int k) { return shared_by(k) == kShareLine || shared_by(k) == kShareHead; }

// Where a block walks: of each of its key tiles the range of row tiles.
struct ScoreWalk {
    i32 owner, flat, flat_end, key_begin, key_end;

    __device__ __forceinline__ explicit ScoreWalk(const ScoreSumsParams& p) {
        const i32 block = blockIdx.x, heads = p.batch * p.heads;
        owner = cfg::walk == kWalkHeads ? block : block % p.owners;
        if constexpr (cfg::walk == kWalkDiagonals) {  // from the middle outwards
            const i32 middle = ((p.key_tiles - 1) * cfg::block_n) / Diagonal::step, reach = min(middle, p.owners - 1 - middle);
            const i32 from_middle = (owner + 1) / 2;
            if (owner <= 2 * reach) owner = middle + (owner % 2 ? from_middle : -from_middle);
            else if (middle == reach) {}
            else owner = p.owners - 1 - owner;
        }
        flat = cfg::walk == kWalkHeads ? 0 : block / p.owners;
        flat_end = cfg::walk == kWalkHeads ? heads : flat + 1;
        const bool one_key_tile = cfg::walk == kWalkKeys || cfg::walk == kWalkHeads;
        key_begin = one_key_tile ? owner % p.key_tiles : 0;
        key_end = one_key_tile ? key_begin + 1 : p.key_tiles;
    }
    __device__ __forceinline__ void rows(const Params& p, i32 key_tile, i32& begin, i32& end) const {
        begin = 0, end = p.row_tiles;
        if constexpr (cfg::walk == kWalkKeys) return;
        if constexpr (cfg::walk == kWalkRows) begin = owner;
        if constexpr (cfg::walk == kWalkHeads) begin = owner / p.key_tiles;
        if constexpr (cfg::walk == kWalkDiagonals) {
            const i32 first_row = key_tile * cfg::block_n + Diagonal::corner(owner, p.key_tiles);
            begin = first_row < 0 || first_row % cfg::block_m ? p.row_tiles : first_row / cfg::block_m;
        }
        end = min(begin + 1, p.row_tiles);
    }
};

// The elements of line x of a tile of sums: along it, or all of them.
template <class Acc>
__device__ __forceinline__ Acc line_sum(const Acc* tile, int stride, int x) {
    constexpr int rows = cfg::block_m, keys = cfg::block_n;
    const int first = cfg::walk == kWalkDiagonals ? max(0, x - (keys - 1)) : 0;
    const int end = cfg::walk == kWalkKeys ? rows : cfg::walk == kWalkRows ? keys : min(rows, x + 1);
    Acc sum = 0;
    for (int e = first; e < end; ++e) {
        const int row = cfg::walk == kWalkRows ? x : e;
        const int key = cfg::walk == kWalkKeys ? x : cfg::walk == kWalkRows ? e : e - (x - (keys - 1));
        sum += tile[row * stride + key];
    }
    return sum;
}
