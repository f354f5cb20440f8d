// float32 in the backward: tiles and weights as pairs of float16 (sm80/split_f32.cuh), and the products of such tiles.
//
// Blocks of 16 rows of q, k, v, do share an exponent e, and so does each warp's part of P or dS: the largest finite |x| of a block is below
// 2^(e + 1).  A block's unit is 2^(e - 14); units lie in shared memory, [rows / 16], of weights [rows / 16][keys / 16].  Every product sums
// 16 terms in the tensor core, which rounds towards zero, and what such a sum stands for is its value times a unit of either factor.
//
// Scores come out as the forward has them, bit for bit: a power of two in front of a row changes no bit of a sum.  (Unless rows of one block
// are 2^28 and more apart.)  The backward needs that, for its exp(s - m) / l add up to 1 only if s is what m and l were made from.
#pragma once
#include "sm80/split_f32.cuh"
#include "ptx/shared.cuh"
#include "sm80/bwd_fragments.cuh"

namespace sm80 {

// Eight float32 become eight hi, then eight lo, in place.
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
    auto address = [&](int index) { return rows + index / chunks * row_bytes<columns> + index % chunks * split_bytes; };
    auto largest = [&](auto size) {
        float top = 0;
#pragma unroll 4
        for (int index = lane; index < total; index += 32) {
            float4 x, y;
            ptx::load_shared(x, address(index));
            ptx::load_shared(y, address(index) + 16);
            top = fmaxf(top, fmaxf(fmaxf(size(x.x), size(x.y)), fmaxf(size(x.z), size(x.w))));
            top = fmaxf(top, fmaxf(fmaxf(size(y.x), size(y.y)), fmaxf(size(y.z), size(y.w))));
        }
        return top;
    };
    float top = largest([](float x) { return fabsf(x); });
    if (__any_sync(~0u, top == infinity<float>())) top = largest(finite_size);
    const u32 exponent = shared_exponent(top);
    const float up = split::scale_up(exponent);
#pragma unroll 2
    for (int index = lane; index < total; index += 32) {
        float4 x, y;
        ptx::load_shared(x, address(index));
        ptx::load_shared(y, address(index) + 16);
        u32 hi[4], lo[4];
        split::split_pair<1 << split::kLow>(hi[0], lo[0], x.x * up, x.y * up);
        split::split_pair<1 << split::kLow>(hi[1], lo[1], x.z * up, x.w * up);
        split::split_pair<1 << split::kLow>(hi[2], lo[2], y.x * up, y.y * up);
        split::split_pair<1 << split::kLow>(hi[3], lo[3], y.z * up, y.w * up);
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
    for_numbers<tiles_m, tiles_n>([&](int m, int n, int i) { top = fmaxf(top, finite_size(kept(x[m][n][i]))); });
    const u32 exponent = shared_exponent(top);
    const float up = split::scale_up(exponent);
    const u32 at = to.tile + lane / 4 * stride + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < tiles_m; ++m)
#pragma unroll
        for (int n = 0; n < tiles_n; ++n)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                u32 hi, lo;
                split::split_pair<1 << split::kLow>(hi, lo, kept(x[m][n][2 * half]) * up, kept(x[m][n][2 * half + 1]) * up);
                const u32 address = at + (m * 16 + half * 8) * stride + n * split_bytes;
                ptx::store_shared(address, hi);
                ptx::store_shared(address + 16, lo);
            }
    constexpr int blocks_n = tiles_n / 2;
    if (lane < tiles_m * blocks_n) store_unit(to.units + (lane / blocks_n * (cfg::block_n / 16) + lane % blocks_n) * 4, exponent);
}

// acc += A B as sm80/bwd_product.cuh has it.  Where both factors lie along their columns, both are tiles of rows; else A is one of weights.
// Loads run one 8-column block of B ahead of the products.
template <int products, int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
struct SplitProduct {
    static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
    static constexpr bool a_columns = along_a == Along::columns, b_columns = along_b == Along::columns, weights = !(a_columns && b_columns);
    // From one unit to the next, along the axis that is kept and along the one that is summed over.
    static constexpr int unit = 4, weight_row = cfg::block_n / 16 * unit;
    static constexpr int outer_a = weights && a_columns ? weight_row : unit, inner_a = !weights ? 0 : a_columns ? unit : weight_row;

