// dS that sm90/bwd.cu keeps for sm90/bwd_dq.cu (cfg::keeps_ds), which multiplies it with k: rounded, in blocks of 64 queries and keys, the bytes of an
// operand of tensor cores, at dbias_acc [head][key tile][row tile].
//
// Pairs of launches keep a slab after the other, so that memory is linear in the rows: that of p.split_tiles key tiles, from p.splits on, of the heads
// from p.shared_key to p.shared_tile, counted through all query heads.  A head's last key tiles come first, and dQ waits unrounded at dq_acc
// [head][row tile][warpgroup], in the order of the registers, for the others.
#pragma once
#include "attn/bwd_workspace.cuh"

namespace sm90 {

constexpr i32 kBlockBytes = 64 * 64 * 2;

// Where blocks share key tiles there is one slab.
__device__ __forceinline__ i32 first_kept(const Params& p) { return cfg::in_parts ? 0 : p.splits; }
__device__ __forceinline__ i32 kept_tiles(const Params& p) { return cfg::in_parts ? p.key_tiles : p.split_tiles; }

__device__ __forceinline__ u8* kept_block(const Params& p, i32 flat_head, i32 key_tile, i32 row_tile) {
    const i64 tile = static_cast<i64>(flat_head - p.shared_key) * kept_tiles(p) + key_tile - first_kept(p);
    return static_cast<u8*>(p.dbias_acc) + (tile * ((p.n_queries + 63) / 64) + row_tile) * kBlockBytes;
}

}  // namespace sm90
