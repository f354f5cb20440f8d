// The two numbers per query row that backward_preprocess leaves for the other backward kernels.
//
// stat and delta are [batch * heads][padded rows]; counters is [batch * heads][padded rows / kStatRows], not 0 where one of kStatRows rows
// sees nothing.  Every row tile of every kernel lies within one such group of rows.
#pragma once
#include "attn/params.cuh"

constexpr i32 kStatRows = 128;
static_assert(kStatRows % cfg::block_m == 0, "a row tile must not straddle two groups");

__device__ __forceinline__ i32 stat_groups(const Params& p) { return (p.n_queries + kStatRows - 1) / kStatRows; }
__device__ __forceinline__ i64 stat_row(const Params& p, i64 flat_head, i64 row) { return flat_head * stat_groups(p) * kStatRows + row; }
