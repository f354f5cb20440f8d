// Tiles in shared memory and the rings that they travel in, for both directions.
//
// A tile of r rows is stored as slabs of 64 columns, [slab][r][64] 16-bit values: each slab is one box of the copy
// engine with the 128-byte swizzle, and what the tensor cores expect as an operand (ptx/wgmma.cuh).
#pragma once
#include "attn/mask_format.cuh"
#include "attn/math.cuh"
#include "attn/params.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"

namespace sm90 {

constexpr int row_bytes = 128;  // one row of a slab
constexpr int slabs = (cfg::head_dim + 63) / 64, slabs_v = (cfg::head_dim_v + 63) / 64;  // of q and k; of v, o and do

// A block's shared memory, as an address for instructions and as a pointer for ordinary reads and writes.
struct SharedMemory {
    u32 address;
    u8* memory;

    template <class T>
    __device__ __forceinline__ T& at(int offset, u32 index = 0) const { return reinterpret_cast<T*>(memory + offset)[index]; }
};

constexpr bool unmasked = cfg::mask == kMaskNone && !cfg::band_left && !cfg::band_right;
constexpr bool may_have_empty_rows = !unmasked, may_have_dead_keys = !unmasked;

// The first of a thread's two rows among the 64 of its warpgroup's accumulators; the other lies 8 further.
__device__ __forceinline__ i32 fragment_row() { return 16 * (threadIdx.x % 128 / 32) + threadIdx.x % 32 / 4; }

// One arrival per warp, for what the tensor cores or the copy engine read or another warp waits for.
__device__ __forceinline__ void release(u32 barrier) {
    __syncwarp();  // an arrival tells of what its own thread did, and by this of what the others did
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// One arrival per thread, for what threads have read: no less would do for racecheck, which does not see that one lane may speak for a warp.
__device__ __forceinline__ void release_read(u32 barrier) { ptx::mbarrier_arrive(barrier); }

// Position in a ring of buffers; `phase` is the parity of the barriers in this round.
template <int stages>
struct Slot {
    u32 stage = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == stages ? 0 : stage + 1;
        phase ^= stage == 0;
    }
    __device__ __forceinline__ Slot before() const { return {stage == 0 ? stages - 1 : stage - 1, phase ^ (stage == 0)}; }
    // Among the buffers of two rounds.
    __device__ __forceinline__ u32 place() const { return phase * stages + stage; }
};

// The same where registers are few: positions in up to three rings of one or two buffers, counted in one register, three bits for each of
// which the last stays 0.
struct Positions {
    u32 counts = 0;
    template <int stages>
    __device__ __forceinline__ Slot<stages> slot(int ring = 0) const {
        static_assert(stages <= 2);
        const u32 count = counts >> 3 * ring & 3;
        return {count % stages, count / stages % 2};
    }
    template <int stages>
    __device__ __forceinline__ operator Slot<stages>() const { return slot<stages>(); }
    __device__ __forceinline__ void advance(int ring = 0) { counts = (counts + (1u << 3 * ring)) & 0333u; }
};

// A condition that all lanes agree on.  Saying so keeps what depends on it, descriptors above all, in uniform
// registers.
__device__ __forceinline__ bool uniform(bool condition) { return __any_sync(~0u, condition); }

// Element (or instance) offset of a head's slice.  Tensor maps have one batch axis, so there is no other.
template <class Strides>
__device__ __forceinline__ i64 slice_of(const Strides& strides, i32 batch, i32 head) {
    return strides.batch[kBatchAxes - 1] * batch + strides.head * head;
}

// A tile's place in the order of work: its head and batch, and how many tiles of the same head come before it.
struct TileRank {
    i32 head, batch, rank;
};

// Tiles are numbered so that neighbours in time share the L2 cache: sections of p.section heads; in a section heads are
// fastest.
__device__ __forceinline__ TileRank rank_of(const Params& p, i32 number, i32 heads, i32 tiles) {
    const i32 section = number / (p.section * tiles);
    const i32 first = section * p.section;
    const i32 width = min(p.section, p.batch * heads - first);
    const i32 within = number - first * tiles;
    const i32 rank = within / width, pair = first + within - rank * width, batch = pair / heads;
    return {pair - batch * heads, batch, rank};
}

// Head and batch of an operand in its tensor map, where a broadcast axis has one element.
struct Place {
    i32 head, batch;

    __device__ __forceinline__ Place(const Operand& operand, i32 head, i32 batch)
        : head(operand.head ? head : 0), batch(operand.batch[kBatchAxes - 1] ? batch : 0) {}
};

// A tile of `rows` rows and slab_count slabs, the first of which begins with a column; `barrier` counts its bytes.
template <int rows, int slab_count>
__device__ __forceinline__ void load_tile(const ptx::TensorMap& map, u32 tile, u32 barrier, u64 policy, i32 row,
                                          const Place& place, i32 column = 0) {
    unroll<slab_count>([&](int slab) {
        ptx::tensor_load(tile + slab * rows * row_bytes, map, barrier, policy, column + 64 * slab, row, place.head, place.batch);
    });
}

}  // namespace sm90
