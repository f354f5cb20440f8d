// Points with many coordinates for tensor cores, as float32 scaled so that none exceeds 2^15: each coordinate is two halves, hi + 2^-11 lo, and a
// product is three (sm80/split_f32.cuh), or one with cfg::tf32.  pairwise_split writes the halves of keys once: a row is chunks of eight hi and
// eight lo in turn, of cfg::dim coordinates, a multiple of 16.  Tiles of them lie in shared memory as in sm80/tile.cuh.
#pragma once
#include "pairwise/functions.cuh"
#include "pairwise/sums.cuh"
#include "ptx/shared.cuh"
#include "sm80/split_f32.cuh"
#include "sm80/tile.cuh"

namespace pairwise {

// Mirrored by PARAMS in cuattn/pairwise/tensor_cores.py.  Arrays are contiguous; the keys' halves end with the last whole tile.
struct ProductParams {
    const float *x, *y;                // (batch, rows, dim), (batch, keys, dim)
    uint4* halves;                     // of y: (batch, keys, dim / 8, 2)
    const float *of_row, *of_key;      // (batch, rows), (batch, keys)
    const float *u, *v;                // (batch, rows, columns), (batch, keys, columns)
    const float* unit;                 // of products
    float *sums, *logs, *directions, *moments;
    i32 n_rows, n_keys, columns, parts, keys_per_part, padded_keys;
};

constexpr int kWarps = 4, kThreads = 32 * kWarps, kDim = cfg::dim, kSteps = kDim / 16, kRowBytes = kDim * 4, kChunks = kDim / 4;
constexpr int kKeys = cfg::block_n, kProducts = cfg::tf32 ? 1 : 3;
constexpr int kWidth = cfg::width, kColumns = kWidth ? kWidth : 1;

__device__ __forceinline__ void split_keys(const ProductParams& p) {
    const i32 index = blockIdx.x * kThreads + threadIdx.x, key = index / (kDim / 8), first = index % (kDim / 8) * 8;
    if (key >= p.padded_keys) return;
    const i64 batch = blockIdx.z;
    float x[8] = {};
    if (key < p.n_keys) {
        const float4* from = reinterpret_cast<const float4*>(p.y + (batch * p.n_keys + key) * kDim + first);
        *reinterpret_cast<float4*>(x) = from[0];
        *reinterpret_cast<float4*>(x + 4) = from[1];
    }
    u32 hi[4], lo[4];
    unroll<4>([&](int n) { split::split_pair<1 << split::kLow>(hi[n], lo[n], x[2 * n], x[2 * n + 1]); });
    uint4* to = p.halves + (batch * p.padded_keys * (kDim / 8) + index) * 2;
    to[0] = {hi[0], hi[1], hi[2], hi[3]};
    to[1] = {lo[0], lo[1], lo[2], lo[3]};
}

struct alignas(128) Tile {
    uint4 halves[kKeys * kChunks];
    float of_key[kKeys];
    float v[kKeys][kColumns];
};

// Begins to copy a tile of keys.  Those that do not exist add nothing: their v is 0, and so are their weights, which `nothing` makes.
__device__ __forceinline__ void load_tile(Tile& tile, const ProductParams& p, i64 batch, i32 first, i32 column, float nothing) {
    const uint4* source = p.halves + (batch * p.padded_keys + first) * kChunks;
    const u32 at = ptx::shared_address(tile.halves);
#pragma unroll
    for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) ptx::cp_async<16>(at + swizzle<kRowBytes>(i / kChunks, i % kChunks), source + i, 16);
    static_assert(kKeys <= kThreads);
    if (const int n = threadIdx.x; n < kKeys) {
        const i64 key = batch * p.n_keys + first + n;
        const bool there = first + n < p.n_keys;
        tile.of_key[n] = there ? p.of_key[key] : nothing;
        unroll<kWidth>([&](int c) { tile.v[n][c] = there && column + c < p.columns ? p.v[key * p.columns + column + c] : 0.f; });
    }
    ptx::cp_async_commit();
}

// Calls add(tile) for the tiles of a part of the keys; two are in flight.
template <class Add>
__device__ __forceinline__ void for_tiles(const ProductParams& p, i64 batch, i32 start, i32 stop, i32 column, float nothing, const Add& add) {
    __shared__ Tile tiles[2];
    load_tile(tiles[0], p, batch, start, column, nothing);
    int stage = 0;
    for (i32 first = start; first < stop; first += kKeys, stage ^= 1) {
        if (first + kKeys < stop) {
            load_tile(tiles[stage ^ 1], p, batch, first + kKeys, column, nothing);
            ptx::cp_async_wait<1>();
        } else ptx::cp_async_wait<0>();
        __syncthreads();  // the tile is there
        add(tiles[stage]);
        __syncthreads();  // nobody reads it any more
    }
}

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

// The products of rows with 16 keys: total(t, n, e) of row 16 t + lane / 4 (+ 8 from e = 2 on) and key 8 n + 2 (lane % 4) + e % 2.
template <int tiles>
struct Scores {
    split::Sums<kProducts, tiles> eights[2];

    __device__ __forceinline__ void add(const Points<tiles>& rows, u32 shared, int group) {
        const int lane = threadIdx.x % 32;
        const LaneRow<kRowBytes, 64> from(lane % 8, 2 * (lane / 8 % 2) + lane / 16);
        unroll<kSteps, 2>([&](int step, int n) {
            u32 b[4];
            ptx::ldmatrix_x4(b, shared + (16 * group + 8 * n) * kRowBytes + from.offset(step));
            unroll<tiles>([&](int t) { eights[n].add(t, rows.hi[t][step], rows.lo[t][step], b); });
        });
    }
    __device__ __forceinline__ float total(int t, int n, int e) const { return eights[n].total(t, e); }
};

// The sum over the four lanes that share rows.
__device__ __forceinline__ float over_lanes(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

}  // namespace pairwise
