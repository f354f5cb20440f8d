// The sums of pairwise/slopes.cu by products of warpgroups (pairwise/warpgroups.cuh): the g of a tile are left factors in registers, and its keys
// right factors as they lie.
//
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/weights.cuh"
#include "pairwise/warpgroups.cuh"

using namespace pairwise;

constexpr int kOwn = kKeys / 2;                                              // of a tile's g
constexpr int kFirst = kDim <= 64 ? kDim : (kDim / 2 + 15) / 16 * 16;  // coordinates of the first of two products

struct Slopes {
    WeightedRow rows[2];
    float pulled[kDim / 2] = {};  // sum_j g_ij y_j, relative to 2^(e - 14)

    __device__ __forceinline__ void weigh(float (&g)[kOwn], const Stage& stage, float unit) {
        TileWeights tile;
        unroll<kKeys / 8, 4>([&](int n, int e) {
            const int key = 8 * n + 2 * (threadIdx.x % 4) + e % 2;
            g[4 * n + e] = tile.weigh(rows[e / 2], e / 2, g[4 * n + e], stage.of_key[key], unit, [&](int c) { return stage.v[c][key]; });
        });
        tile.add_to(rows);
    }

    // Coordinates [first, first + columns) of the sum over a tile's keys.
    template <int first, int columns>
    __device__ __forceinline__ void pull(const u32 (&hi)[kKeys / 16][4], const u32 (&lo)[kKeys / 16][4], u32 shared) {
        using Multiply = ptx::Product<columns>;
        float high[columns / 2], low[columns / 2];
        ptx::wgmma_fence();
        unroll<kKeys / 16>([&](int step) {
            const u64 of_hi = ptx::wgmma_descriptor_of_units(shared + first / 8 * kUnit + 256 * step, 128, kUnit);
            const u64 of_lo = ptx::wgmma_descriptor_of_units(shared + (kDim + first) / 8 * kUnit + 256 * step, 128, kUnit);
            if constexpr (kProducts == 3) {
                Multiply::template rs<false, 1, 1>(low, lo[step], of_hi, step != 0);
                Multiply::template rs<false, 1, 1>(low, hi[step], of_lo, true);
            }
            Multiply::template rs<false, 1, 1>(high, hi[step], of_hi, step != 0);
        });
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(high);
        if constexpr (kProducts == 3) ptx::wgmma_pin(low);
        unroll<columns / 2>([&](int i) {
            const float sum = kProducts == 3 ? fmaf(low[i], split::kLowUnit, high[i]) : high[i];
            pulled[first / 2 + i] = fmaf(pulled[first / 2 + i], rows[i / 2 % 2].share, sum);
        });
    }

    __device__ __forceinline__ void add(const Points<1>& points, const Stage& stage, float unit) {
        u32 hi[kKeys / 16][4], lo[kKeys / 16][4];
        {
            float g[kOwn];
            multiply(g, points, stage);
            weigh(g, stage, unit);
            unroll<kKeys / 16, 4>([&](int step, int n) {
                const int i = 8 * step + 4 * (n / 2) + 2 * (n % 2);
                const float up = rows[n % 2].up;
                split::split_pair<1 << split::kLow>(hi[step][n], lo[step][n], g[i] * up, g[i + 1] * up);
            });
        }
        const u32 shared = ptx::shared_address(&stage);
        pull<0, kFirst>(hi, lo, shared);
        if constexpr (kFirst < kDim) pull<kFirst, kDim - kFirst>(hi, lo, shared);
    }
};

extern "C" __global__ __launch_bounds__(128 * kGroups, 1) void pairwise_warpgroup_slopes(const __grid_constant__ ProductParams p) {
    const Share share(p);
    const Tiles tiles(p, share, Shared::of_block());
    tiles.start();
    const OwnRows<kRows> own{p, share};

    Slopes found;
    Points<1> points;
    points.load([&](int r) { return own.point(r); });
    unroll<2>([&](int r) { found.rows[r].load(p, share, own.place(r)); });
    const float unit = *p.unit;
    for (i32 tile = 0; tile < tiles.count; ++tile) {
        found.add(points, tiles.wait(tile), unit);
        tiles.release(tile);
    }
    unroll<2>([&](int r) {
        found.rows[r].store(p, share, own.index(r), own.place(r), [&](int eight, int e) { return found.pulled[4 * eight + 2 * r + e]; });
    });
}
