// Tiles in shared memory and the rings that they travel in, for both directions.
//
// A tile of r rows is stored as slabs of 64 columns, [slab][r][64] 16-bit values: each slab is one box of the copy
// engine with the 128-byte swizzle, and what the tensor cores expect as an operand (ptx/wgmma.cuh).
#pragma once
#include "attn/params.cuh"
#include "ptx/tma.cuh"

namespace sm90 {

constexpr int row_bytes = 128;  // one row of a slab

// Position in a ring of buffers; `phase` is the parity of the barriers in this round.
template <int stages>
struct Slot {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
};

// A condition that all lanes agree on.  Saying so keeps what depends on it, descriptors above all, in uniform
// registers.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(~0u, condition); }

// Head and batch of an operand in its tensor map, where a broadcast axis has one element.
struct Place {
    i32 head, batch;

    __device__ __forceinline__ Place(const Operand& operand, i32 head, i32 batch)
        : head(operand.head ? head : 0), batch(operand.batch[kBatchAxes - 1] ? batch : 0) {}
};

// A tile of `rows` rows and slab_count slabs; `barrier` counts its bytes.
template <int rows, int slab_count>
__device__ __forceinline__ void load_tile(const ptx::TensorMap& map, u32 tile, u32 barrier, u64 policy, i32 row,
                                          const Place& place) {
#pragma unroll
    for (int slab = 0; slab < slab_count; ++slab)
        ptx::tensor_load(tile + slab * rows * row_bytes, map, barrier, policy, 64 * slab, row, place.head, place.batch);
}

}  // namespace sm90
