// The sums of dQ. that kernels/sm90/bwd_jvp.cu adds up in memory, to rows: scaled and rounded.
//
// Grid: tiles of 64 rows, of padded rows, * heads * batch; a thread takes what threads of its number added up.
#include "sm90/bwd_jvp_layout.cuh"
#include "sm90/gradients.cuh"

extern "C" __global__ __launch_bounds__(128) void backward_jvp_convert(const __grid_constant__ TangentParams p) {
    const i32 tiles = (p.n_queries + 127) / 128 * 2;
    const float4* part = static_cast<const float4*>(p.dq_acc) + static_cast<i64>(blockIdx.x) * (64 * cfg::head_dim / 4) + threadIdx.x;
    float x[32];
    unroll<8>([&](int i) {
        const float4 four = part[i * 128];
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    });
    const i32 row = static_cast<i32>(blockIdx.x % tiles) * 64 + sm90::fragment_row();
    sm90::write_gradient(x, static_cast<float>(p.scale * p.dropout_scale), p.tdq.data, blockIdx.x / tiles, p.n_queries, p.head_dim, row);
}
