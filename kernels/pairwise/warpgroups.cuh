// Tiles of keys that Hopper's copy engine brings, and products of warpgroups, which read them from shared memory while others' functions are taken.
//
// A warpgroup owns 64 rows.  p.v is (batch, groups, tiles, cfg::width, kKeys).
#pragma once
#include "pairwise/points.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace pairwise {

constexpr int kGroups = cfg::warpgroups, kStages = cfg::stages, kAhead = kStages - 2, kRows = 64 * kGroups;
constexpr int kMost = 4, kSums = (kSteps + kMost - 1) / kMost;  // 16 coordinates that one sum takes as tensor cores cut it off, and such sums
constexpr u32 kUnit = kKeys * 16;                               // of eight coordinates, hi or lo, of all keys of a tile

struct alignas(128) Stage {
    uint4 halves[kKeys * kChunks];
    float of_key[kKeys];
    float v[kWidth ? kWidth : 4][kKeys];  // (of no use without columns)
};

struct Shared {
    Stage stages[kStages];
    u64 full[kStages], empty[kStages];

    __device__ __forceinline__ static Shared& of_block() {
        extern __shared__ u8 memory[];
        return *reinterpret_cast<Shared*>((reinterpret_cast<u64>(memory) + 127) / 128 * 128);
    }
};

// The tiles of a block's part, which the first warp asks for.
struct Tiles {
    const uint4* tiles;
    const float* v;
    Shared& shared;
    i32 count;

    __device__ __forceinline__ Tiles(const ProductParams& p, const Share& share, Shared& shared) : shared(shared) {
        const i64 all = p.padded_keys / kKeys, first = share.start / kKeys, groups = gridDim.y / p.parts;
        tiles = p.tiles + (share.batch * all + first) * kBlock;
        v = kWidth ? p.v + ((share.batch * groups + blockIdx.y / p.parts) * all + first) * (kWidth * kKeys) : nullptr;
        count = (share.stop - share.start + kKeys - 1) / kKeys;
    }
    __device__ __forceinline__ void start() const {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < kStages; ++stage) {
                ptx::mbarrier_init(ptx::shared_address(&shared.full[stage]), 1);
                ptx::mbarrier_init(ptx::shared_address(&shared.empty[stage]), 128 * kGroups);
            }
            ptx::mbarrier_init_fence();
        }
        __syncthreads();
        for (int tile = 0; tile < kAhead; ++tile) load(tile);
    }
    __device__ __forceinline__ void load(i32 tile) const {
        if (tile >= count || threadIdx.x >= 32 || !ptx::elected()) return;
        Stage& stage = shared.stages[tile % kStages];
        const u32 full = ptx::shared_address(&shared.full[tile % kStages]);
        constexpr u32 bytes = kBlock * 16, of_v = kWidth * kKeys * 4;
        ptx::mbarrier_arrive_expect(full, bytes + of_v);
        ptx::bulk_load(ptx::shared_address(&stage), tiles + static_cast<i64>(tile) * kBlock, bytes, full);
        if constexpr (kWidth > 0) ptx::bulk_load(ptx::shared_address(stage.v), v + static_cast<i64>(tile) * (kWidth * kKeys), of_v, full);
    }
    // Waits for a tile, and asks for one that will take the place of that before the last.
    __device__ __forceinline__ const Stage& wait(i32 tile) const {
        if (threadIdx.x < 32) {
            if (tile >= 2) ptx::mbarrier_wait(ptx::shared_address(&shared.empty[(tile - 2) % kStages]), (tile - 2) / kStages % 2);
            load(tile + kAhead);
        }
        ptx::mbarrier_wait(ptx::shared_address(&shared.full[tile % kStages]), tile / kStages % 2);
        return shared.stages[tile % kStages];
    }
    // Every thread says that it has read the tile.
    __device__ __forceinline__ void release(i32 tile) const { ptx::mbarrier_arrive(ptx::shared_address(&shared.empty[tile % kStages])); }
};

// x.y of a warpgroup's rows and a tile: element i is of row 8 (i / 2 % 2) + lane / 4 of the warp's and key 8 (i / 4) + 2 (lane % 4) + i % 2.
__device__ __forceinline__ void multiply(float (&s)[kKeys / 2], const Points<1>& points, const Stage& stage) {
    using Multiply = ptx::Product<kKeys>;
    const u32 shared = ptx::shared_address(&stage);
    float high[kSums][kKeys / 2], low[kKeys / 2];
    ptx::wgmma_fence();
    unroll<kSteps>([&](int step) {
        const u64 hi = ptx::wgmma_descriptor_of_units(shared + 2 * step * kUnit, kUnit, 128);
        const u64 lo = ptx::wgmma_descriptor_of_units(shared + (kDim / 8 + 2 * step) * kUnit, kUnit, 128);
        if constexpr (kProducts == 3) {
            Multiply::template rs<false, 1, 0>(low, points.lo[0][step], hi, step != 0);
            Multiply::template rs<false, 1, 0>(low, points.hi[0][step], lo, true);
        }
        Multiply::template rs<false, 1, 0>(high[step / kMost], points.hi[0][step], hi, step % kMost != 0);
    });
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    unroll<kSums>([&](int n) { ptx::wgmma_pin(high[n]); });
    if constexpr (kProducts == 3) ptx::wgmma_pin(low);
    unroll<kKeys / 2>([&](int i) {
        s[i] = high[0][i];
        unroll<kSums - 1>([&](int n) { s[i] += high[n + 1][i]; });
        if constexpr (kProducts == 3) s[i] = fmaf(low[i], split::kLowUnit, s[i]);
    });
}

}  // namespace pairwise
