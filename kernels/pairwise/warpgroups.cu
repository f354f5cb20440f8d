// The sums of pairwise/products.cu by products of warpgroups (pairwise/warpgroups.cuh).
//
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/warpgroups.cuh"

using namespace pairwise;

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_split(const __grid_constant__ ProductParams p) { split_keys(p); }

// What a thread has of a row: its share of the sums.
struct Row {
    float of_row = 0, m = Range<float>::lowest;
    Total<float> totals[kColumns];
};

// s: x.y, of which a row has two of four.
__device__ __forceinline__ void add_logs(Row& row, int r, const float (&s)[kKeys / 2], const Stage& stage, float unit) {
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
        each([&](float s, float of_key) { total += power_of_2(fmaf(s, unit, of_key - row.m)); });
        return total;
    };
    float more = terms();
    if (!(more < Range<float>::most)) {
        float greatest = row.m;
        each([&](float s, float of_key) { greatest = fmaxf(greatest, fmaf(s, unit, of_key)); });
        row.totals[0].scale(power_of_2(row.m - greatest));
        row.m = greatest;
        more = terms();
    }
    row.totals[0].add(more);
}

__device__ __forceinline__ void add_values(Row (&rows)[2], const float (&s)[kKeys / 2], const Stage& stage, float unit) {
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
    extern __shared__ u8 memory[];
    Shared& shared = *reinterpret_cast<Shared*>((reinterpret_cast<u64>(memory) + 127) / 128 * 128);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    const Tiles tiles(p, share, shared);
    tiles.start();
    const auto row_of = [&](int r) { return static_cast<i32>(blockIdx.x) * kRows + 16 * warp + 8 * r + lane / 4; };
    const auto place = [&](int r) { return share.batch * p.n_rows + min(row_of(r), p.n_rows - 1); };

    Row rows[2];
    Points<1> points;
    points.load([&](int r) { return p.x + place(r) * kDim; });
    if constexpr (!cfg::logs) unroll<2>([&](int r) { rows[r].of_row = p.of_row[place(r)]; });
    const float unit = *p.unit;
    for (i32 tile = 0; tile < tiles.count; ++tile) {
        const Stage& stage = tiles.wait(tile);
        float s[kKeys / 2];
        multiply(s, points, stage);
        if constexpr (cfg::logs) unroll<2>([&](int r) { add_logs(rows[r], r, s, stage, unit); });
        else add_values(rows, s, stage, unit);
        tiles.release(tile);
    }

    unroll<2>([&](int r) {
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
