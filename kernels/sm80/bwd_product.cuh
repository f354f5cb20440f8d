// acc += A B for two tiles in shared memory, by element type.
//
// product<length, along_a, stride_a, along_b, stride_b>(acc, a, b) sums over `length` elements, for this warp's 16 tiles_m x 8 tiles_n
// results; a and b are the warp's parts of the tiles, stride_a and stride_b their rows in bytes.  Of an acc with more columns (`all`), those
// behind the tiles_n first are left alone.
#pragma once
#include "ptx/registers.cuh"
#include "sm80/bwd_tiles.cuh"
#include "sm80/mma.cuh"

// How an operand lies in shared memory: with the axis that the product sums over along its columns (both of Q K^T) or along its rows.
enum class Along { columns, rows };

// Four 8 x 8 blocks, transposed where the operand lies along its rows.
template <Along along>
__device__ __forceinline__ void load_blocks(u32 (&fragment)[4], u32 address) {
    if constexpr (along == Along::columns) ptx::ldmatrix_x4(fragment, address);
    else ptx::ldmatrix_x4_trans(fragment, address);
}

// float16, bfloat16; loads run one 16-column block of B, and up to one step of A, ahead of the products.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_n, int tiles_m, int all>
__device__ __forceinline__ void product_of_halves(float (&acc)[tiles_m][all][4], TileAt a, TileAt b) {
    static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
    constexpr int blocks = tiles_n / 2, total = length / 16 * blocks;
    constexpr int ahead = tiles_m <= 2 ? 1 : 0;  // steps that A is loaded ahead; more rows would take too many registers
    constexpr bool a_columns = along_a == Along::columns, b_columns = along_b == Along::columns;
    // The addresses that this lane gives to ldmatrix for the first 16 x 16 block: the four 8 x 8 blocks in the order (0, 0) (8, 0) (0, 8) (8, 8)
    // for A summed along its columns and B summed along its rows, else in the order (0, 0) (0, 8) (8, 0) (8, 8).
    const u32 lane = threadIdx.x % 32;
    const u32 lane_a = a.tile + (a_columns ? lane % 16 * stride_a + lane / 16 * 16 : (lane % 8 + lane / 16 * 8) * stride_a + lane / 8 % 2 * 16);
    const u32 lane_b = b.tile + (b_columns ? (lane % 8 + lane / 16 * 8) * stride_b + lane / 8 % 2 * 16 : lane % 16 * stride_b + lane / 16 * 16);
    u32 fa[1 + ahead][tiles_m][4], fb[2][4];
    const auto load_a = [&](int step) {
        unroll<tiles_m>([&](int m) { load_blocks<along_a>(fa[step % (1 + ahead)][m], lane_a + (a_columns ? m * 16 * stride_a + step * 32 : step * 16 * stride_a + m * 32)); });
    };
    const auto load_b = [&](int i) {
        const int block = i % blocks, step = i / blocks;
        load_blocks<along_b>(fb[i % 2], lane_b + (b_columns ? block * 16 * stride_b + step * 32 : step * 16 * stride_b + block * 32));
    };
    if constexpr (ahead) load_a(0);
    load_b(0);
    unroll<total>([&](int i) {
        const int step = i / blocks, block = i % blocks;
        if (i + 1 < total) load_b(i + 1);
        if (block == 0 && step + ahead < length / 16) load_a(step + ahead);
        unroll<tiles_m, 2>([&](int m, int half) { mma<Elem>(acc[m][2 * block + half], fa[step % (1 + ahead)][m], fb[i % 2][2 * half], fb[i % 2][2 * half + 1]); });
    });
}

