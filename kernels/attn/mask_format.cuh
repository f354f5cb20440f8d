// Which masks a problem has, and what the kernels that write mask tables and those that read them agree on.
#pragma once
#include "ptx/types.cuh"

// cfg::mask is a sum: the number of column masks, and one term for a mask of each other kind.  All hold together.
constexpr int kMaskNone = 0, kMaskColumn = 1, kMaskBlock = 8, kMaskBoolean = 16, kMaskFunction = 32;
constexpr int kMaxColumnMasks = 4;

constexpr int column_masks = cfg::mask % kMaskBlock;
constexpr bool block_mask = (cfg::mask & kMaskBlock) != 0, boolean_mask = (cfg::mask & kMaskBoolean) != 0,
               function_mask = (cfg::mask & kMaskFunction) != 0;
constexpr bool stated_mask = boolean_mask || function_mask;  // whose tiles' states are in a table
constexpr bool alive_table = block_mask || stated_mask;      // else the column tables say which keys no row sees

constexpr u32 kDeadTile = 0x80000000u;  // in the first bound of a key tile: some key of it is seen by no row

// A tile's state in its table, two bits: what is set of some elements adds up.  A word holds the states of 4 x 4 tiles.
constexpr u32 kSomeSeen = 1, kSomeHidden = 2;

__device__ __forceinline__ i64 state_word(i32 m, i32 n, i32 key_tiles) { return static_cast<i64>(m / 4) * ((key_tiles + 3) / 4) + n / 4; }
__device__ __forceinline__ int state_shift(i32 m, i32 n) { return 2 * (m % 4 * 4 + n % 4); }
