// Constants shared by the kernels that write mask tables and those that read them.
#pragma once
#include "ptx/types.cuh"

constexpr int kMaskNone = 0, kMaskColumn = 1, kMaskBlock = 2, kMaskDense = 3;
constexpr u32 kDeadTile = 0x80000000u;  // in the first bound of a key tile: some key of it is seen by no row
