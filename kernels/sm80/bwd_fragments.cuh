// Products of two shared-memory tiles on the tensor cores, and the way of their results back to shared memory.
//
// A tile is row-major with 16 bytes of padding behind every row: the eight rows of a matrix that ldmatrix reads at once (or the rows of
// a fragment of wider elements) then lie in different banks, and every address is a lane's base plus a compile-time constant.
// Accumulators are m16n8 fragments: acc[m][n][0..3] of lane l are rows 16 m + l / 4 and 8 further (two each), columns 8 n + 2 (l % 4), + 1.
#pragma once
#include "attn/mma.cuh"
#include "ptx/shared.cuh"

namespace sm80 {

using Elem = cfg::elem;
using Acc = cfg::acc;

template <int columns>
constexpr int row_bytes = columns * int(sizeof(Elem)) + 16;

// How an operand lies in shared memory: with the axis that the product sums over along its columns (both of Q K^T) or along its rows.
enum class Along { columns, rows };

// Address that this lane gives to ldmatrix for the first 16 x 16 block: the four 8 x 8 matrices in the order (0, 0) (8, 0) (0, 8) (8, 8)
// for A summed along its columns and B summed along its rows, else in the order (0, 0) (0, 8) (8, 0) (8, 8).
template <bool down_first, int stride>
__device__ __forceinline__ u32 lane_address(u32 tile) {
    const u32 lane = threadIdx.x % 32;
    if constexpr (down_first) return tile + lane % 16 * stride + lane / 16 * 16;
    return tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 16;
}

// The 16 x 16 block number `outer` across, and `inner` along the axis that is summed over.
template <Along along, int stride>
__device__ __forceinline__ void load_block(u32 (&fragment)[4], u32 lane, int outer, int inner) {
    if constexpr (along == Along::columns)
        ptx::ldmatrix_x4(fragment, lane + outer * 16 * stride + inner * 32);
    else
        ptx::ldmatrix_x4_trans(fragment, lane + inner * 16 * stride + outer * 32);
}

// acc += A B, summed over `length` elements, for this warp's 16 tiles_m x 8 tiles_n results; a and b are the addresses of the warp's
// parts.  Loads run one 16-column block of B, and up to one step of A, ahead of the products.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void product(float (&acc)[tiles_m][tiles_n][4], u32 a, u32 b) {
    static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
    constexpr int blocks = tiles_n / 2, total = length / 16 * blocks;
    constexpr int ahead = tiles_m <= 2 ? 1 : 0;  // steps that A is loaded ahead; more rows would take too many registers
    const u32 lane_a = lane_address<along_a == Along::columns, stride_a>(a);
    const u32 lane_b = lane_address<along_b == Along::rows, stride_b>(b);
    u32 fa[1 + ahead][tiles_m][4], fb[2][4];
    auto load_a = [&](int step) {
#pragma unroll
        for (int m = 0; m < tiles_m; ++m) load_block<along_a, stride_a>(fa[step % (1 + ahead)][m], lane_a, m, step);
    };
    if constexpr (ahead) load_a(0);
    load_block<along_b, stride_b>(fb[0], lane_b, 0, 0);
#pragma unroll
    for (int i = 0; i < total; ++i) {
        const int step = i / blocks, block = i % blocks;
        if (i + 1 < total) load_block<along_b, stride_b>(fb[(i + 1) % 2], lane_b, (i + 1) % blocks, (i + 1) / blocks);
        if (block == 0 && step + ahead < length / 16) load_a(step + ahead);
#pragma unroll
        for (int m = 0; m < tiles_m; ++m) {
            Mma<Elem>::mma(acc[m][2 * block], fa[step % (1 + ahead)][m], fb[i % 2][0], fb[i % 2][1]);
            Mma<Elem>::mma(acc[m][2 * block + 1], fa[step % (1 + ahead)][m], fb[i % 2][2], fb[i % 2][3]);
        }
    }
}

template <int tiles_m, int tiles_n>
__device__ __forceinline__ void clear(Acc (&acc)[tiles_m][tiles_n][4]) {
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] = 0;
}

// Rounds the warp's results to elements and stores them to its part of a tile, which has `columns` columns.  With `relu`, negative
// values become 0.
template <int stride, bool relu, int tiles_m, int tiles_n>
__device__ __forceinline__ void store_rounded(u32 tile, const float (&acc)[tiles_m][tiles_n][4], i32 columns = 8 * tiles_n) {
    const u32 lane = threadIdx.x % 32;
    const u32 at = tile + lane / 4 * stride + lane % 4 * 4;
    auto pair = [](float low, float high) {
        return relu ? Mma<Elem>::pack(fmaxf(low, 0.0f), fmaxf(high, 0.0f)) : Mma<Elem>::pack(low, high);
    };
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n) {
            if (8 * n >= columns) break;
            ptx::store_shared(at + m * 16 * stride + n * 16, pair(acc[m][n][0], acc[m][n][1]));
            ptx::store_shared(at + (m * 16 + 8) * stride + n * 16, pair(acc[m][n][2], acc[m][n][3]));
        }
}

template <int tiles_m, int tiles_n>
__device__ __forceinline__ void scale_by(Acc (&acc)[tiles_m][tiles_n][4], Acc factor) {
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[m][n][i] *= factor;
}

// Unrounded results to an array (rows, columns) in global memory, times a factor; the warp's part starts at (first_row, first_column).
template <int tiles_m, int tiles_n>
__device__ __forceinline__ void store_accumulator(Acc* out, const Acc (&acc)[tiles_m][tiles_n][4], i64 first_row, i32 rows, i32 first_column, i32 columns, Acc factor) {
    const i32 lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const i64 row = first_row + 16 * m + i / 2 * 8 + lane / 4;
                const i32 column = first_column + 8 * n + lane % 4 * 2 + i % 2;
                if (row < rows && column < columns) out[row * columns + column] = acc[m][n][i] * factor;
            }
}

}  // namespace sm80
