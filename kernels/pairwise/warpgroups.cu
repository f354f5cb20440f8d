// The sums of pairwise/products.cu by products of warpgroups (pairwise/warpgroups.cuh).
//
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/warpgroups.cuh"

using namespace pairwise;

// s: x.y, of which a row has two of four.
__device__ __forceinline__ void add_logs(SummedRow& row, int r, const float (&s)[kKeys / 2], const Stage& stage, float unit) {
    const int first = 2 * (threadIdx.x % 4);
    const auto each = [&](const auto& work) {
        unroll<kKeys / 8>([&](int n) {
            const float2 of_key = *reinterpret_cast<const float2*>(&stage.of_key[8 * n + first]);
            work(s[4 * n + 2 * r], of_key.x);
            work(s[4 * n + 2 * r + 1], of_key.y);
        });
    };
    const auto terms = [&] {
        float total = 0;
        each([&](float s, float of_key) { total += power_of_2(fmaf(s, unit, of_key) - row.m); });
        return total;
    };
    float more = terms();
    if (!(more < Range<float>::most)) {
        float greatest = row.m;
        each([&](float s, float of_key) { greatest = fmaxf(greatest, fmaf(s, unit, of_key)); });
        row.totals[0].scale(power_of_2(0.5f * (row.m - greatest)));
        row.m = greatest;
        more = terms();
    }
    row.totals[0].add(more);
}

__device__ __forceinline__ void add_values(SummedRow (&rows)[2], const float (&s)[kKeys / 2], const Stage& stage, float unit) {
    const int first = 2 * (threadIdx.x % 4);
    float sums[2][kColumns] = {};
    unroll<kKeys / 8>([&](int n) {
        const float2 of_key = *reinterpret_cast<const float2*>(&stage.of_key[8 * n + first]);
        float2 v[kColumns];
        unroll<kWidth>([&](int c) { v[c] = *reinterpret_cast<const float2*>(&stage.v[c][8 * n + first]); });
        unroll<2, 2>([&](int r, int e) {
            const float z = fmaxf(fmaf(-unit, s[4 * n + 2 * r + e], rows[r].of_row + (e ? of_key.y : of_key.x)), 0.f);
            const float k = evaluate<cfg::function>(z).value;
            unroll<kWidth>([&](int c) { sums[r][c] = fmaf(k, e ? v[c].y : v[c].x, sums[r][c]); });
        });
    });
    unroll<2, kWidth>([&](int r, int c) { rows[r].totals[c].add(sums[r][c]); });
}

extern "C" __global__ __launch_bounds__(128 * kGroups, 1) void pairwise_warpgroups(const __grid_constant__ ProductParams p) {
    const Share share(p);
    const Tiles tiles(p, share, Shared::of_block());
    tiles.start();
    const OwnRows<kRows> own{p, share};

    SummedRow rows[2];
    Points<1> points;
    points.load([&](int r) { return own.point(r); });
    if constexpr (!cfg::logs) unroll<2>([&](int r) { rows[r].of_row = p.of_row[own.place(r)]; });
    const float unit = *p.unit;
    for (i32 tile = 0; tile < tiles.count; ++tile) {
        const Stage& stage = tiles.wait(tile);
        float s[kKeys / 2];
        multiply(s, points, stage);
        if constexpr (cfg::logs) unroll<2>([&](int r) { add_logs(rows[r], r, s, stage, unit); });
        else add_values(rows, s, stage, unit);
        tiles.release(tile);
    }

    unroll<2>([&](int r) { rows[r].store(p, share, own.index(r)); });
}
