// The dQ accumulator of kernels/sm80/bwd.cu to rows: scaled, rounded and put in order by way of shared memory.
//
// Grid: row tiles * instances of q, tiles fastest; the warps of the main kernel; each takes the fragments that its namesake there added up.
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_queries.cuh"

extern "C" __global__ void __launch_bounds__(threads) backward_convert(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int tiles_m = Queries::rows / 16, tiles_n = query_chunk / 8;
    const i32 tile = blockIdx.x % p.row_tiles, instance = blockIdx.x / p.row_tiles;
    const auto to = gradient_rows<cfg::grad>(p.dq, {}, 0, p.head_dim, true, p.dq.data, i64(instance) * p.n_queries);
    const i64 first = i64(tile) * cfg::block_m;
    const Acc* from = accumulator_of_warp(static_cast<Acc*>(p.dq_acc), blockIdx.x);
    const Acc factor = static_cast<Acc>(p.scale * p.dropout_scale);
    const u32 part = ptx::shared_address(memory) + Queries::row() * qk_stride + Queries::column() * int(sizeof(Elem));
#pragma unroll
    for (int chunk = 0; chunk < Queries::columns / query_chunk; ++chunk) {
        if (threadIdx.x >= 32 * query_warps) break;
        Acc dq[tiles_m][tiles_n][4];
        unroll<tiles_m, tiles_n, 4>([&](int m, int n, int i) {
            dq[m][n][i] = from[accumulator_offset((chunk * tiles_m + m) * tiles_n + n, i)] * factor;
        });
        if constexpr (gradients_in_elements) store_rounded<qk_stride, false>(part + chunk * query_chunk * int(sizeof(Elem)), dq);
        else to.store(dq, first + Queries::row(), p.n_queries, Queries::column() + chunk * query_chunk, Acc(1));
    }
    __syncthreads();  // all warps' parts are there
    if constexpr (gradients_in_elements) save_rows<cfg::block_m, cfg::head_dim>(memory, to, first, p.n_queries);
}
