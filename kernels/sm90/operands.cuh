// Matrix products of one warpgroup on tiles of slabs.  All are asynchronous; the caller fences before and commits after.
#pragma once
#include "attn/math.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"
#include "sm90/tiles.cuh"

namespace sm90 {

// The 16-bit type of the operands.
constexpr bool is_bfloat16 = same_type<cfg::elem, __nv_bfloat16>;

// Two numbers rounded to the operands' type, `low` in the low half; positive: with negative numbers as 0.
template <bool positive = false>
__device__ __forceinline__ u32 pack(float low, float high) { return ::pack<cfg::elem, positive>(low, high); }

constexpr u32 eight_rows = 8 * row_bytes;

// d = sign_a * A B^T, both along their rows: `columns` of contraction; rows_a, rows_b: of the tiles, whose slabs lie that far
// apart.  first: the step of 16 columns to begin with; begun = 1: d +=.
template <int columns, int rows_a, int rows_b, int sign_a, int first = 0, int n>
__device__ __forceinline__ void multiply_rows(float (&d)[n], u32 a, u32 b, u32 begun = 0) {
#pragma unroll
    for (int step = first; step < columns / 16; ++step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 left = ptx::wgmma_descriptor(a, 16, eight_rows) + ((slab * rows_a * row_bytes + column) >> 4);
        const u64 right = ptx::wgmma_descriptor(b, 16, eight_rows) + ((slab * rows_b * row_bytes + column) >> 4);
        ptx::Product<2 * n>::template ss<is_bfloat16, sign_a, 0>(d, left, right, step > first || begun);
    }
}

// A warpgroup's 64 rows of A in the first steps of a contraction, as fragments: columns that no product need read again.
template <int steps>
struct HeldRows {
    static_assert(steps <= 4);
    u32 fragments[steps][4];

    // tile: the rows in their first slab.
    __device__ __forceinline__ void load(u32 tile) {
        const u32 lane = threadIdx.x % 32, row = 16 * (threadIdx.x % 128 / 32) + lane % 16;
        unroll<steps>([&](int step) { ptx::ldmatrix_x4(fragments[step], tile + row * row_bytes + 16 * ((2 * step + lane / 16) ^ (row % 8))); });
    }

    // d += A B^T over these steps.
    template <int n>
    __device__ __forceinline__ void multiply(float (&d)[n], u32 b) const {
        unroll<steps>([&](int step) {
            ptx::Product<2 * n>::template rs<is_bfloat16, 1, 0>(
                d, fragments[step], ptx::wgmma_descriptor(b, 16, eight_rows) + (32 * step >> 4), 1);
        });
    }
};

// d += A B (begun = 0: d = A B), A in registers, 16 rows of B to a fragment, from the first or from the last; the tile's slabs lie `rows`
// rows apart.
template <int rows, bool from_last = false, int n, int steps>
__device__ __forceinline__ void accumulate_rows(float (&d)[n], const u32 (&a)[steps][4], u32 b, u32 begun = 1) {
    unroll<steps>([&](int number) {
        const int step = from_last ? steps - 1 - number : number;
        const u64 right = ptx::wgmma_descriptor(b, rows * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<2 * n>::template rs<is_bfloat16, 1, 1>(d, a[step], right, number > 0 || begun);
    });
}

}  // namespace sm90
