// Points with many coordinates for tensor cores, as float32 scaled so that none exceeds 2^15: each coordinate is two halves, hi + 2^-11 lo, and a
// product is three (sm80/split_f32.cuh), or one with cfg::tf32.  pairwise_split writes keys once, as the tiles that shared memory is to hold: rows of
// cfg::dim coordinates, a multiple of 16, are chunks of eight hi and eight lo in turn, swizzled (sm80/tile.cuh); for warpgroups (cfg::warpgroups)
// eight hi of all keys come first, then the next eight, and all lo behind them.
#pragma once
#include "pairwise/functions.cuh"
#include "pairwise/sums.cuh"
#include "ptx/shared.cuh"
#include "sm80/split_f32.cuh"
#include "sm80/tile.cuh"

namespace pairwise {

// Mirrored by PARAMS in cuattn/pairwise/tensor_cores.py.  Arrays are contiguous.
struct ProductParams {
    const float *x, *y;                // (batch, rows, dim), (batch, keys, dim)
    uint4* tiles;                      // of keys: (batch, tiles, kBlock)
    const float *of_row, *of_key;      // (batch, rows), (batch, keys)
    const float *u, *v;                // (batch, rows, columns), (batch, keys, columns)
    const float* unit;                 // of products
    float *sums, *logs, *directions, *moments;
    i32 n_rows, n_keys, columns, parts, keys_per_part, padded_keys;
};

constexpr int kWarps = 4, kThreads = 32 * kWarps, kDim = cfg::dim, kSteps = kDim / 16, kRowBytes = kDim * 4, kChunks = kDim / 4;
constexpr int kKeys = cfg::block_n, kBlock = kKeys * kChunks + kKeys / 4, kProducts = cfg::tf32 ? 1 : 3;
constexpr int kWidth = cfg::width, kColumns = kWidth ? kWidth : 1;

// Where eight hi or lo of a tile's key lie, in 16 bytes.
__device__ __forceinline__ u32 place_of(int n, int eight, int low) {
    return cfg::warpgroups ? (low * (kDim / 8) + eight) * kKeys + n : swizzle<kRowBytes>(n, 2 * eight + low) / 16;
}

// Keys that do not exist add nothing: their of_key makes exponentials 0, else their v is 0.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_split(const __grid_constant__ ProductParams p) {
    const i32 index = blockIdx.x * kThreads + threadIdx.x, key = index / (kDim / 8), eight = index % (kDim / 8);
    if (key >= p.padded_keys) return;
    const i64 batch = blockIdx.z, from = batch * p.n_keys + key;
    const bool there = key < p.n_keys;
    float x[8] = {};
    if (there) {
        const float4* row = reinterpret_cast<const float4*>(p.y + from * kDim + 8 * eight);
        *reinterpret_cast<float4*>(x) = row[0];
        *reinterpret_cast<float4*>(x + 4) = row[1];
    }
    u32 hi[4], lo[4];
    unroll<4>([&](int n) { split::split_pair<1 << split::kLow>(hi[n], lo[n], x[2 * n], x[2 * n + 1]); });
    uint4* tile = p.tiles + (batch * p.padded_keys + key) / kKeys * kBlock;
    const int n = key % kKeys;
    tile[place_of(n, eight, 0)] = {hi[0], hi[1], hi[2], hi[3]};
    tile[place_of(n, eight, 1)] = {lo[0], lo[1], lo[2], lo[3]};
    if (eight == 0) reinterpret_cast<float*>(tile + kKeys * kChunks)[n] = there ? p.of_key[from] : cfg::logs ? -infinity<float>() : 0.f;
}

struct alignas(128) Tile {
    uint4 halves[kKeys * kChunks];
    float of_key[kKeys];
    float v[kKeys][kColumns];
};

__device__ __forceinline__ void load_tile(Tile& tile, const ProductParams& p, const Share& share, i32 first) {
    const uint4* source = p.tiles + (share.batch * p.padded_keys + first) / kKeys * kBlock + threadIdx.x;
    const u32 at = ptx::shared_address(&tile) + 16 * threadIdx.x;
    unroll<(kBlock + kThreads - 1) / kThreads>([&](int step) {
        if (kThreads * (step + 1) <= kBlock || kThreads * step + threadIdx.x < kBlock) ptx::cp_async<16>(at + 16 * kThreads * step, source + kThreads * step, 16);
    });
    static_assert(kKeys <= kThreads);
    if (const int n = threadIdx.x; kWidth > 0 && n < kKeys) {
        const bool there = first + n < p.n_keys;
        const float* v = p.v + (there ? (share.batch * p.n_keys + first + n) * p.columns + share.column : 0);
        unroll<kWidth>([&](int c) {
            const bool is = there && share.column + c < p.columns;
            ptx::cp_async<4>(ptx::shared_address(&tile.v[n][c]), is ? v + c : v, is ? 4 : 0);
        });
    }
    ptx::cp_async_commit();
}

