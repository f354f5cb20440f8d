// Sums over all keys y_j for each row x_i by tensor cores, of float32 points with many coordinates (pairwise/points.cuh):
//
//   sum_j g_ij (x_i - y_j) to p.directions, sum_j g_ij z_ij to p.moments, and with cfg::values sum_j k_ij v_j to p.sums,
//   with g_ij = (u_i . v_j) (-dk/dw)_ij and z_ij = of_row_i + of_key_j - unit x_i.y_j; with cfg::logs k_ij = g_ij = 2^(of_row_i + of_key_j + unit x_i.y_j)
//
// A warp owns 16 rows.  The g of a tile are left factors of products with its keys, as two halves relative to the power of two of the greatest g
// that a row has had, which grows: so rows of any size keep their digits.
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/points.cuh"

using namespace pairwise;

constexpr int kRows = 16 * kWarps, kGroups = kKeys / 16;

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_split(const __grid_constant__ ProductParams p) { split_keys(p); }

// What a thread has of one of its two rows.
struct Row {
    float of_row, u[kColumns];
    u32 exponent = split::kLeast;  // 2^e of the greatest g so far
    float share, up;               // of the last tile: by what earlier sums shrink, and 2^(14 - e)
    float weight = 0, moment = 0;
    Total<float> values[kColumns];

    // Takes the greatest g of a tile that this thread has.
    __device__ __forceinline__ void refer(float greatest) {
        const u32 next = max(exponent, split::largest<4>(__float_as_uint(greatest)) & 0x7f800000u);
        share = next - exponent < 126u << 23 ? __uint_as_float((127u << 23) - (next - exponent)) : 0.f;
        exponent = next;
        up = split::scale_up(exponent);
    }
};

struct Slopes {
    Row rows[2];
    float pulled[kDim / 8][4] = {};  // sum_j g_ij y_j, relative to 2^(e - 14)

    // The g of a tile, as they lie in accumulators: of group and eight keys.
    __device__ __forceinline__ void weigh(float (&g)[kGroups][2][4], const Points<1>& points, const KeyRow& from, const Tile& tile, u32 shared, float unit) {
        const int lane = threadIdx.x % 32;
        float weights[2] = {}, moments[2] = {}, values[2][kColumns] = {}, greatest[2] = {};
        unroll<kGroups>([&](int group) {
            Scores<1> scores;
            scores.add(points, from, shared + 16 * group * kRowBytes);
            unroll<2, 4>([&](int n, int e) {
                const int key = 16 * group + 8 * n + 2 * (lane % 4) + e % 2, r = e / 2;
                Row& row = rows[r];
                const float s = scores.total(0, n, e), constant = row.of_row + tile.of_key[key];
                const float z = fmaxf(fmaf(-unit, s, constant), 0.f);
                const Value<float> k = [&]() -> Value<float> {
                    if constexpr (cfg::logs) {
                        const float value = power_of_2(fmaf(unit, s, constant));
                        return {value, value};
                    } else return evaluate<cfg::function>(z);
                }();
                float product = 0;
                unroll<kWidth>([&](int c) {
                    product = fmaf(row.u[c], tile.v[key][c], product);
                    if constexpr (cfg::values) values[r][c] = fmaf(k.value, tile.v[key][c], values[r][c]);
                });
                const float own = product * k.slope;
                g[group][n][e] = own;
                greatest[r] = fmaxf(greatest[r], fabsf(own));
                weights[r] += own;
                moments[r] = fmaf(own, z, moments[r]);
            });
        });
        unroll<2>([&](int r) {
            rows[r].weight += weights[r];
            rows[r].moment += moments[r];
            unroll<kColumns>([&](int c) { rows[r].values[c].add(values[r][c]); });
            rows[r].refer(greatest[r]);
        });
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
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Share share(p);
    const auto row_of = [&](int r) { return static_cast<i32>(blockIdx.x) * kRows + 16 * warp + 8 * r + lane / 4; };
    const auto place = [&](int r) { return share.batch * p.n_rows + min(row_of(r), p.n_rows - 1); };

    Slopes found;
    Points<1> points;
    points.load([&](int r) { return p.x + place(r) * kDim; });
    unroll<2>([&](int r) {
        found.rows[r].of_row = p.of_row[place(r)];
        unroll<kColumns>([&](int c) { found.rows[r].u[c] = share.column + c < p.columns ? p.u[place(r) * p.columns + share.column + c] : 0.f; });
    });
    const float unit = *p.unit;
    const KeyRow from;
    const LaneRow<kRowBytes> turned(lane % 16, lane / 16);  // for right factors whose rows are the keys' coordinates
    for_tiles(p, share, [&](const Tile& tile) { found.add(points, from, turned, tile, unit); });

    unroll<2>([&](int r) {
        Row& row = found.rows[r];
        const i32 index = row_of(r);
        const bool writes = index < p.n_rows;
        const i64 at = share.of_blocks() * p.n_rows + index;
        const float weight = over_lanes(row.weight), moment = over_lanes(row.moment), down = 1.f / row.up;
        unroll<kDim / 8, 2>([&](int eight, int e) {
            const int c = 8 * eight + 2 * (lane % 4) + e;
            if (writes) p.directions[at * kDim + c] = fmaf(p.x[place(r) * kDim + c], weight, -down * found.pulled[eight][2 * r + e]);
        });
        if (writes && lane % 4 == 0) p.moments[at] = moment;
        if constexpr (cfg::values) {
            unroll<kWidth>([&](int c) {
                const float sum = over_lanes(row.values[c].sum);
                if (writes && lane % 4 == 0 && share.column + c < p.columns) p.sums[(share.of_parts() * p.n_rows + index) * p.columns + share.column + c] = sum;
            });
        }
    });
}
