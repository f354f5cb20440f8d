// What follows from the prologue, for kernels that work on tiles.
#pragma once
#include "attn/mask_format.cuh"
#include "sm80/mma_f32.cuh"
#include "attn/params.cuh"

namespace config {

constexpr int threads = cfg::warps * 32;
constexpr int warp_rows = cfg::block_m / cfg::warps;
constexpr int m_tiles = warp_rows / 16;
constexpr int n_tiles = cfg::block_n / 8;
constexpr int v_tiles = cfg::head_dim_v / 8;
constexpr int q_bytes = Mma<cfg::elem>::tile_bytes<cfg::block_m, cfg::head_dim>;
constexpr int k_bytes = Mma<cfg::elem>::tile_bytes<cfg::block_n, cfg::head_dim>;
constexpr int v_bytes = Mma<cfg::elem>::tile_bytes<cfg::block_n, cfg::head_dim_v>;
constexpr int cols_bytes = column_masks > 0 ? cfg::block_n * 16 : 0;  // intervals of the tile's keys in the first column mask
constexpr int stage_bytes = k_bytes + v_bytes + cols_bytes;

static_assert(cfg::block_m % (16 * cfg::warps) == 0, "a warp owns whole 16-row tiles");
static_assert(cfg::block_n % 16 == 0, "dropout and the products work on 16 keys at a time");
static_assert(cfg::head_dim * sizeof(cfg::elem) % 64 == 0, "tile rows are multiples of 64 bytes");
static_assert(cfg::head_dim_v * sizeof(cfg::elem) % 64 == 0, "tile rows are multiples of 64 bytes");

}  // namespace config
