// The tiles of a forward: what follows from the prologue, for the kernel and for bench/studies/loop_order.cu.
#pragma once
#include "sm80/mma_f32.cuh"

using Elem = cfg::elem;
using Product = Mma<Elem>;

constexpr int threads = cfg::warps * 32;
constexpr int warp_rows = cfg::block_m / cfg::warps;
constexpr int m_tiles = warp_rows / 16;
constexpr int n_tiles = cfg::block_n / 8;
constexpr int v_tiles = cfg::head_dim_v / 8;
constexpr int q_bytes = Product::tile_bytes<cfg::block_m, cfg::head_dim>;
constexpr int k_bytes = Product::tile_bytes<cfg::block_n, cfg::head_dim>;
constexpr int v_bytes = Product::tile_bytes<cfg::block_n, cfg::head_dim_v>;

static_assert(cfg::block_m % (16 * cfg::warps) == 0, "a warp owns whole 16-row tiles");
static_assert(cfg::block_n % 16 == 0, "dropout and the products work on 16 keys at a time");
static_assert(cfg::head_dim * sizeof(cfg::elem) % 64 == 0, "tile rows are multiples of 64 bytes");
static_assert(cfg::head_dim_v * sizeof(cfg::elem) % 64 == 0, "tile rows are multiples of 64 bytes");

using Q = Product::QRows<m_tiles, cfg::head_dim>;
