// Sums over all keys y_j for each row x_i, of a function k of |x_i - y_j|, from differences of coordinates:
//
// cfg::reduction 0   sum_j k_ij v_j                                               to p.sums
//                1   log2 sum_j 2^(key_log_j - z_ij)                              to p.moments
//                2   sum_j g_ij (x_i - y_j), sum_j g_ij z_ij, sum_j k_ij v_j      to p.directions, p.moments, p.sums (cfg::values)
//                    with g_ij = (u_i . v_j) (-dk/dw)_ij, see pairwise/functions.cuh; with cfg::logs k_ij is multiplied by 2^(row_log_i + key_log_j)
//
// A thread owns cfg::thread_rows rows in registers; all threads read one key at a time, in one broadcast.  What a tile of keys adds is summed
// first, so that no sum has many terms; sums of tiles carry along what rounding took from them (Kahan).
// Grid: row blocks; parts of the keys, times groups of cfg::width columns; batch.  Each part writes results of its own.
#include "pairwise/functions.cuh"
#include "pairwise/sums.cuh"
#include "ptx/types.cuh"

using Acc = cfg::acc;
using namespace pairwise;

// Mirrored by PARAMS in cuattn/pairwise/device.py.  Arrays are contiguous, results stacked by part.
struct PairwiseParams {
    const Acc *x, *y, *u, *v, *row_log, *key_log;  // (batch, rows, dim), (batch, keys, dim), (batch, rows, columns), (batch, keys, columns)
    const double* factors;                         // the factor of z if it lies on the device, else null
    Acc *sums, *directions, *moments;
    double factor;
    i32 n_rows, n_keys, columns, parts, keys_per_part;
};

constexpr int kThreads = 128, kKeys = 128, kRows = cfg::thread_rows, kDim = cfg::dim;
constexpr bool kLse = cfg::reduction == 1, kGradient = cfg::reduction == 2;
constexpr bool kSums = cfg::reduction == 0 || (kGradient && cfg::values);
constexpr bool kLogs = kLse || (kGradient && cfg::logs);
constexpr int kWidth = kLse ? 0 : cfg::width, kColumns = kWidth ? kWidth : 1;
constexpr int kBlocks = kLse && kDim <= 3 && same_type<Acc, float> ? 6 : 0;  // that share a multiprocessor for certain, as _BLOCKS there tells
constexpr int kVector = 16 / sizeof(Acc), kStride = (kDim + kWidth + kLogs + kVector - 1) / kVector * kVector;

// A key: its coordinates, its columns of v, its logarithm.
struct alignas(16) Key {
    Acc at[kStride];
};

struct Rows {
    Acc x[kRows][kDim];

    __device__ __forceinline__ Acc squared_distance(int r, const Key& key, Acc (&difference)[kDim]) const {
        Acc sum = 0;
        unroll<kDim>([&](int c) {
            difference[c] = x[r][c] - key.at[c];
            sum = c ? fma_of(difference[c], difference[c], sum) : difference[c] * difference[c];
        });
        return sum;
    }
    __device__ __forceinline__ Acc squared_distance(int r, const Key& key) const {
        Acc difference[kDim];
        return squared_distance(r, key, difference);
    }
};

// A tile of keys; those that do not exist add nothing: their v is 0, their logarithm -inf.
__device__ __forceinline__ void load_keys(Key* tile, const PairwiseParams& p, const Share& share, i32 first) {
    const i32 j = first + threadIdx.x;
    const bool there = j < share.stop;
    const i64 key = share.batch * p.n_keys + (there ? j : 0);
    Acc log = kLogs && there ? p.key_log[key] : -infinity<Acc>();
    if (kLse && log > -Range<Acc>::lowest) log = -Range<Acc>::lowest;  // infinity less a reference would be NaN
    Key own;
    unroll<kStride>([&](int c) {
        own.at[c] = 0;
        if (c < kDim) own.at[c] = there ? p.y[key * kDim + c] : Acc(0);
        else if (c < kDim + kWidth) own.at[c] = there && share.column + c - kDim < p.columns ? p.v[key * p.columns + share.column + c - kDim] : Acc(0);
        else if (kLogs && c == kDim + kWidth) own.at[c] = log;
    });
    __syncthreads();  // nobody reads the last tile any more
    tile[threadIdx.x] = own;
    __syncthreads();
}

// Calls work(r, row) for the rows that exist.
template <class Work>
__device__ __forceinline__ void for_rows(const PairwiseParams& p, const Work& work) {
    unroll<kRows>([&](int r) {
        const i32 row = (blockIdx.x * kRows + r) * kThreads + threadIdx.x;
        if (row < p.n_rows) work(r, row);
    });
}

