// Tiles in shared memory and results in registers, as all products of the backward take and make them (sm80/bwd_product.cuh).
//
// A tile is row-major with padding behind every row: the rows that a fragment takes then lie in different banks, and every address is a
// lane's base plus a compile-time constant.
// Accumulators are m16n8 fragments: acc[m][n][0..3] of lane l are rows 16 m + l / 4 and 8 further (two each), columns 8 n + 2 (l % 4), + 1.
#pragma once
#include "attn/math.cuh"
#include "sm80/mma.cuh"
#include "ptx/shared.cuh"

namespace sm80 {

using Elem = cfg::elem;
using Acc = cfg::acc;
constexpr bool gradients_in_elements = same_type<cfg::grad, Elem>;  // else unrounded

// The padding is what one lane of ldmatrix reads; of float64, the four columns of a fragment.
constexpr int padding = sizeof(Elem) == 8 ? 32 : 16;
template <int columns>
constexpr int row_bytes = columns * int(sizeof(Elem)) + padding;

// Where a row lies among those of a tile.  Of four rows of float64 the second and the third change places: rows of accumulators next to each
// other, of which a lane stores 16 bytes each, are then two paddings apart, and their 64 bytes in different banks.  The bits of a sum may be
// placed one by one where they do not meet: slot(a + b) = slot(a) + slot(b).
template <class Row>
__host__ __device__ constexpr Row slot(Row row) { return sizeof(Elem) == 8 ? (row & ~3) + (row & 1) * 2 + (row >> 1 & 1) : row; }

// How an operand lies in shared memory: with the axis that the product sums over along its columns (both of Q K^T) or along its rows.
enum class Along { columns, rows };

// Shared addresses of a tile, or of a part of one, and of its units (float32: sm80/bwd_split.cuh).
struct TileAt {
    u32 tile, units;
};

constexpr bool is_split = sizeof(Elem) == 4;
constexpr int unit_bytes = is_split ? 4 : 0;

// The part of a tile of rows that starts at (row, column).
template <int stride>
__device__ __forceinline__ TileAt part_of_rows(TileAt rows, int row, int column) {
    return {rows.tile + row * stride + column * int(sizeof(Elem)), rows.units + row / 16 * unit_bytes};
}

// The part of a tile of weights, P or dS.
__device__ __forceinline__ TileAt part_of_weights(TileAt weights, int row, int key) {
    return {weights.tile + row * row_bytes<cfg::block_n> + key * int(sizeof(Elem)), weights.units + (row / 16 * (cfg::block_n / 16) + key / 16) * unit_bytes};
}

// Calls work(m, n, i) for the numbers of a lane's accumulators, unrolled.
template <int tiles_m, int tiles_n, class Work>
__device__ __forceinline__ void for_numbers(const Work& work) {
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) work(m, n, i);
}

template <int tiles_m, int tiles_n>
__device__ __forceinline__ void clear(Acc (&acc)[tiles_m][tiles_n][4]) {
    for_numbers<tiles_m, tiles_n>([&](int m, int n, int i) { acc[m][n][i] = 0; });
}

// Two neighbouring results, rounded to elements; with `relu`, negative values become 0.
template <class E, bool relu>
__device__ __forceinline__ void store_pair(u32 address, Acc low, Acc high) {
    if constexpr (sizeof(E) == 2)
        ptx::store_shared(address, relu ? Mma<E>::pack_positive(low, high) : Mma<E>::pack(low, high));
    else
        ptx::store_shared_v2(address, relu ? max_of(low, Acc(0)) : low, relu ? max_of(high, Acc(0)) : high);
}

// Rounds the warp's results to elements and stores them to its part of a tile, which has `columns` columns.
template <int stride, bool relu, int tiles_m, int tiles_n>
__device__ __forceinline__ void store_rounded(u32 tile, const Acc (&acc)[tiles_m][tiles_n][4], i32 columns = 8 * tiles_n) {
    constexpr int size = int(sizeof(Elem));
    const u32 lane = threadIdx.x % 32;
    const u32 at = tile + slot(lane / 4) * stride + lane % 4 * 2 * size;
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n) {
            if (8 * n >= columns) break;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32 to = at + (m * 16 + half * 8) * stride + n * 8 * size;
                store_pair<Elem, relu>(to, acc[m][n][2 * half], acc[m][n][2 * half + 1]);
            }
        }
}

template <int tiles_m, int tiles_n>
__device__ __forceinline__ void scale_by(Acc (&acc)[tiles_m][tiles_n][4], Acc factor) {
    for_numbers<tiles_m, tiles_n>([&](int m, int n, int i) { acc[m][n][i] *= factor; });
}

// Results to an array (rows, columns) in global memory, times a factor; the warp's part starts at (first_row, first_column).
template <class Out, int tiles_m, int tiles_n>
__device__ __forceinline__ void store_results(Out* out, i64 row_stride, const Acc (&acc)[tiles_m][tiles_n][4], i64 first_row, i32 rows,
                                              i32 first_column, i32 columns, Acc factor) {
    const i32 lane = threadIdx.x % 32;
    for_numbers<tiles_m, tiles_n>([&](int m, int n, int i) {
        const i64 row = first_row + 16 * m + i / 2 * 8 + lane / 4;
        const i32 column = first_column + 8 * n + lane % 4 * 2 + i % 2;
        if (row < rows && column < columns) out[row * row_stride + column] = round_to<Out>(acc[m][n][i] * factor);
    });
}

}  // namespace sm80