    u32 a, b;  // addresses that this lane gives to ldmatrix

    __device__ __forceinline__ SplitProduct(u32 tile_a, u32 tile_b) {
        const u32 lane = threadIdx.x % 32;
        a = tile_a + (a_columns ? lane % 16 * stride_a + lane / 16 * split_bytes : (lane % 8 + lane / 16 * 8) * stride_a + lane / 8 % 2 * split_bytes);
        b = tile_b + (b_columns ? lane % 8 * stride_b + lane / 8 % 2 * split_bytes : lane % 16 * stride_b) + lane / 16 * 16;
    }

    __device__ __forceinline__ void load_a(u32 (&hi)[tiles_m][4], u32 (&lo)[tiles_m][4], int step) const {
#pragma unroll
        for (int m = 0; m < tiles_m; ++m) {
            const u32 at = a + (a_columns ? step * 2 * split_bytes + m * 16 * stride_a : step * 16 * stride_a + m * 2 * split_bytes);
            if constexpr (a_columns) ptx::ldmatrix_x4(hi[m], at);
            else ptx::ldmatrix_x4_trans(hi[m], at);
            if constexpr (products == 1) continue;
            if constexpr (a_columns) ptx::ldmatrix_x4(lo[m], at + 16);
            else ptx::ldmatrix_x4_trans(lo[m], at + 16);
        }
    }
    __device__ __forceinline__ void load_b(u32 (&x)[4], int step, int n) const {
        if constexpr (b_columns) ptx::ldmatrix_x4(x, b + step * 2 * split_bytes + n * 8 * stride_b);
        else ptx::ldmatrix_x4_trans(x, b + step * 16 * stride_b + n * split_bytes);
    }

    // Products of units: of rows with rows they hold for all steps, of weights with rows for one.
    static constexpr int unit_blocks = b_columns ? tiles_n / 2 : 1;
    static __device__ __forceinline__ void load_units(float (&units)[tiles_m][unit_blocks], u32 units_a, u32 units_b, int step) {
        float of_b[unit_blocks];
#pragma unroll
        for (int n = 0; n < unit_blocks; ++n) ptx::load_shared(of_b[n], units_b + (b_columns ? n : step) * unit);
#pragma unroll
        for (int m = 0; m < tiles_m; ++m) {
            float of_a;
            ptx::load_shared(of_a, units_a + m * outer_a + step * inner_a);
#pragma unroll
            for (int n = 0; n < unit_blocks; ++n) units[m][n] = of_a * of_b[n];
        }
    }

    __device__ __forceinline__ void run(float (&acc)[tiles_m][tiles_n][4], u32 units_a, u32 units_b) const {
        constexpr int steps = length / 16;
        float units[tiles_m][unit_blocks];
        if constexpr (!weights) load_units(units, units_a, units_b, 0);
#pragma unroll 1  // unrolled, loads would be moved to the front and their registers with them
        for (int step = 0; step < steps; ++step) {
            u32 hi[tiles_m][4], lo[tiles_m][4], x[2][4];
            load_a(hi, lo, step);
            load_b(x[0], step, 0);
            if constexpr (weights) load_units(units, units_a, units_b, step);
#pragma unroll
            for (int n = 0; n < tiles_n; ++n) {
                if (n + 1 < tiles_n) load_b(x[(n + 1) % 2], step, n + 1);
                split::Sums<products, tiles_m> sums;
#pragma unroll
                for (int m = 0; m < tiles_m; ++m) {
                    sums.add(m, hi[m], lo[m], x[n % 2]);
#pragma unroll
                    for (int r = 0; r < 4; ++r) acc[m][n][r] = fmaf(sums.total(m, r), units[m][b_columns ? n / 2 : 0], acc[m][n][r]);
                }
            }
        }
    }
};

}  // namespace sm80
