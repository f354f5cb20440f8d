// Sums over all keys y_j for each row x_i by tensor cores, of float32 points with many coordinates (pairwise/points.cuh):
//
//   sum_j k(of_row_i + of_key_j - unit x_i.y_j) v_j to p.sums, or with cfg::logs log2 sum_j 2^(of_key_j + unit x_i.y_j) to p.logs
//
// A warp owns 32 rows.  Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/points.cuh"

using namespace pairwise;

constexpr int kTiles = 2, kRows = 16 * kTiles * kWarps, kOwn = 2 * kTiles;

// Adds the terms of four keys, two of each of two groups of eight.
__device__ __forceinline__ void add_logs(SummedRow& row, float& sum, const float (&s)[4], const float (&of_key)[4], float unit) {
    const auto terms = [&] {
        float total = 0;
        unroll<4>([&](int n) { total += power_of_2(fmaf(s[n], unit, of_key[n]) - row.m); });
        return total;
    };
    float more = terms();
    if (!(more < Range<float>::most)) {
        float greatest = row.m;
        unroll<4>([&](int n) { greatest = fmaxf(greatest, fmaf(s[n], unit, of_key[n])); });
        const float root = power_of_2(0.5f * (row.m - greatest));
        row.totals[0].scale(root);
        sum = sum * root * root;
        row.m = greatest;
        more = terms();
    }
    sum += more;
}

__device__ __forceinline__ void add_tile(SummedRow (&rows)[kOwn], const Points<kTiles>& points, const KeyRow& from, const Tile& tile, float unit) {
    const int lane = threadIdx.x % 32;
    const u32 shared = ptx::shared_address(tile.halves);
    float sums[kOwn][kColumns] = {};
#pragma unroll 1
    for (int group = 0; group < kKeys / 16; ++group) {
        Scores<kTiles> scores;
        scores.add(points, from, shared + 16 * group * kRowBytes);
        const int first = 16 * group + 2 * (lane % 4);
        float of_key[4];
        unroll<4>([&](int n) { of_key[n] = tile.of_key[first + n / 2 * 8 + n % 2]; });
        unroll<kOwn>([&](int r) {
            float s[4];
            unroll<4>([&](int n) { s[n] = scores.total(r / 2, n / 2, r % 2 * 2 + n % 2); });
            if constexpr (cfg::logs) add_logs(rows[r], sums[r][0], s, of_key, unit);
            else {
                unroll<4>([&](int n) {
                    const float z = fmaxf(fmaf(-unit, s[n], rows[r].of_row + of_key[n]), 0.f), k = evaluate<cfg::function>(z).value;
                    unroll<kWidth>([&](int c) { sums[r][c] = fmaf(k, tile.v[first + n / 2 * 8 + n % 2][c], sums[r][c]); });
                });
            }
        });
    }
    unroll<kOwn, kColumns>([&](int r, int c) { rows[r].totals[c].add(sums[r][c]); });
}

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_products(const __grid_constant__ ProductParams p) {
    const Share share(p);
    const OwnRows<kRows, kTiles> own{p, share};

    SummedRow rows[kOwn];
    Points<kTiles> points;
    points.load([&](int r) { return own.point(r); });
    if constexpr (!cfg::logs) unroll<kOwn>([&](int r) { rows[r].of_row = p.of_row[own.place(r)]; });
    const float unit = *p.unit;
    const KeyRow from;
    for_tiles(p, share, [&](const Tile& tile) { add_tile(rows, points, from, tile, unit); });

    unroll<kOwn>([&](int r) { rows[r].store(p, share, own.index(r)); });
}
