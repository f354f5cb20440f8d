// The gradient of a bias from the sums of kernels/sm90/bwd.cu (AddedTile in sm90/bwd_sums.cuh): scaled, rounded and put in order.
//
// Grid: key tiles * row tiles * instances of the bias, key tiles fastest.  Through shared memory, 16 rows at a time.
#include "attn/params.cuh"
#include "sm90/bwd_layout.cuh"

extern "C" __global__ void __launch_bounds__(128 * sm90::bwd::warpgroups) backward_bias_convert(const __grid_constant__ Params p) {
    using namespace sm90;
    using namespace sm90::bwd;
    constexpr int columns = cfg::block_n + 1, rows = 16;
    __shared__ float tile[rows * columns];
    const i32 n = blockIdx.x % p.key_tiles, m = blockIdx.x / p.key_tiles % p.row_tiles;
    const i64 instance = blockIdx.x / p.key_tiles / p.row_tiles;
    const i32 warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
    const i32 key = 64 * warpgroup + fragment_row(), query = 2 * (thread % 4);
    const float4* sums = static_cast<const float4*>(p.dbias_acc) +
                         (static_cast<i64>(blockIdx.x) * warpgroups + warpgroup) * (64 * cfg::block_m / 4) + thread;
    auto* out = static_cast<cfg::bias_grad*>(p.dbias.data) + (instance * p.n_queries + m * cfg::block_m) * p.n_keys + n * cfg::block_n;
    const float factor = static_cast<float>(p.dropout_scale);
    const i32 last_row = min(cfg::block_m, p.n_queries - m * cfg::block_m), last_key = min(cfg::block_n, p.n_keys - n * cfg::block_n);
    for (i32 first = 0; first < last_row; first += rows) {
        unroll<rows / 8>([&](int eight) {
            const float4 four = sums[(first / 8 + eight) * 128];
            float* to = tile + (8 * eight + query) * columns + key;
            to[0] = four.x, to[columns] = four.y, to[8] = four.z, to[columns + 8] = four.w;
        });
        __syncthreads();  // the rows are complete
        for (i32 i = threadIdx.x; i < rows * cfg::block_n; i += 128 * warpgroups) {
            const i32 row = i / cfg::block_n, column = i % cfg::block_n;
            if (first + row < last_row && column < last_key)
                out[static_cast<i64>(first + row) * p.n_keys + column] = round_to<cfg::bias_grad>(tile[row * columns + column] * factor);
        }
        __syncthreads();  // and have been read
    }
}
