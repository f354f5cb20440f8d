// The dQ accumulator of kernels/sm80/bwd.cu to rows: scaled, rounded and put in order.
//
// Grid (row tiles, instances of q), the warps of the main kernel; each converts the fragments that it (its namesake) added up.
#include "attn/math.cuh"
#include "attn/params.cuh"
#include "sm80/bwd_queries.cuh"

extern "C" __global__ void __launch_bounds__(sm80::threads) backward_convert(const __grid_constant__ Params p) {
    using namespace sm80;
    constexpr int tiles_m = query_rows / 16, tiles_n = query_columns / 8;
    const i64 rows = i64(p.row_tiles) * cfg::block_m;
    const Acc* from = accumulator_of_warp(static_cast<Acc*>(p.dq_acc) + blockIdx.y * rows * cfg::head_dim, blockIdx.x);
    Elem* dq = static_cast<Elem*>(p.dq.data) + blockIdx.y * (i64(p.n_queries) * p.head_dim);
    const i32 lane = threadIdx.x % 32;
    const Acc factor = static_cast<Acc>(p.scale * p.dropout_scale);
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const i64 row = i64(blockIdx.x) * cfg::block_m + warp_query_row() + 16 * m + 8 * half + lane / 4;
                const i32 column = warp_query_column() + 8 * n + lane % 4 * 2;
                const Acc low = from[accumulator_offset(m * tiles_n + n, 2 * half)] * factor;
                const Acc high = from[accumulator_offset(m * tiles_n + n, 2 * half + 1)] * factor;
                if (row < p.n_queries) store_pair(dq + row * p.head_dim + column, low, high, p.head_dim - column);
            }
}
