// acc += A B for two tiles in shared memory, by element type.
//
// product<length, along_a, stride_a, along_b, stride_b>(acc, a, b) sums over `length` elements, for this warp's 16 tiles_m x 8 tiles_n
// results; a and b are the warp's parts of the tiles, stride_a and stride_b their rows in bytes.
#pragma once
#include "sm80/mma_f64.cuh"
#include "ptx/shared.cuh"
#include "ptx/registers.cuh"
#include "sm80/bwd_fragments.cuh"
#include "sm80/bwd_split.cuh"

namespace sm80 {

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

template <class E>
struct Product {  // __half, __nv_bfloat16; loads run one 16-column block of B, and up to one step of A, ahead of the products
    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run(float (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b) {
        static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
        constexpr int blocks = tiles_n / 2, total = length / 16 * blocks;
        constexpr int ahead = tiles_m <= 2 ? 1 : 0;  // steps that A is loaded ahead; more rows would take too many registers
        const u32 lane_a = lane_address<along_a == Along::columns, stride_a>(a.tile);
        const u32 lane_b = lane_address<along_b == Along::rows, stride_b>(b.tile);
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
                Mma<E>::mma(acc[m][2 * block], fa[step % (1 + ahead)][m], fb[i % 2][0], fb[i % 2][1]);
                Mma<E>::mma(acc[m][2 * block + 1], fa[step % (1 + ahead)][m], fb[i % 2][2], fb[i % 2][3]);
            }
        }
    }
};

template <>
struct Product<float> {
    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
    static __device__ __forceinline__ void run(float (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b) {
        const SplitProduct<cfg::tf32 ? 1 : 3, length, along_a, stride_a, along_b, stride_b, tiles_m, tiles_n> product(a.tile, b.tile);
        product.run(acc, a.units, b.units);
    }
};

struct Nothing {
    template <class... Arguments>
    __device__ __forceinline__ void operator()(Arguments...) const {}
};

template <>
struct Product<double> {
    // Address of the lane's element (l / 4, l % 4), the second along the axis that is summed over.
    template <Along along, int stride>
    static __device__ __forceinline__ u32 lane_address(u32 tile) {
        const u32 lane = threadIdx.x % 32, across = lane / 4, along_it = lane % 4;
        return ptx::opaque(static_cast<i32>(tile + (along == Along::columns ? slot(across) * stride + along_it * 8 : slot(along_it) * stride + across * 8)));
    }
    // The element (outer, inner) further on.
    template <Along along, int stride>
    static __device__ __forceinline__ double load(u32 lane, int outer, int inner) {
        double x;
        ptx::load_shared(x, lane + (along == Along::columns ? outer * stride + inner * 8 : inner * stride + outer * 8));
        return x;
    }

    // The operands of one instruction's length.
    template <int tiles_m, int tiles_n>
    struct Step {
        double a[tiles_m][4], b[tiles_n][2];
    };

    // Loads run one step ahead of the products, two where few registers are needed.  ready() comes before the first load from a;
    // between(step) is other work to be done meanwhile.
    template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n, class Ready = Nothing, class Between = Nothing>
    static __device__ __forceinline__ void run(double (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b, const Ready& ready = {},
                                               const Between& between = {}) {
        constexpr int count = length / 8;
        constexpr bool few = tiles_n <= 2 && count <= 16 && count > 2;
        constexpr int depth = few ? 3 : 2, unrolled = few ? count : count <= 2 ? 2 : 4;
        const u32 lane_a = lane_address<along_a, stride_a>(a.tile), lane_b = lane_address<along_b, stride_b>(b.tile);
        Step<tiles_m, tiles_n> steps[depth];
        auto load_a = [&](Step<tiles_m, tiles_n>& step, int k) {
#pragma unroll
            for (int m = 0; m < tiles_m; ++m)
#pragma unroll
                for (int r = 0; r < 4; ++r) step.a[m][r] = load<along_a, stride_a>(lane_a, 16 * m + r % 2 * 8, k + r / 2 * 4);
        };
        auto load_b = [&](Step<tiles_m, tiles_n>& step, int k) {
#pragma unroll
            for (int n = 0; n < tiles_n; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) step.b[n][r] = load<along_b, stride_b>(lane_b, 8 * n, k + 4 * r);
        };
        const auto multiply = [&](const Step<tiles_m, tiles_n>& step, int first, int last) {
#pragma unroll
            for (int n = first; n < last; ++n)
#pragma unroll
                for (int m = 0; m < tiles_m; ++m) Mma<double>::mma(acc[m][n], step.a[m], step.b[n][0], step.b[n][1]);
        };
        load_b(steps[0], 0);
        ready();
        load_a(steps[0], 0);
#pragma unroll
        for (int k = 1; k < depth - 1; ++k) load_a(steps[k], 8 * k), load_b(steps[k], 8 * k);
#pragma unroll unrolled
        for (int k = 0; k < length; k += 8) {
            const Step<tiles_m, tiles_n>& now = steps[k / 8 % depth];
            constexpr int early = count == 2 ? tiles_n / 2 : 0;  // of two steps, the first begins before the second is loaded
            multiply(now, 0, early);
            if (early && k == 0) __syncwarp();  // loads are not moved ahead of this
            if (const int next = k + 8 * (depth - 1); next < length) {
                load_a(steps[next / 8 % depth], next);
                load_b(steps[next / 8 % depth], next);
            }
            between(k / 8);
            multiply(now, early, tiles_n);
        }
    }
};

template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void product(Acc (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b) {
    Product<Elem>::template run<length, along_a, stride_a, along_b, stride_b>(acc, a, b);
}

// The same for an acc that adds up many tiles.  In float64, which is rounded after every term, the sum of these tiles is made by itself.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void add_product(Acc (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b) {
    if constexpr (sizeof(Elem) < 8) {
        product<length, along_a, stride_a, along_b, stride_b>(acc, a, b);
    } else {
        Acc sum[tiles_m][tiles_n][4];
        clear(sum);
        product<length, along_a, stride_a, along_b, stride_b>(sum, a, b);
        for_numbers<tiles_m, tiles_n>([&](int m, int n, int i) { acc[m][n][i] += sum[m][n][i]; });
    }
}

}  // namespace sm80
