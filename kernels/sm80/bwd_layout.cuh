// How the backward divides a tile among warps and shared memory: numbers that follow from the configuration.
//
// Three partitions of the warps, one per kind of product:
//   S, dP   block_m x block_n   scores_m x scores_n warps, each scores_rows x scores_keys
//   dK, dV  block_n x (d, dv)   teams of `slices` warps; a team owns 32 keys, the first half of its warps the columns of dV and the
//                               second half those of dK, slice_columns(dv or d) each: a loaded block of dO or Q feeds two products
//   dQ      block_m x d         as square as possible (QueryShares); all or half of them
#pragma once
#include "sm80/bwd_tiles.cuh"

constexpr int threads = 32 * cfg::warps;

constexpr int team_keys = 32;
constexpr int teams = cfg::block_n / team_keys;
constexpr int slices = cfg::warps / teams;
constexpr int widest = cfg::head_dim > cfg::head_dim_v ? cfg::head_dim : cfg::head_dim_v;
constexpr int slice_columns(int width) { return (2 * width / slices + 15) / 16 * 16; }  // the last warps may have none
static_assert(teams * team_keys == cfg::block_n && slices * teams == cfg::warps, "block_n / 32 must divide the warps");
static_assert(slices % 2 == 0, "a team needs a warp for dV and one for dK");
static_assert(cfg::head_dim % slice_columns(cfg::head_dim) == 0 && cfg::head_dim_v % slice_columns(cfg::head_dim_v) == 0, "slices are whole");

constexpr int scores_m = cfg::scores_m;
constexpr int scores_n = cfg::warps / scores_m < cfg::block_n / 16 ? cfg::warps / scores_m : cfg::block_n / 16;
constexpr int scores_warps = scores_m * scores_n;  // the others wait
constexpr int scores_rows = cfg::block_m / scores_m;
constexpr int scores_keys = cfg::block_n / scores_n;
static_assert(scores_rows % 16 == 0 && scores_keys % 16 == 0, "a warp computes whole 16 x 16 blocks of scores");
constexpr bool team_local = scores_m == slices && scores_warps == cfg::warps;  // a team's P and dS come from its own warps

// Where half of the warps suffice for the scores, as they do where tiles of float64 are small, the other half computes dP meanwhile.  In two
// stages the halves change places with every row tile (walk_alternating in sm80/bwd.cu), and who computes dP adds dQ of the tile before.
constexpr bool paired = sizeof(Elem) == 8 && 2 * scores_warps == cfg::warps;
constexpr int exchange_bytes = paired ? cfg::block_m * cfg::block_n * int(sizeof(Acc)) : 0;  // a tile of dP on its way
constexpr bool alternating = paired && cfg::stages == 2 && cfg::atomic_dq;
constexpr bool may_share = alternating && cfg::flush_every > 0;  // blocks may share the keys of a tile
constexpr int query_warps = alternating ? scores_warps : cfg::warps;  // that share a tile of dQ
__device__ __forceinline__ i32 query_warp() { return threadIdx.x / 32 % query_warps; }

// How `warps` share a tile of dQ, of block_m x `width`, as evenly as possible: the warps along its rows, and a warp's part.
template <int width, int warps>
struct QueryShares {
    static constexpr int square_partition() {
        int best = 0, best_cost = 1 << 30;
        for (int m = 1; m <= warps; m *= 2) {
            const int n = warps / m;
            if (cfg::block_m % (16 * m) || width % (16 * n)) continue;
            const int cost = cfg::block_m / m + width / n;  // elements loaded per step of the contraction
            if (cost < best_cost) best_cost = cost, best = m;
        }
        return best;
    }
    static_assert(square_partition() > 0, "no partition of dQ into whole 16 x 16 blocks");
    static constexpr int rows = cfg::block_m / square_partition(), columns = width / (warps / square_partition());
    __device__ __forceinline__ static i32 row() { return threadIdx.x / 32 % warps % square_partition() * rows; }
    __device__ __forceinline__ static i32 column() { return threadIdx.x / 32 % warps / square_partition() * columns; }
};
using Queries = QueryShares<(cfg::chunk > 0 ? cfg::chunk : cfg::head_dim), query_warps>;

