// The two numbers per query row that backward_preprocess leaves for the other backward kernels.
//
// stat and delta are [batch * heads][padded rows]; counters is [batch * heads][padded rows / kStatRows], of each kStatRows rows whether one sees
// nothing (kEmptyRow) and whether one is steep (kSteepRow).  Every row tile of every kernel lies within one such group of rows.
//
// A row of 16-bit inputs is steep when its maximum is so large that m log2 e + log2 l, rounded, would move its probabilities by more than a
// rounding of float16.  m is then left out of its stat, and taken from each of its scores as the forward rounded them: exactly 0 at the maximum.
//
// With cfg::split_delta tensor cores subtract delta from dP (sm90/bwd_products.cuh), and it is kept as they want it, as three bfloat16
// that add up to it: [batch * heads][row tile][part][64 rows], the units of 16 bytes of a part in swizzled order.
#pragma once
#include "attn/params.cuh"

constexpr i32 kStatRows = 128;
constexpr i32 kEmptyRow = 1, kSteepRow = 2;
constexpr i32 kDeltaParts = 3;
static_assert(kStatRows % cfg::block_m == 0, "a row tile must not straddle two groups");

__device__ __forceinline__ i32 stat_groups(const Params& p) { return (p.n_queries + kStatRows - 1) / kStatRows; }
__device__ __forceinline__ i64 stat_row(const Params& p, i64 flat_head, i64 row) { return flat_head * stat_groups(p) * kStatRows + row; }

__device__ __forceinline__ bool is_steep(float m) { return fabsf(m) > 1024.f; }

// Place of a split delta's part, from the row's number.
__device__ __forceinline__ u32 delta_part(u32 row, u32 part) {
    return (row / 64 * kDeltaParts + part) * 64 + (row % 64 / 8 ^ part) * 8 + row % 8;
}
