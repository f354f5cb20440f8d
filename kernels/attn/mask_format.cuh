// Which masks a problem has, and what the kernels that write mask tables and those that read them agree on.
#pragma once
#include "ptx/types.cuh"

// cfg::mask is a sum: the number of column masks, and one term for a block mask and for a boolean one.  All hold together.
constexpr int kMaskNone = 0, kMaskColumn = 1, kMaskBlock = 8, kMaskBoolean = 16;
constexpr int kMaxColumnMasks = 4;

constexpr int column_masks = cfg::mask % kMaskBlock;
constexpr bool block_mask = (cfg::mask & kMaskBlock) != 0, boolean_mask = (cfg::mask & kMaskBoolean) != 0;
constexpr bool alive_table = block_mask || boolean_mask;  // else the column tables say which keys no row sees

constexpr u32 kDeadTile = 0x80000000u;  // in the first bound of a key tile: some key of it is seen by no row