__device__ __forceinline__ void sum_rows(const Rows& rows, Key* tile, const PairwiseParams& p, const Share& share, Acc factor) {
    Total<Acc> totals[kRows][kColumns];
    for (i32 j = share.start; j < share.stop; j += kKeys) {
        load_keys(tile, p, share, j);
        Acc sums[kRows][kColumns] = {};
#pragma unroll 4
        for (int n = 0; n < kKeys; ++n) {
            const Key key = tile[n];
            unroll<kRows>([&](int r) {
                const Acc k = evaluate<cfg::function>(rows.squared_distance(r, key) * factor).value;
                unroll<kWidth>([&](int c) { sums[r][c] = fma_of(k, key.at[kDim + c], sums[r][c]); });
            });
        }
        unroll<kRows, kWidth>([&](int r, int c) { totals[r][c].add(sums[r][c]); });
    }
    for_rows(p, [&](int r, i32 row) {
        unroll<kWidth>([&](int c) {
            if (share.column + c < p.columns) p.sums[(share.of_parts() * p.n_rows + row) * p.columns + share.column + c] = totals[r][c].sum;
        });
    });
}

// A row's sum l is relative to 2^m.  The reference m stays until the sum of a few keys grows too large for it: then these are summed anew, relative to
// the greatest term so far, as are the first that have any.  As long as the rows of a thread are not far apart they share one reference, which
// is then subtracted once for each key; so it is for a warp, which would go both ways otherwise.  An own reference is subtracted last: a row's greatest
// term is rounded like it, and their difference exact, however large both are.
struct LogSums {
    static constexpr Acc kApart = 80;  // exponents that may lie between rows, so that the lower one's terms are no denormal numbers
    static constexpr Acc kLarge = same_type<Acc, double> ? Acc(0x1p54) : Acc(0x1p25);  // neighbours of larger exponents are further apart

    static constexpr int kFew = 16;

    Total<Acc> l[kRows];
    Acc m[kRows], tile_sums[kRows], sums[kRows];
    bool shared = true;

    __device__ __forceinline__ LogSums() {
        unroll<kRows>([&](int r) { m[r] = Range<Acc>::lowest; });
    }

    template <bool one_reference>
    __device__ __forceinline__ void sum_keys(const Rows& rows, const Key* keys, Acc factor) {
        unroll<kRows>([&](int r) { sums[r] = 0; });
#pragma unroll 4
        for (int n = 0; n < kFew; ++n) {
            const Key key = keys[n];
            const Acc start = one_reference ? key.at[kDim] - m[0] : key.at[kDim];
            unroll<kRows>([&](int r) {
                const Acc term = fma_of(rows.squared_distance(r, key), -factor, start);
                sums[r] += power_of_2(one_reference ? term : term - m[r]);
            });
        }
    }

    __device__ __forceinline__ void sum_few(const Rows& rows, const Key* keys, Acc factor) {
        if (shared) sum_keys<true>(rows, keys, factor);
        else sum_keys<false>(rows, keys, factor);
    }

    // Raises the references to the greatest terms so far.
    __device__ __forceinline__ void refer(const Rows& rows, const Key* keys, Acc factor) {
        Acc greatest[kRows];
        unroll<kRows>([&](int r) {
            const Acc sum = l[r].sum + tile_sums[r];
            greatest[r] = sum > Acc(0) ? m[r] + log2(sum) : Range<Acc>::lowest;
        });
#pragma unroll 4
        for (int n = 0; n < kFew; ++n) {
            const Key key = keys[n];
            unroll<kRows>([&](int r) { greatest[r] = max_of(greatest[r], fma_of(rows.squared_distance(r, key), -factor, key.at[kDim])); });
        }
        Acc most = greatest[0], least = greatest[0];
        unroll<kRows>([&](int r) {
            most = max_of(most, greatest[r]);
            least = -max_of(-least, -greatest[r]);
        });
        shared = shared && most - least < kApart && most < kLarge && least > -kLarge;
        unroll<kRows>([&](int r) {
            const Acc next = shared ? most : greatest[r], root = power_of_2(Acc(0.5) * (m[r] - next));
            l[r].scale(root);
            tile_sums[r] = tile_sums[r] * root * root;
            m[r] = next;
        });
    }

    __device__ __forceinline__ void add(const Rows& rows, const Key* tile, Acc factor) {
        unroll<kRows>([&](int r) { tile_sums[r] = 0; });
#pragma unroll 1
        for (const Key* keys = tile; keys < tile + kKeys; keys += kFew) {
            sum_few(rows, keys, factor);
            bool fits = true;
            unroll<kRows>([&](int r) { fits = fits && !(sums[r] >= Range<Acc>::most); });  // NaN stays
            if (!fits) {
                refer(rows, keys, factor);
                sum_few(rows, keys, factor);
            }
            unroll<kRows>([&](int r) { tile_sums[r] += sums[r]; });
        }
        shared = __all_sync(~0u, shared);
        unroll<kRows>([&](int r) { l[r].add(tile_sums[r]); });
    }
};

