// dQ while the block walks over rows: added to an accumulator in global memory by every key tile, in no particular order.
//
// The accumulator keeps each warp's results together, [head][row tile][warp][chunk][fragment][lane][4], so that a warp's addition covers whole
// cache lines; before sm_90, which adds one float at a time, [head][row tile][warp][chunk][fragment][4][lane].
// kernels/sm80/bwd_convert.cu puts them in order.
#pragma once
#include "ptx/global.cuh"
#include "sm80/bwd_layout.cuh"
#include "sm80/bwd_product.cuh"

// Columns of dQ summed at a time, so that a lane holds few sums beside those of dK and dV.
constexpr int chunk_sums = sizeof(Acc) == 8 ? 16 : widest <= 256 ? 64 : 32;
constexpr int chunk_columns() {
    int columns = Queries::columns;
    while (Queries::rows * columns > 32 * chunk_sums && columns % 32 == 0) columns /= 2;
    return columns;
}
constexpr int query_chunk = chunk_columns();
static_assert(Queries::rows * query_chunk <= 32 * chunk_sums && query_chunk % 16 == 0, "dQ needs more chunks");
constexpr int query_fragments = Queries::rows / 16 * (Queries::columns / 8);  // 16 x 8 results per warp, four sums per lane each

constexpr bool lanes_outside = __CUDA_ARCH__ >= 900 && sizeof(Acc) == 4;

// Offset of element i of a lane's fragment in the warp's part of the accumulator.
__device__ __forceinline__ i32 accumulator_offset(i32 fragment, i32 i) {
    const i32 lane = threadIdx.x % 32;
    return fragment * 128 + (lanes_outside ? lane * 4 + i : i * 32 + lane);
}

// row_tile: of one instance of q, or counted through all of them.
__device__ __forceinline__ Acc* accumulator_of_warp(Acc* acc, i64 row_tile) {
    return acc + (row_tile * query_warps + query_warp()) * (query_fragments * 128);
}

// Algorithm 4 line 21: dQ += dS K for one row tile; the scale comes last, in the conversion.
__device__ __forceinline__ void add_queries(TileAt ds, TileAt k, Acc* dq_acc, i32 row_tile) {
    constexpr int tiles_m = Queries::rows / 16, tiles_n = query_chunk / 8;
    Acc* to = accumulator_of_warp(dq_acc, row_tile);
    unroll<Queries::columns / query_chunk>([&](int chunk) {
        Acc dq[tiles_m][tiles_n][4] = {};
        product<cfg::block_n, Along::columns, p_stride, Along::rows, qk_stride>(
            dq, part_of_weights(ds, Queries::row(), 0), part_of_rows<qk_stride>(k, 0, Queries::column() + chunk * query_chunk));
        unroll<tiles_m, tiles_n>([&](int m, int n) {
            Acc* at = to + accumulator_offset((chunk * tiles_m + m) * tiles_n + n, 0);
            if constexpr (lanes_outside) ptx::red_add_x4(at, dq[m][n][0], dq[m][n][1], dq[m][n][2], dq[m][n][3]);
            else unroll<4>([&](int i) { ptx::red_add(at + i * 32, dq[m][n][i]); });
        });
    });
}
