// How the backward divides a tile among warps and shared memory: numbers that follow from the configuration.
//
// Three partitions of the warps, one per kind of product:
//   S, dP   block_m x block_n   scores_m x scores_n warps, each scores_rows x scores_keys
//   dK, dV  block_n x (d, dv)   teams of `slices` warps; a team owns 32 keys, the first half of its warps the columns of dV and the
//                               second half those of dK, `slice_columns` each: a loaded block of dO or Q feeds two products
//   dQ      block_m x d         queries_m x queries_n warps, as square as possible
#pragma once
#include "sm80/bwd_fragments.cuh"

namespace sm80 {

constexpr int threads = 32 * cfg::warps;

constexpr int team_keys = 32;
constexpr int teams = cfg::block_n / team_keys;
constexpr int slices = cfg::warps / teams;
constexpr int widest = cfg::head_dim > cfg::head_dim_v ? cfg::head_dim : cfg::head_dim_v;
constexpr int slice_columns = (2 * widest / slices + 15) / 16 * 16;
static_assert(teams * team_keys == cfg::block_n && slices * teams == cfg::warps, "block_n / 32 must divide the warps");
static_assert(slices % 2 == 0, "a team needs a warp for dV and one for dK");

constexpr int scores_m = cfg::scores_m;
constexpr int scores_n = cfg::warps / scores_m < cfg::block_n / 16 ? cfg::warps / scores_m : cfg::block_n / 16;
constexpr int scores_warps = scores_m * scores_n;  // the others wait
constexpr int scores_rows = cfg::block_m / scores_m;
constexpr int scores_keys = cfg::block_n / scores_n;
static_assert(scores_rows % 16 == 0 && scores_keys % 16 == 0, "a warp computes whole 16 x 16 blocks of scores");
constexpr bool team_local = scores_m == slices && scores_warps == cfg::warps;  // a team's P and dS come from its own warps

constexpr int square_partition() {
    int best = 0, best_cost = 1 << 30;
    for (int m = 1; m <= cfg::warps; m *= 2) {
        const int n = cfg::warps / m;
        if (cfg::block_m % (16 * m) || cfg::head_dim % (16 * n)) continue;
        const int cost = cfg::block_m / m + cfg::head_dim / n;  // elements loaded per step of the contraction
        if (cost < best_cost) best_cost = cost, best = m;
    }
    return best;
}
constexpr int queries_m = square_partition();
static_assert(queries_m > 0, "no partition of dQ into whole 16 x 16 blocks");
constexpr int queries_n = cfg::warps / queries_m;
constexpr int query_rows = cfg::block_m / queries_m;
constexpr int query_columns = cfg::head_dim / queries_n;
// Columns of dQ summed at a time, so that a lane holds few sums beside those of dK and dV.
constexpr int chunk_sums = sizeof(Acc) == 8 ? 16 : widest <= 256 ? 64 : 32;
constexpr int chunk_columns() {
    int columns = query_columns;
    while (query_rows * columns > 32 * chunk_sums && columns % 32 == 0) columns /= 2;
    return columns;
}
constexpr int query_chunk = chunk_columns();
static_assert(query_rows * query_chunk <= 32 * chunk_sums && query_chunk % 16 == 0, "dQ needs more chunks");
constexpr int query_fragments = query_rows / 16 * (query_columns / 8);  // 16 x 8 results per warp, four sums per lane each

// Shared memory, offsets in bytes.  The second dS lets the products with dS of tile i run after the barrier of tile i + 1.
constexpr int qk_stride = row_bytes<cfg::head_dim>;
constexpr int v_stride = row_bytes<cfg::head_dim_v>;
constexpr int p_stride = row_bytes<cfg::block_n>;
constexpr int stat_bytes = cfg::block_m * int(sizeof(Acc));
constexpr bool split_stat = sizeof(Elem) >= 4;                       // m and 1 / l apart (util/bwd_preprocess.cu)
constexpr int row_numbers = (split_stat ? 3 : 2) * stat_bytes;       // stat, delta and 1 / l of a row tile

constexpr int k_at = 0;
constexpr int v_at = k_at + cfg::block_n * qk_stride;
constexpr int q_at = v_at + cfg::block_n * v_stride;
constexpr int do_at = q_at + cfg::stages * cfg::block_m * qk_stride;
constexpr int p_at = do_at + cfg::stages * cfg::block_m * v_stride;
constexpr int ds_at = p_at + cfg::block_m * p_stride;
constexpr int ds_buffers = cfg::stages;
constexpr int stat_at = ds_at + ds_buffers * cfg::block_m * p_stride;
constexpr int shared_bytes = stat_at + cfg::stages * row_numbers;

}  // namespace sm80