__device__ __forceinline__ void log_sum_rows(const Rows& rows, Key* tile, const PairwiseParams& p, const Share& share, Acc factor) {
    LogSums found;
    for (i32 j = share.start; j < share.stop; j += kKeys) {
        load_keys(tile, p, share, j);
        found.add(rows, tile, factor);
    }
    for_rows(p, [&](int r, i32 row) {
        const Acc l = found.l[r].sum, m = found.m[r];
        p.moments[share.of_blocks() * p.n_rows + row] = m > Acc(-0.1) * Range<Acc>::lowest ? l * infinity<Acc>() : m + log2(l);
    });
}

__device__ __forceinline__ void gradient_rows(const Rows& rows, Key* tile, const PairwiseParams& p, const Share& share, Acc factor) {
    Acc u[kRows][kColumns] = {}, row_log[kRows] = {};
    for_rows(p, [&](int r, i32 row) {
        const i64 at = share.batch * p.n_rows + row;
        unroll<kWidth>([&](int c) { u[r][c] = share.column + c < p.columns ? p.u[at * p.columns + share.column + c] : Acc(0); });
        if constexpr (kLogs) row_log[r] = p.row_log[at];
    });
    Acc directions[kRows][kDim] = {}, moments[kRows] = {}, values[kRows][kColumns] = {};
    for (i32 j = share.start; j < share.stop; j += kKeys) {
        load_keys(tile, p, share, j);
        Acc tile_directions[kRows][kDim] = {}, tile_moments[kRows] = {}, tile_values[kRows][kColumns] = {};
#pragma unroll 2
        for (int n = 0; n < kKeys; ++n) {
            const Key key = tile[n];
            unroll<kRows>([&](int r) {
                Acc difference[kDim], product = 0;
                const Acc z = rows.squared_distance(r, key, difference) * factor;
                const Value<Acc> k = [&]() -> Value<Acc> {
                    if constexpr (kLogs) {
                        const Acc value = power_of_2(row_log[r] + key.at[kDim + kWidth] - z);
                        return {value, value};
                    } else return evaluate<cfg::function>(z);
                }();
                unroll<kWidth>([&](int c) {
                    product = c ? fma_of(u[r][c], key.at[kDim + c], product) : u[r][c] * key.at[kDim + c];
                    if constexpr (kSums) tile_values[r][c] = fma_of(k.value, key.at[kDim + c], tile_values[r][c]);
                });
                const Acc g = product * k.slope;
                unroll<kDim>([&](int c) { tile_directions[r][c] = fma_of(g, difference[c], tile_directions[r][c]); });
                tile_moments[r] = fma_of(g, z, tile_moments[r]);
            });
        }
        unroll<kRows>([&](int r) {
            unroll<kDim>([&](int c) { directions[r][c] += tile_directions[r][c]; });
            unroll<kColumns>([&](int c) { values[r][c] += tile_values[r][c]; });
            moments[r] += tile_moments[r];
        });
    }
    const i64 part = share.of_blocks();
    for_rows(p, [&](int r, i32 row) {
        unroll<kDim>([&](int c) { p.directions[(part * p.n_rows + row) * kDim + c] = directions[r][c]; });
        p.moments[part * p.n_rows + row] = moments[r];
        if constexpr (kSums) {
            unroll<kWidth>([&](int c) {
                if (share.column + c < p.columns) p.sums[(share.of_parts() * p.n_rows + row) * p.columns + share.column + c] = values[r][c];
            });
        }
    });
}

extern "C" __global__ __launch_bounds__(kThreads, kBlocks) void pairwise_rows(const __grid_constant__ PairwiseParams p) {
    __shared__ Key tile[kKeys];
    const Share share(p);
    const Acc factor = static_cast<Acc>(p.factors == nullptr ? p.factor : *p.factors);
    Rows rows;
    unroll<kRows>([&](int r) { unroll<kDim>([&](int c) { rows.x[r][c] = 0; }); });
    for_rows(p, [&](int r, i32 row) { unroll<kDim>([&](int c) { rows.x[r][c] = p.x[(share.batch * p.n_rows + row) * kDim + c]; }); });
    if constexpr (kLse) log_sum_rows(rows, tile, p, share, factor);
    else if constexpr (kGradient) gradient_rows(rows, tile, p, share, factor);
    else sum_rows(rows, tile, p, share, factor);
}