// Rows of a tile in shared memory, in bytes, and what goes with tiles.
constexpr int qk_stride = row_bytes<cfg::head_dim>;
constexpr int v_stride = row_bytes<cfg::head_dim_v>;
constexpr int p_stride = row_bytes<cfg::block_n>;
constexpr int stat_bytes = cfg::block_m * int(sizeof(Acc));
constexpr bool split_stat = sizeof(Elem) >= 4;                       // m and 1 / l apart (util/bwd_preprocess.cu)
constexpr int row_numbers = (split_stat ? 3 : 2) * stat_bytes;       // stat, delta and 1 / l of a row tile
constexpr int row_units = cfg::block_m / 16 * unit_bytes, key_units = cfg::block_n / 16 * unit_bytes;  // of one tile
constexpr int weight_units = cfg::block_m / 16 * key_units;                                            // of P or dS

// Shared memory of a kernel that holds whole tiles: k and v in `key_stages` stages, q, do and the numbers of their rows in `row_stages`, P if it is
// kept, dS.  A second dS lets the products with dS of tile i run after the barrier of tile i + 1.
template <int row_stages, int key_stages, bool keeps_p, int ds_buffers>
struct Space {
    u32 base;  // shared address

    static constexpr int v_at = key_stages * cfg::block_n * qk_stride;
    static constexpr int q_at = v_at + key_stages * cfg::block_n * v_stride;
    static constexpr int do_at = q_at + row_stages * cfg::block_m * qk_stride;
    static constexpr int p_at = do_at + row_stages * cfg::block_m * v_stride;
    static constexpr int ds_at = p_at + keeps_p * cfg::block_m * p_stride;
    static constexpr int stat_at = ds_at + ds_buffers * cfg::block_m * p_stride;
    static constexpr int k_units_at = stat_at + row_stages * row_numbers;
    static constexpr int v_units_at = k_units_at + key_stages * key_units;
    static constexpr int q_units_at = v_units_at + key_stages * key_units;
    static constexpr int do_units_at = q_units_at + row_stages * row_units;
    static constexpr int p_units_at = do_units_at + row_stages * row_units;
    static constexpr int ds_units_at = p_units_at + keeps_p * weight_units;
    static constexpr int end = ds_units_at + ds_buffers * weight_units;
    static constexpr bool exchange_in_p = keeps_p && paired && !cfg::sloped;  // times its slope, P is stored before dP comes
    static constexpr int exchange_at = exchange_in_p ? p_at : end, bytes = end + (exchange_in_p ? 0 : exchange_bytes);

    __device__ __forceinline__ TileAt k(int stage = 0) const { return {base + stage * cfg::block_n * qk_stride, base + k_units_at + stage * key_units}; }
    __device__ __forceinline__ TileAt v(int stage = 0) const { return {base + v_at + stage * cfg::block_n * v_stride, base + v_units_at + stage * key_units}; }
    __device__ __forceinline__ TileAt q(int stage = 0) const { return {base + q_at + stage * cfg::block_m * qk_stride, base + q_units_at + stage * row_units}; }
    __device__ __forceinline__ TileAt dout(int stage = 0) const { return {base + do_at + stage * cfg::block_m * v_stride, base + do_units_at + stage * row_units}; }
    __device__ __forceinline__ TileAt p() const { return {base + p_at, base + p_units_at}; }
    __device__ __forceinline__ TileAt ds(int stage = 0) const { return {base + ds_at + stage * cfg::block_m * p_stride, base + ds_units_at + stage * weight_units}; }
    __device__ __forceinline__ u32 numbers(int stage = 0) const { return base + stat_at + stage * row_numbers; }
    __device__ __forceinline__ u32 exchange() const { return base + exchange_at; }
};
using KeySpace = Space<cfg::stages, 1, true, cfg::stages>;  // of the key kernel
constexpr int shared_bytes = KeySpace::bytes;
