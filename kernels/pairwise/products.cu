// Sums over all keys y_j for each row x_i by tensor cores, of float32 points with many coordinates (pairwise/points.cuh):
//
//   sum_j k(of_row_i + of_key_j - unit x_i.y_j) v_j to p.sums, or with cfg::logs log2 sum_j 2^(of_key_j + unit x_i.y_j) to p.logs
//
// A warp owns 32 rows.  Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/points.cuh"

using namespace pairwise;

constexpr int kTiles = 2, kRows = 16 * kTiles * kWarps, kOwn = 2 * kTiles;

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_split(const __grid_constant__ ProductParams p) { split_keys(p); }

// What a thread has of a row: its share of the sums.
struct Row {
    float of_row = 0, m = Range<float>::lowest;
    Total<float> totals[kColumns];
};

// Adds the terms of four keys, two of each of two groups of eight.
__device__ __forceinline__ void add_logs(Row& row, float& sum, const float (&s)[4], const float (&of_key)[4], float unit) {
    const auto terms = [&] {
        float total = 0;
        unroll<4>([&](int n) { total += power_of_2(fmaf(s[n], unit, of_key[n] - row.m)); });
        return total;
    };
    float more = terms();
    if (!(more < Range<float>::most)) {
        float greatest = row.m;
        unroll<4>([&](int n) { greatest = fmaxf(greatest, fmaf(s[n], unit, of_key[n])); });
        const float share = power_of_2(row.m - greatest);
        row.totals[0].scale(share);
        sum *= share;
        row.m = greatest;
        more = terms();
    }
    sum += more;
}

__device__ __forceinline__ void add_tile(Row (&rows)[kOwn], const Points<kTiles>& points, const KeyRow& from, const Tile& tile, float unit) {
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    const auto row_of = [&](int r) { return static_cast<i32>(blockIdx.x) * kRows + 16 * kTiles * warp + 8 * r + lane / 4; };
    const auto place = [&](int r) { return share.batch * p.n_rows + min(row_of(r), p.n_rows - 1); };

    Row rows[kOwn];
    Points<kTiles> points;
    points.load([&](int r) { return p.x + place(r) * kDim; });
    if constexpr (!cfg::logs) unroll<kOwn>([&](int r) { rows[r].of_row = p.of_row[place(r)]; });
    const float unit = *p.unit;
    const KeyRow from;
    for_tiles(p, share, [&](const Tile& tile) { add_tile(rows, points, from, tile, unit); });

    unroll<kOwn>([&](int r) {
        const i32 row = row_of(r);
        const bool writes = lane % 4 == 0 && row < p.n_rows;
        const i64 at = share.of_parts() * p.n_rows + row;
        if constexpr (cfg::logs) {
            float m = fmaxf(rows[r].m, __shfl_xor_sync(~0u, rows[r].m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            const float l = quad_sum(rows[r].totals[0].sum * power_of_2(rows[r].m - m));
            if (writes) p.logs[at] = l == 0.f ? -infinity<float>() : m + log2(l);
        } else {
            unroll<kWidth>([&](int c) {
                const float sum = quad_sum(rows[r].totals[c].sum);
                if (writes && share.column + c < p.columns) p.sums[at * p.columns + share.column + c] = sum;
            });
        }
    });
}
