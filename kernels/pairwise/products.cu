// Sums over all keys y_j for each row x_i, of a function k of |x_i - y_j|, from products by tensor cores; of float32 points with many coordinates:
//
// cfg::reduction 0   sum_j k(of_row_i + of_key_j - unit x_i.y_j) v_j      to p.sums
//                1   log2 sum_j 2^(of_key_j + unit x_i.y_j)               to p.logs
//
// Points are scaled so that none of their coordinates exceeds 2^15.  Each is two halves, hi + 2^-11 lo, and a product is three (split_f32.cuh), or
// one with cfg::tf32.  pairwise_split writes those of keys once, in the order in which lanes hold them as fragments: lane 4g + q has coordinates
// 16 step + 4q .. + 3 of key g of eight.  Any order serves that is the same for rows and keys.
// A warp owns 32 rows, whose fragments stay in registers; keys come in tiles, two in flight.
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/functions.cuh"
#include "pairwise/sums.cuh"
#include "ptx/shared.cuh"
#include "sm80/split_f32.cuh"

using namespace pairwise;

// Mirrored by PARAMS in cuattn/pairwise/tensor_cores.py.  Arrays are contiguous; those of keys end with the last whole tile.
struct ProductParams {
    const float *x, *y;       // (batch, rows, dim), (batch, keys, dim)
    uint4* fragments;         // of y: (batch, keys / 8, dim / 16, lanes)
    const float *of_row, *of_key, *v;  // (batch, rows), (batch, keys), (batch, keys, columns)
    const float* unit;
    float *sums, *logs;
    i32 n_rows, n_keys, columns, parts, keys_per_part, padded_keys;
};

constexpr int kWarps = 4, kThreads = 32 * kWarps, kTiles = 2, kRows = 16 * kTiles * kWarps, kOwn = 2 * kTiles;
constexpr int kKeys = cfg::block_n, kSteps = cfg::dim / 16, kProducts = cfg::tf32 ? 1 : 3;
constexpr bool kLse = cfg::reduction == 1;
constexpr int kWidth = kLse ? 0 : cfg::width, kColumns = kWidth ? kWidth : 1;

// The halves of four coordinates: two registers of hi, two of lo.
__device__ __forceinline__ uint4 halves(const float4& x) {
    uint4 found;
    split::split_pair<1 << split::kLow>(found.x, found.z, x.x, x.y);
    split::split_pair<1 << split::kLow>(found.y, found.w, x.z, x.w);
    return found;
}

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_split(const __grid_constant__ ProductParams p) {
    const i32 index = blockIdx.x * kThreads + threadIdx.x, lane = index % 32, step = index / 32 % kSteps, key = index / 32 / kSteps * 8 + lane / 4;
    if (key >= p.padded_keys) return;
    const i64 batch = blockIdx.z;
    float4 x = {0, 0, 0, 0};
    if (key < p.n_keys) x = *reinterpret_cast<const float4*>(p.y + (batch * p.n_keys + key) * cfg::dim + 16 * step + 4 * (lane % 4));
    p.fragments[batch * p.padded_keys / 8 * kSteps * 32 + index] = halves(x);
}

struct alignas(16) Tile {
    uint4 keys[kKeys / 8][kSteps][32];
    float of_key[kKeys];
    float v[kKeys][kColumns];
};

__device__ __forceinline__ void load_tile(Tile& tile, const ProductParams& p, i64 batch, i32 first, i32 column) {
    const uint4* source = p.fragments + (batch * p.padded_keys + first) / 8 * kSteps * 32;
    const u32 at = ptx::shared_address(&tile.keys[0][0][0]);
    constexpr int count = kKeys / 8 * kSteps * 32;
#pragma unroll
    for (int i = threadIdx.x; i < count; i += kThreads) ptx::cp_async<16>(at + 16 * i, source + i, 16);
    for (int n = threadIdx.x; n < kKeys; n += kThreads) {
        const i64 key = batch * p.n_keys + first + n;
        const bool there = first + n < p.n_keys;
        tile.of_key[n] = there ? p.of_key[key] : kLse ? -infinity<float>() : 0.f;
        unroll<kWidth>([&](int c) { tile.v[n][c] = there && column + c < p.columns ? p.v[key * p.columns + column + c] : 0.f; });
    }
    ptx::cp_async_commit();
}

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

