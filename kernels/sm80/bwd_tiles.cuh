// Tiles in shared memory and results in registers, as all products of the backward take and make them (sm80/bwd_product.cuh).
//
// A tile is row-major with padding behind every row: the rows that a fragment takes then lie in different banks, and every address is a
// lane's base plus a compile-time constant.
// Accumulators are m16n8 fragments: acc[m][n][0..3] of lane l are rows 16 m + l / 4 and 8 further (two each), columns 8 n + 2 (l % 4), + 1.
//
// float32 tiles and weights are pairs of float16 (sm80/split_f32.cuh).  Blocks of 16 rows of q, k, v, do share an exponent e, and so does each
// warp's part of P or dS: the largest finite |x| of a block is below 2^(e + 1).  A block's unit is 2^(e - 14); units lie in shared memory,
// [rows / 16], of weights [rows / 16][keys / 16].
#pragma once
#include "attn/math.cuh"
#include "sm80/split_f32.cuh"

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

// Shared addresses of a tile, or of a part of one, and of its units.
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

template <int tiles_m, int tiles_n>
__device__ __forceinline__ void scale_by(Acc (&acc)[tiles_m][tiles_n][4], Acc factor) {
    unroll<tiles_m, tiles_n, 4>([&](int m, int n, int i) { acc[m][n][i] *= factor; });
}

// Rounds the warp's results to elements and stores them to its part of a tile, which has `columns` columns; with `relu`, negative values
// become 0.
template <int stride, bool relu, int tiles_m, int tiles_n>
__device__ __forceinline__ void store_rounded(u32 tile, const Acc (&acc)[tiles_m][tiles_n][4], i32 columns = 8 * tiles_n) {
    constexpr int size = int(sizeof(Elem));
    const u32 lane = threadIdx.x % 32;
    const u32 at = tile + slot(lane / 4) * stride + lane % 4 * 2 * size;
    unroll<tiles_m, tiles_n, 2>([&](int m, int n, int half) {
        if (8 * n >= columns) return;
        const u32 to = at + (m * 16 + half * 8) * stride + n * 8 * size;
        const Acc low = acc[m][n][2 * half], high = acc[m][n][2 * half + 1];
        if constexpr (size == 2) ptx::store_shared(to, pack<Elem, relu>(low, high));
        else ptx::store_shared_v2(to, relu ? max_of(low, Acc(0)) : low, relu ? max_of(high, Acc(0)) : high);
    });
}

// Of float32, eight become eight hi, then eight lo, in place.
constexpr int split_bytes = 32;

__device__ __forceinline__ float finite_size(float x) {
    const float size = fabsf(x);
    return size < infinity<float>() ? size : 0.f;
}

// 2^e of the largest of all lanes' sizes.
__device__ __forceinline__ u32 shared_exponent(float size) {
    return max(__reduce_max_sync(~0u, __float_as_uint(size)) & 0x7f800000u, split::kLeast);
}

__device__ __forceinline__ void store_unit(u32 address, u32 exponent) { ptx::store_shared(address, exponent - (split::kTop << 23)); }

// Splits 16 rows of a tile, which the lanes of this warp alone have copied; stores their unit.
template <int columns>
__device__ __forceinline__ void split_rows(u32 rows, u32 unit) {
    constexpr int chunks = columns / 8, total = 16 * chunks;
    const i32 lane = threadIdx.x % 32;
    const auto address = [&](int index) { return rows + index / chunks * row_bytes<columns> + index % chunks * split_bytes; };
    const auto load = [&](float (&x)[8], int index) {
        ptx::load_shared(reinterpret_cast<float4&>(x[0]), address(index));
        ptx::load_shared(reinterpret_cast<float4&>(x[4]), address(index) + 16);
    };
    const auto largest = [&](auto size) {
        float top = 0;
#pragma unroll 4
        for (int index = lane; index < total; index += 32) {
            float x[8];
            load(x, index);
            unroll<8>([&](int i) { top = fmaxf(top, size(x[i])); });
        }
        return top;
    };
    float top = largest([](float x) { return fabsf(x); });
    if (__any_sync(~0u, top == infinity<float>())) top = largest(finite_size);
    const u32 exponent = shared_exponent(top);
    const float up = split::scale_up(exponent);
#pragma unroll 2
    for (int index = lane; index < total; index += 32) {
        float x[8];
        u32 hi[4], lo[4];
        load(x, index);
        unroll<4>([&](int i) { split::split_pair<1 << split::kLow>(hi[i], lo[i], x[2 * i] * up, x[2 * i + 1] * up); });
        ptx::store_shared_v4(address(index), hi[0], hi[1], hi[2], hi[3]);
        ptx::store_shared_v4(address(index) + 16, lo[0], lo[1], lo[2], lo[3]);
    }
    if (lane == 0) store_unit(unit, exponent);
}

// Splits a warp's part of P or dS on its way to a tile of weights; with `relu`, negative values become 0.
template <int stride, bool relu, int tiles_m, int tiles_n>
__device__ __forceinline__ void store_split(TileAt to, const float (&x)[tiles_m][tiles_n][4]) {
    const i32 lane = threadIdx.x % 32;
    auto kept = [](float value) { return relu && value < 0.f ? 0.f : value; };
    float top = 0;
    unroll<tiles_m, tiles_n, 4>([&](int m, int n, int i) { top = fmaxf(top, finite_size(kept(x[m][n][i]))); });
    const u32 exponent = shared_exponent(top);
    const float up = split::scale_up(exponent);
    const u32 at = to.tile + lane / 4 * stride + lane % 4 * 4;
    unroll<tiles_m, tiles_n, 2>([&](int m, int n, int half) {
        u32 hi, lo;
        split::split_pair<1 << split::kLow>(hi, lo, kept(x[m][n][2 * half]) * up, kept(x[m][n][2 * half + 1]) * up);
        const u32 address = at + (m * 16 + half * 8) * stride + n * split_bytes;
        ptx::store_shared(address, hi);
        ptx::store_shared(address + 16, lo);
    });
    constexpr int blocks_n = tiles_n / 2;
    if (lane < tiles_m * blocks_n) store_unit(to.units + (lane / blocks_n * (cfg::block_n / 16) + lane % blocks_n) * 4, exponent);
}
