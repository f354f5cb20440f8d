// Sums over all keys y_j for each row x_i by tensor cores, of float32 points with many coordinates (pairwise/points.cuh):
//
//   sum_j g_ij (x_i - y_j) to p.directions, sum_j g_ij z_ij to p.moments, and with cfg::values sum_j k_ij v_j to p.sums,
//   with g_ij = (u_i . v_j) (-dk/dw)_ij and z_ij = of_row_i + of_key_j - unit x_i.y_j; with cfg::logs k_ij = g_ij = 2^(of_row_i + of_key_j + unit x_i.y_j)
//
// A warp owns 16 rows (pairwise/weights.cuh).
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/weights.cuh"

using namespace pairwise;

constexpr int kRows = 16 * kWarps, kGroups = kKeys / 16;

struct Slopes {
    WeightedRow rows[2];
    float pulled[kDim / 8][4] = {};  // sum_j g_ij y_j, relative to 2^(e - 14)

    // The g of a tile, as they lie in accumulators: of group and eight keys.
    __device__ __forceinline__ void weigh(float (&g)[kGroups][2][4], const Points<1>& points, const KeyRow& from, const Tile& tile, u32 shared, float unit) {
        TileWeights tile_weights;
        unroll<kGroups>([&](int group) {
            Scores<1> scores;
            scores.add(points, from, shared + 16 * group * kRowBytes);
            unroll<2, 4>([&](int n, int e) {
                const int key = 16 * group + 8 * n + 2 * (threadIdx.x % 4) + e % 2;
                g[group][n][e] = tile_weights.weigh(rows[e / 2], e / 2, scores.total(0, n, e), tile.of_key[key], unit, [&](int c) { return tile.v[key][c]; });
            });
        });
        tile_weights.add_to(rows);
    }

    __device__ __forceinline__ void add(const Points<1>& points, const KeyRow& from, const LaneRow<kRowBytes>& turned, const Tile& tile, float unit) {
        const u32 shared = ptx::shared_address(tile.halves);
        u32 hi[kGroups][4], lo[kGroups][4];
        {
            float g[kGroups][2][4];
            weigh(g, points, from, tile, shared, unit);
            unroll<kGroups, 4>([&](int group, int n) {
                const float *own = g[group][n / 2] + n % 2 * 2, up = rows[n % 2].up;
                split::split_pair<1 << split::kLow>(hi[group][n], lo[group][n], own[0] * up, own[1] * up);
            });
        }
        unroll<kDim / 8>([&](int eight) {
            split::Sums<kProducts, 1> sums;
            unroll<kGroups>([&](int group) {
                u32 b[4];
                ptx::ldmatrix_x4_trans(b, shared + 16 * group * kRowBytes + turned.offset(eight));
                sums.add(0, hi[group], lo[group], b);
            });
            unroll<4>([&](int e) { pulled[eight][e] = fmaf(pulled[eight][e], rows[e / 2].share, sums.total(0, e)); });
        });
    }
};

extern "C" __global__ __launch_bounds__(kThreads, kDim <= 32 ? 4 : kDim <= 64 ? 3 : 1) void pairwise_slopes(const __grid_constant__ ProductParams p) {
    const int lane = threadIdx.x % 32;
    const Share share(p);
    const OwnRows<kRows> own{p, share};

    Slopes found;
    Points<1> points;
    points.load([&](int r) { return own.point(r); });
    unroll<2>([&](int r) { found.rows[r].load(p, share, own.place(r)); });
    const float unit = *p.unit;
    const KeyRow from;
    const LaneRow<kRowBytes> turned(lane % 16, lane / 16);  // for right factors whose rows are the keys' coordinates
    for_tiles(p, share, [&](const Tile& tile) { found.add(points, from, turned, tile, unit); });

    unroll<2>([&](int r) {
        found.rows[r].store(p, share, own.index(r), own.place(r), [&](int eight, int e) { return found.pulled[eight][2 * r + e]; });
    });
}