__device__ __forceinline__ void add_tile(Row (&rows)[kOwn], const Tile& tile, const u32 (&hi)[kTiles][kSteps][4], const u32 (&lo)[kTiles][kSteps][4], float unit) {
    const int lane = threadIdx.x % 32;
    float sums[kOwn][kColumns] = {};
#pragma unroll 1
    for (int group = 0; group < kKeys / 8; group += 2) {
        split::Sums<kProducts, kTiles> products[2];
        unroll<kSteps, 2>([&](int step, int n) {
            const uint4 key = tile.keys[group + n][step][lane];
            const u32 b[4] = {key.x, key.y, key.z, key.w};
            unroll<kTiles>([&](int t) { products[n].add(t, hi[t][step], lo[t][step], b); });
        });
        const int first = group * 8 + 2 * (lane % 4);
        float of_key[4];
        unroll<4>([&](int n) { of_key[n] = tile.of_key[first + n / 2 * 8 + n % 2]; });
        unroll<kOwn>([&](int r) {
            float s[4];
            unroll<4>([&](int n) { s[n] = products[n / 2].total(r / 2, r % 2 * 2 + n % 2); });
            if constexpr (kLse) add_logs(rows[r], sums[r][0], s, of_key, unit);
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

// The sum over the four lanes that share rows.
__device__ __forceinline__ float over_lanes(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_products(const __grid_constant__ ProductParams p) {
    __shared__ Tile tiles[2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const i64 batch = blockIdx.z;
    const i32 part = blockIdx.y % p.parts, column = blockIdx.y / p.parts * cfg::width;
    const i32 start = part * p.keys_per_part, stop = min(start + p.keys_per_part, p.n_keys);
    const float unit = *p.unit;
    const auto row_of = [&](int r) { return static_cast<i32>(blockIdx.x) * kRows + 16 * kTiles * warp + 16 * (r / 2) + 8 * (r % 2) + lane / 4; };

    load_tile(tiles[0], p, batch, start, column);
    Row rows[kOwn];
    u32 hi[kTiles][kSteps][4], lo[kTiles][kSteps][4];
    unroll<kOwn>([&](int r) {
        const i32 row = row_of(r);
        const i64 at = batch * p.n_rows + (row < p.n_rows ? row : 0);
        if constexpr (!kLse) rows[r].of_row = p.of_row[at];
        unroll<kSteps>([&](int step) {
            const uint4 own = halves(*reinterpret_cast<const float4*>(p.x + at * cfg::dim + 16 * step + 4 * (lane % 4)));
            hi[r / 2][step][r % 2] = own.x;
            hi[r / 2][step][2 + r % 2] = own.y;
            lo[r / 2][step][r % 2] = own.z;
            lo[r / 2][step][2 + r % 2] = own.w;
        });
    });

    int stage = 0;
    for (i32 first = start; first < stop; first += kKeys, stage ^= 1) {
        if (first + kKeys < stop) {
            load_tile(tiles[stage ^ 1], p, batch, first + kKeys, column);
            ptx::cp_async_wait<1>();
        } else ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is there
        add_tile(rows, tiles[stage], hi, lo, unit);
        __syncthreads();  // nobody reads it any more
    }

    const i64 own_part = static_cast<i64>(part) * gridDim.z + batch;
    unroll<kOwn>([&](int r) {
        const i32 row = row_of(r);
        const bool writes = lane % 4 == 0 && row < p.n_rows;
        const i64 at = own_part * p.n_rows + row;
        if constexpr (kLse) {
            float m = fmaxf(rows[r].m, __shfl_xor_sync(~0u, rows[r].m, 1));
            m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
            const float l = over_lanes(rows[r].totals[0].sum * power_of_2(rows[r].m - m));
            if (writes) p.logs[at] = l == 0.f ? -infinity<float>() : m + log2(l);
        } else {
            unroll<kWidth>([&](int c) {
                const float sum = over_lanes(rows[r].totals[c].sum);
                if (writes && column + c < p.columns) p.sums[at * p.columns + column + c] = sum;
            });
        }
    });
}
