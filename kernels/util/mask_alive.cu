// Which keys of a boolean or block mask are seen by any row: alive[instance][key] = 1, zeros before.
//
// Grid (keys / 256, row chunks of kChunk, instances), 256 threads, one per key.
#include "util/mask_params.cuh"

constexpr int kThreads = 256, kChunk = 512;

extern "C" __global__ __launch_bounds__(kThreads) void mask_alive(const __grid_constant__ MaskParams p) {
    const i32 key = blockIdx.x * kThreads + threadIdx.x;
    if (key >= p.n_keys) return;
    i64 offset = key / p.block_n * p.col;
    i32 rest = blockIdx.z;
#pragma unroll
    for (int axis = kLeadingAxes - 1; axis >= 0; --axis) {
        offset += rest % p.size[axis] * p.stride[axis];
        rest /= p.size[axis];
    }
    const RowRange rows = band_rows(p, key);
    i32 first = blockIdx.y * kChunk, end = min(first + kChunk, p.rows);
    if (p.rows > 1) {  // a single row of the mask stands for all query rows
        first = max(first, rows.first / p.block_m);
        end = min(end, (rows.end + p.block_m - 1) / p.block_m);
    }
    bool seen = false;
    for (i32 r = first; r < end && !seen; ++r) seen = p.mask[offset + r * p.row] != 0;
    if (seen && rows.first < rows.end) p.alive[static_cast<i64>(blockIdx.z) * p.keys_padded + key] = 1;
}