// float32, as pairs of float16: a sum of 16 terms in the tensor core, which rounds towards zero, stands for its value times a unit of either factor.
//
// Scores come out as the forward has them, bit for bit: a power of two in front of a row changes no bit of a sum.  (Unless rows of one block
// are 2^28 and more apart.)  The backward needs that, for its exp(s - m) / l add up to 1 only if s is what m and l were made from.
//
// Where both factors lie along their columns, both are tiles of rows; else A is one of weights.
// Loads run one 8-column block of B ahead of the products.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_n, int tiles_m, int all>
__device__ __forceinline__ void product_of_pairs(float (&acc)[tiles_m][all][4], TileAt a, TileAt b) {
    static_assert(length % 16 == 0 && tiles_n % 2 == 0, "the product works on 16 x 16 blocks");
    constexpr int products = cfg::tf32 ? 1 : 3;
    constexpr bool a_columns = along_a == Along::columns, b_columns = along_b == Along::columns, weights = !(a_columns && b_columns);
    const u32 lane = threadIdx.x % 32;  // the addresses that it gives to ldmatrix:
    const u32 lane_a = a.tile + (a_columns ? lane % 16 * stride_a + lane / 16 * split_bytes : (lane % 8 + lane / 16 * 8) * stride_a + lane / 8 % 2 * split_bytes);
    const u32 lane_b = b.tile + (b_columns ? lane % 8 * stride_b + lane / 8 % 2 * split_bytes : lane % 16 * stride_b) + lane / 16 * 16;
    const auto load_a = [&](u32 (&x)[tiles_m][4], int step, int part) {
        unroll<tiles_m>([&](int m) {
            load_blocks<along_a>(x[m], lane_a + (a_columns ? step * 2 * split_bytes + m * 16 * stride_a : step * 16 * stride_a + m * 2 * split_bytes) + part);
        });
    };
    const auto load_b = [&](u32 (&x)[4], int step, int n) {
        load_blocks<along_b>(x, lane_b + (b_columns ? step * 2 * split_bytes + n * 8 * stride_b : step * 16 * stride_b + n * split_bytes));
    };
    // Products of units: of rows with rows they hold for all steps, of weights with rows for one.  From one unit of A to the next, along the axis
    // that is kept and along the one that is summed over:
    constexpr int unit_blocks = b_columns ? tiles_n / 2 : 1, unit = 4, weight_row = cfg::block_n / 16 * unit;
    constexpr int outer_a = weights && a_columns ? weight_row : unit, inner_a = !weights ? 0 : a_columns ? unit : weight_row;
    float units[tiles_m][unit_blocks];
    const auto load_units = [&](int step) {
        float of_b[unit_blocks];
        unroll<unit_blocks>([&](int n) { ptx::load_shared(of_b[n], b.units + (b_columns ? n : step) * unit); });
        unroll<tiles_m>([&](int m) {
            float of_a;
            ptx::load_shared(of_a, a.units + m * outer_a + step * inner_a);
            unroll<unit_blocks>([&](int n) { units[m][n] = of_a * of_b[n]; });
        });
    };
    if constexpr (!weights) load_units(0);
#pragma unroll 1  // unrolled, loads would be moved to the front and their registers with them
    for (int step = 0; step < length / 16; ++step) {
        u32 hi[tiles_m][4], lo[tiles_m][4], x[2][4];
        load_a(hi, step, 0);
        if constexpr (products == 3) load_a(lo, step, 16);
        load_b(x[0], step, 0);
        if constexpr (weights) load_units(step);
        unroll<tiles_n>([&](int n) {
            if (n + 1 < tiles_n) load_b(x[(n + 1) % 2], step, n + 1);
            split::Sums<products, tiles_m> sums;
            unroll<tiles_m>([&](int m) {
                sums.add(m, hi[m], lo[m], x[n % 2]);
                unroll<4>([&](int r) { acc[m][n][r] = fmaf(sums.total(m, r), units[m][b_columns ? n / 2 : 0], acc[m][n][r]); });
            });
        });
    }
}

struct Nothing {
    template <class... Arguments>
    __device__ __forceinline__ void operator()(Arguments...) const {}
};

// The operands of one instruction's length in float64.
template <int tiles_m, int tiles_n>
struct Step {
    double a[tiles_m][4], b[tiles_n][2];
};