// Calls add(tile) for the tiles of a part of the keys, while the next one comes.
template <class Add>
__device__ __forceinline__ void for_tiles(const ProductParams& p, const Share& share, const Add& add) {
    __shared__ Tile tiles[2];
    load_tile(tiles[0], p, share, share.start);
    int stage = 0;
    for (i32 first = share.start; first < share.stop; first += kKeys, stage ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is there, and nobody reads the last one any more
        if (first + kKeys < share.stop) load_tile(tiles[stage ^ 1], p, share, first + kKeys);
        add(tiles[stage]);
    }
}

// A thread's rows, every eighth of the 16 tiles rows that its warp has of a block's `rows`: their numbers, and where their points are, the last one's
// for rows that do not exist.
template <int rows, int tiles = 1>
struct OwnRows {
    const ProductParams& p;
    const Share& share;

    __device__ __forceinline__ i32 index(int r) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        return static_cast<i32>(blockIdx.x) * rows + 16 * tiles * warp + 8 * r + lane / 4;
    }
    __device__ __forceinline__ i64 place(int r) const { return share.batch * p.n_rows + min(index(r), p.n_rows - 1); }
    __device__ __forceinline__ const float* point(int r) const { return p.x + place(r) * kDim; }
};

// What a thread has of a row that is summed: its share of the sums.  A reference m is subtracted last: the greatest term is rounded like it.
struct SummedRow {
    float of_row = 0, m = Range<float>::lowest;
    Total<float> totals[kColumns];

    // Writes row `index`.
    __device__ __forceinline__ void store(const ProductParams& p, const Share& share, i32 index) const {
        const bool writes = threadIdx.x % 4 == 0 && index < p.n_rows;
        const i64 at = share.of_parts() * p.n_rows + index;
        if constexpr (cfg::logs) {
            float greatest = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
            greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, 2));
            const float root = power_of_2(0.5f * (m - greatest)), l = quad_sum(totals[0].sum * root * root);
            if (writes) p.logs[at] = greatest > -0.1f * Range<float>::lowest ? l * infinity<float>() : greatest + log2(l);
        } else {
            unroll<kWidth>([&](int c) {
                const float sum = quad_sum(totals[c].sum);
                if (writes && share.column + c < p.columns) p.sums[at * p.columns + share.column + c] = sum;
            });
        }
    }
};

// Fragments of 16 tiles rows, as left factors.
template <int tiles>
struct Points {
    u32 hi[tiles][kSteps][4], lo[tiles][kSteps][4];

    // at(r): where row 8 r + lane / 4 begins.
    template <class At>
    __device__ __forceinline__ void load(const At& at) {
        unroll<2 * tiles>([&](int r) {
            const float* row = at(r) + 2 * (threadIdx.x % 4);
            unroll<2 * kSteps>([&](int half) {
                const float2 x = *reinterpret_cast<const float2*>(row + 8 * half);
                const int step = half / 2, n = half % 2 * 2 + r % 2;
                split::split_pair<1 << split::kLow>(hi[r / 2][step][n], lo[r / 2][step][n], x.x, x.y);
            });
        });
    }
};

// The keys' rows that a lane names, for right factors: both halves of 16 coordinates.
struct KeyRow {
    LaneRow<kRowBytes, 64> row{threadIdx.x % 8, 2 * (threadIdx.x / 8 % 2) + threadIdx.x % 32 / 16};
};

// The products of rows with 16 keys: total(t, n, e) of row 16 t + lane / 4 (+ 8 from e = 2 on) and key 8 n + 2 (lane % 4) + e % 2.
// Tensor cores cut their sums off where others round: more than 64 coordinates are sums of 64 each, added up outside.
template <int tiles>
struct Scores {
    static constexpr int kMost = 4;  // steps of a sum
    split::Sums<kProducts, tiles> eights[2];
    float before[2][tiles][4] = {};

    // shared: where the 16 keys lie.
    __device__ __forceinline__ void add(const Points<tiles>& rows, const KeyRow& from, u32 shared) {
        unroll<kSteps, 2>([&](int step, int n) {
            u32 b[4];
            ptx::ldmatrix_x4(b, shared + 8 * n * kRowBytes + from.row.offset(step));
            if (step > 0 && step % kMost == 0) {
                unroll<tiles, 4>([&](int t, int e) { before[n][t][e] += eights[n].total(t, e); });
                eights[n] = {};
            }
            unroll<tiles>([&](int t) { eights[n].add(t, rows.hi[t][step], rows.lo[t][step], b); });
        });
    }
    __device__ __forceinline__ float total(int t, int n, int e) const {
        return kSteps > kMost ? before[n][t][e] + eights[n].total(t, e) : eights[n].total(t, e);
    }
};

}  // namespace pairwise
