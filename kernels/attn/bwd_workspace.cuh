// The two numbers per query row that backward_preprocess leaves for the other backward kernels.
//
// stat and delta are [batch * heads][padded rows]; counters is [batch * heads][padded rows / kStatRows], the flags of kStatRows rows: kEmptyRows
// where one of them sees nothing, kFarRows where one is far.  Every row tile of every kernel lies within one such group of rows.
//
// A row of 16-bit input is far when its m is so large that m log2 e, rounded, would move its probabilities by half a rounding of float16.  Its stat
// is without m, which is taken from the scores before they are scaled, both as the forward rounded them: the difference is 0 at the maximum.
//
// With cfg::split_delta tensor cores subtract delta from dP (sm90/bwd_scores.cuh), and it is kept as they want it, as three bfloat16
// that add up to it: [batch * heads][row tile][part][64 rows], the units of 16 bytes of a part in swizzled order.
#pragma once
#include "attn/math.cuh"
#include "attn/params.cuh"

constexpr i32 kStatRows = 128;

// What the main kernel for compute capability 9.0 makes of dS beside dQ and dK (cfg::dbias): nothing (sm90/bwd_dbias.cu makes the gradient of a
// bias); its sums over queries, for a bias of keys; dS as it is, for a bias of its own; for the arrays of a score function weighted sums over
// queries, or those along diagonals, too.
enum Dbias { kDbiasElsewhere, kDbiasOfKeys, kDbiasStored, kDbiasWeighted, kDbiasDiagonals };
constexpr i32 kDeltaParts = 3;
constexpr i32 kEmptyRows = 1, kFarRows = 2;
static_assert(kStatRows % cfg::block_m == 0, "a row tile must not straddle two groups");

__device__ __forceinline__ i32 stat_groups(const Params& p) { return (p.n_queries + kStatRows - 1) / kStatRows; }
__device__ __forceinline__ i64 stat_row(const Params& p, i64 flat_head, i64 row) { return flat_head * stat_groups(p) * kStatRows + row; }

__device__ __forceinline__ bool is_far_row(cfg::acc m) { return size_of(m) > cfg::acc(1024) && m != -infinity<cfg::acc>(); }

// The flags of all threads' rows together.
__device__ __forceinline__ i32 all_flags(bool empty, bool far) {
    const i32 flags = __syncthreads_or(empty) ? kEmptyRows : 0;
    return __syncthreads_or(far) ? flags | kFarRows : flags;
}

// Place of a split delta's part, from the row's number.
__device__ __forceinline__ u32 delta_part(u32 row, u32 part) {
    return (row / 64 * kDeltaParts + part) * 64 + (row % 64 / 8 ^ part) * 8 + row % 8;
}