// float64.  A lane has element (l / 4, l % 4) of its operands, the second along the axis that is summed over.  Loads run one step ahead of the
// products, two where few registers are needed.  ready() comes before the first load from a; between(step) is other work to be done meanwhile.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_n, int tiles_m, int all, class Ready, class Between>
__device__ __forceinline__ void product_of_doubles(double (&acc)[tiles_m][all][4], TileAt a, TileAt b, const Ready& ready, const Between& between) {
    constexpr int count = length / 8;
    constexpr bool few = tiles_n <= 2 && count <= 16 && count > 2;
    constexpr int depth = few ? 3 : 2, unrolled = few ? count : count <= 2 ? 2 : 4;
    const auto lane_address = [&](u32 tile, bool columns, int stride) {
        const u32 lane = threadIdx.x % 32, across = lane / 4, along_it = lane % 4;
        return static_cast<u32>(ptx::opaque(static_cast<i32>(tile + (columns ? slot(across) * stride + along_it * 8 : slot(along_it) * stride + across * 8))));
    };
    const auto load = [&](double& x, u32 lane, bool columns, int stride, int outer, int inner) {
        ptx::load_shared(x, lane + (columns ? outer * stride + inner * 8 : inner * stride + outer * 8));
    };
    constexpr bool a_columns = along_a == Along::columns, b_columns = along_b == Along::columns;
    const u32 lane_a = lane_address(a.tile, a_columns, stride_a), lane_b = lane_address(b.tile, b_columns, stride_b);
    Step<tiles_m, tiles_n> steps[depth];
    const auto load_a = [&](Step<tiles_m, tiles_n>& step, int k) {
        unroll<tiles_m, 4>([&](int m, int r) { load(step.a[m][r], lane_a, a_columns, stride_a, 16 * m + r % 2 * 8, k + r / 2 * 4); });
    };
    const auto load_b = [&](Step<tiles_m, tiles_n>& step, int k) {
        unroll<tiles_n, 2>([&](int n, int r) { load(step.b[n][r], lane_b, b_columns, stride_b, 8 * n, k + 4 * r); });
    };
    const auto multiply = [&](const Step<tiles_m, tiles_n>& step, int first, int last) {
#pragma unroll
        for (int n = first; n < last; ++n) unroll<tiles_m>([&](int m) { mma(acc[m][n], step.a[m], step.b[n][0], step.b[n][1]); });
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

template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int own_tiles = 0, int tiles_m, int all, class Ready = Nothing,
          class Between = Nothing>
__device__ __forceinline__ void product(Acc (&acc)[tiles_m][all][4], TileAt a, TileAt b, const Ready& ready = {}, const Between& between = {}) {
    constexpr int tiles_n = own_tiles ? own_tiles : all;
    if constexpr (is_split) product_of_pairs<length, along_a, stride_a, along_b, stride_b, tiles_n>(acc, a, b);
    else if constexpr (sizeof(Elem) == 8) product_of_doubles<length, along_a, stride_a, along_b, stride_b, tiles_n>(acc, a, b, ready, between);
    else product_of_halves<length, along_a, stride_a, along_b, stride_b, tiles_n>(acc, a, b);
}

// The same for an acc that adds up many tiles.  In float64, which is rounded after every term, the sum of these tiles is made by itself.
template <int length, Along along_a, int stride_a, Along along_b, int stride_b, int tiles_m, int tiles_n>
__device__ __forceinline__ void add_product(Acc (&acc)[tiles_m][tiles_n][4], TileAt a, TileAt b) {
    if constexpr (sizeof(Elem) < 8) {
        product<length, along_a, stride_a, along_b, stride_b>(acc, a, b);
    } else {
        Acc sum[tiles_m][tiles_n][4] = {};
        product<length, along_a, stride_a, along_b, stride_b>(sum, a, b);
        unroll<tiles_m, tiles_n, 4>([&](int m, int n, int i) { acc[m][n][i] += sum[m][n][i]; });
    }
}
