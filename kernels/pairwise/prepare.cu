// Points as tensor cores are to have them (pairwise/points.cuh): relative to the keys' mean, in units in which |x - y|^2 is z, times a power of two
// for all.  pairwise_add sums keys, pairwise_extent finds the greatest coordinate, pairwise_prepare does the rest.  Grid: blocks; rows or keys.
#include "attn/math.cuh"

// Mirrored by PREPARE in cuattn/pairwise/tensor_cores.py.  Arrays are contiguous; the batch's points lie behind one another.
struct PrepareParams {
    const float *given_x, *given_y;            // (rows, given_dim), (keys, given_dim)
    const double* factors;                     // the factor of z if it lies on the device, else null
    double* added;                             // (cfg::adders, given_dim): sums of keys
    const cfg::log *row_log, *key_log;         // natural logarithms of weights, or null
    u32* extent;                               // bits of the greatest number, 0 before
    float *x, *y, *of_row, *of_key, *unit;     // scaled points; what exponents have of each; factor of products
    double *squares, *scale;                   // |x|^2 of rows, or null; what given numbers were multiplied by
    double factor;
    i64 n_rows, n_keys;                        // of the whole batch
    i32 given_dim;
};

constexpr int kThreads = 256;

// The rows or the keys.
struct Side {
    const float* given;
    const cfg::log* logs;
    float *scaled, *of_each;
    double* squares;
    i64 count;
};

__device__ __forceinline__ Side side_of(const PrepareParams& p) {
    if (blockIdx.y == 0) return {p.given_x, p.row_log, p.x, p.of_row, p.squares, p.n_rows};
    return {p.given_y, p.key_log, p.y, p.of_key, nullptr, p.n_keys};
}

__device__ __forceinline__ double root_of(const PrepareParams& p) { return sqrt(p.factors == nullptr ? p.factor : *p.factors); }

__device__ __forceinline__ float coordinate(float given, double centre, double root) {
    return static_cast<float>((static_cast<double>(given) - centre) * root);
}

struct Centre {
    double at[cfg::dim];

    __device__ __forceinline__ void find(const PrepareParams& p) {
        for (i32 c = threadIdx.x; c < p.given_dim; c += kThreads) {
            double sum = 0;
#pragma unroll 8
            for (int n = 0; n < cfg::adders; ++n) sum += p.added[n * p.given_dim + c];
            at[c] = sum / static_cast<double>(p.n_keys);
        }
        __syncthreads();
    }
};

// A thread stays with one coordinate.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_add(const __grid_constant__ PrepareParams p) {
    __shared__ double sums[kThreads];
    const int at_once = kThreads / p.given_dim, own = threadIdx.x / p.given_dim, c = threadIdx.x % p.given_dim;
    double sum = 0;
    if (own < at_once) {
#pragma unroll 4
        for (i64 key = static_cast<i64>(blockIdx.x) * at_once + own; key < p.n_keys; key += static_cast<i64>(cfg::adders) * at_once) {
            sum += static_cast<double>(p.given_y[key * p.given_dim + c]);
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (own > 0) return;
    for (int n = 1; n < at_once; ++n) sum += sums[n * p.given_dim + c];
    p.added[blockIdx.x * p.given_dim + c] = sum;
}

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_extent(const __grid_constant__ PrepareParams p) {
    __shared__ Centre centre;
    const Side side = side_of(p);
    const double root = root_of(p);
    centre.find(p);
    const i64 all = side.count * p.given_dim;
    u32 greatest = 0;
    for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < all; i += static_cast<i64>(gridDim.x) * kThreads) {
        const u32 bits = __float_as_uint(coordinate(side.given[i], centre.at[i % p.given_dim], root)) & 0x7fffffffu;
        if (bits < 0x7f800000u) greatest = max(greatest, bits);
    }
    greatest = __reduce_max_sync(~0u, greatest);
    if (threadIdx.x % 32 == 0) atomicMax(p.extent, greatest);
}

// A warp has one point at a time.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_prepare(const __grid_constant__ PrepareParams p) {
    constexpr int kWarps = kThreads / 32, kTop = 15;  // largest exponent of a half
    __shared__ Centre centre;
    centre.find(p);
    const Side side = side_of(p);
    const int lane = threadIdx.x % 32;
    const double root = root_of(p);
    const u32 extent = *p.extent;
    const int exponent = extent == 0 ? 0 : max(static_cast<int>(extent >> 23) - 126, -40);  // no number reaches 2^exponent
    const float up = __uint_as_float(static_cast<u32>(127 + kTop - exponent) << 23);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
        *p.unit = 2.f / up / up;
        *p.scale = root * up;
    }
    for (i64 point = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / 32; point < side.count; point += static_cast<i64>(gridDim.x) * kWarps) {
        double square = 0;
        for (i32 c = lane; c < cfg::dim; c += 32) {
            const float own = c < p.given_dim ? coordinate(side.given[point * p.given_dim + c], centre.at[c], root) : 0.f;
            square += static_cast<double>(own) * own;
            side.scaled[point * cfg::dim + c] = own * up;
        }
        for (int distance = 16; distance > 0; distance /= 2) square += __shfl_xor_sync(~0u, square, distance);
        if (lane == 0) {
            const double given = side.logs == nullptr ? 0. : kLog2e * static_cast<double>(side.logs[point]);
            const double log = given > 1e30 ? 1e30 : given;  // infinity less a reference would be NaN
            side.of_each[point] = static_cast<float>(cfg::logs ? log - square : square);
            if (side.squares != nullptr) side.squares[point] = square;
        }
    }
}
