// log2 sum_j 2^(key_log_j - z_ij), z = factor |x_i - y_j|^2, of float32 points with at most three coordinates: one product of tensor cores has all
// of an exponent.
//
// A warp owns rows that are near one another (pairwise/order.cu), and takes coordinates relative to their middle a: with u = x - a and w = y - a
//
//   key_log - z = (key_log - M - f |w|^2) + 2 f u.w - f |u|^2 + M
//
// in which nothing is much larger than what a difference of points would have given, as long as f |u|^2 is small.  2 f u and w are two halves each, so
// that a coordinate takes four of the sixteen terms of a product; the last four take the row's reference.  A key's halves are made in registers, once for
// all rows of the warp.  Where rows are not near enough one another for that, differences of coordinates are taken.
//
// A row's sum l is relative to 2^m, as in pairwise/rows.cu: here m is a whole number, and relative to f |u|^2 (`square`) where products are taken.
// It starts from what pairwise/far.cu knows the sum to be at least, and is kept near: tensor cores cut off what is beneath their largest term.
// Grid: blocks of rows; parts of the keys; batch.  Each part writes results of its own.
#include "pairwise/near.cuh"
#include "pairwise/sums.cuh"
#include "ptx/mma.cuh"

using namespace pairwise;

constexpr int kWarps = cfg::warps;
constexpr float kNear = 4.f, kApart = 80.f, kMostApart = 30000.f, kWide = 60000.f, kMostKey = 6e7f, kMostReach = 1e4f, kLarge = 0x1p25f, kLeastLog = -126.f;

// `products`: exponents by tensor cores; `shared`: by differences, with one reference for all rows; `own`: with a reference of each.
enum Mode { products, shared, own };

// The tiles of a part that a warp needs: every gridDim.y-th of all, but for those that are too far from its rows.
struct Needed {
    const NearParams& p;
    const Box* boxes;
    const float (&least)[3], (&most)[3];
    float factor, floor;
    i32 first;      // of 32 tiles of the part
    u32 left = 0;   // of them

    __device__ __forceinline__ Needed(const NearParams& p, const float (&least)[3], const float (&most)[3], float floor)
        : p(p), least(least), most(most), factor(factor_of(p)), floor(floor), first(-32) {
        boxes = p.boxes + static_cast<i64>(blockIdx.z) * p.tiles;
    }
    // The first key of the next tile, -1 behind the last.
    __device__ __forceinline__ i32 next() {
        while (left == 0) {
            first += 32;
            if (first * gridDim.y + blockIdx.y >= p.tiles) return -1;
            const i32 tile = (first + threadIdx.x % 32) * gridDim.y + blockIdx.y;
            bool needs = false;
            if (tile < p.tiles) {
                const Box box = boxes[tile];
                needs = !(fmaf(between<false>(least, most, box), -factor, box.most_log) < floor);
            }
            left = __ballot_sync(~0u, needs);
        }
        const int bit = __ffs(left) - 1;
        left &= left - 1;
        return ((first + bit) * gridDim.y + blockIdx.y) * kFew;
    }
};

struct NearRows {
    const NearParams& p;
    const float4 *rows, *keys;
    float factor, floor;  // floor: what every row's sum is at least
    i32 first;
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;

    Mode mode = own;
    float least[3], most[3];          // of the rows
    float middle[3], reach;           // of that box; the greatest f |u|^2
    float scale, unit;                // a power of two, and factor / scale^2
    u32 a[kTiles][4], b[2];           // factors
    float top, limit;                 // M; what sums of a tile may be
    float m[kOwn], sums[kOwn], given[kFew / 8];
    Total<float> l[kOwn];

    __device__ __forceinline__ float4 row(int r) const {
        const i32 index = first + 16 * (r / 2) + 8 * (r % 2) + g;
        return rows[min(index, p.n_rows - 1)];
    }
    // A thread's number of eight keys behind others: coordinate q, or the logarithm, of one of them.
    __device__ __forceinline__ float number(i32 from, int eight) const { return reinterpret_cast<const float*>(keys + from + 8 * eight)[lane]; }
    __device__ __forceinline__ static float of(const float4& point, int c) { return c == 0 ? point.x : c == 1 ? point.y : c == 2 ? point.z : point.w; }
    __device__ __forceinline__ float distance(const float4& row, const float4& key) const {
        const float x = row.x - key.x, y = row.y - key.y, z = row.z - key.z;
        return fmaf(z, z, fmaf(y, y, x * x));
    }
    // f |u|^2 of a row, 0 where differences are taken.
    __device__ __forceinline__ float square(const float4& row) const {
        float sum = 0;
        unroll<3>([&](int c) {
            const float u = fmaf(of(row, c), scale, -middle[c]);
            sum = fmaf(unit * u, u, sum);
        });
        return mode == products ? sum : 0.f;
    }

    __device__ __forceinline__ NearRows(const NearParams& p, i32 first, float floor) : p(p), floor(floor), first(first) {
        rows = p.rows + static_cast<i64>(blockIdx.z) * p.n_rows;
        keys = p.keys + static_cast<i64>(blockIdx.z) * p.tiles * kFew;
        const double given = p.factors == nullptr ? p.factor : *p.factors;
        const int half = ilogb(given) >> 1;
        factor = factor_of(p);
        scale = static_cast<float>(ldexp(1., half));
        unit = static_cast<float>(ldexp(given, -2 * half));
        range_of_rows(rows, first, p.n_rows, least, most);
        unroll<3>([&](int c) { middle[c] = scale * (0.5f * (most[c] + least[c])); });
        mode = products;
        reach = 0;
        unroll<kOwn>([&](int r) { reach = fmaxf(reach, square(row(r))); });
        reach = warp_max(reach);
        mode = own;
        float next[kOwn];
        unroll<kOwn>([&](int r) {
            m[r] = Range<float>::lowest;
            next[r] = floor;
        });
        settle(next);
    }

    // Makes the right factors of eight keys, of which this thread has one number of one: coordinate q, or the logarithm.
    __device__ __forceinline__ void convert(float given) {
        const bool last = q == 3;
        const float shift = last ? top : q == 0 ? middle[0] : q == 1 ? middle[1] : middle[2];
        const float t = fmaf(given, last ? 1.f : scale, -shift);
        float k = t * fmaf(last ? 0.f : -unit, t, last ? 1.f : 0.f);
        k += __shfl_xor_sync(~0u, k, 1);
        k += __shfl_xor_sync(~0u, k, 2);
        const float all = fminf(fmaxf(last ? k : t, last ? -kMostKey : -kWide), last ? kMostKey : kWide), w = all * (last ? 0x1p-10f : 1.f);
        const float rest = fmaf(ptx::low_f16(ptx::pack_f16(w, w)), last ? -1024.f : -1.f, all);
        b[0] = ptx::pack_f16(w, rest);
        b[1] = ptx::pack_f16(last ? 1.f : w, rest - ptx::high_f16(b[0]));
    }
    __device__ __forceinline__ void prime(i32 from) {
        convert(number(from, 0));
        unroll<kFew / 8 - 1>([&](int n) { given[n + 1] = number(from, n + 1); });
    }
    // Of 64 keys; the numbers of those ahead come meanwhile, and the next eight are converted while exponentials are taken.
    __device__ __forceinline__ void sum_products(i32 ahead) {
        unroll<kOwn>([&](int r) { sums[r] = 0; });
        unroll<kFew / 8>([&](int n) {
            float d[kTiles][4] = {};
            unroll<kTiles>([&](int tile) { ptx::mma_m16n8k16_f16(d[tile], a[tile], b[0], b[1]); });
            given[n] = number(ahead, n);
            convert(given[(n + 1) % (kFew / 8)]);
            unroll<kTiles, 4>([&](int tile, int i) { sums[2 * tile + i / 2] += ptx::ex2(d[tile][i]); });
        });
    }

    // Of 64 keys, of which a thread takes two of each eight.
    template <bool one_reference>
    __device__ __forceinline__ void sum_differences(i32 from) {
        float4 x[kOwn];
        unroll<kOwn>([&](int r) {
            x[r] = row(r);
            sums[r] = 0;
        });
#pragma unroll 2
        for (int n = 0; n < kFew / 4; ++n) {
            const float4 key = keys[from + 8 * (n / 2) + 2 * q + n % 2];
            const float start = one_reference ? key.w - top : key.w;
            unroll<kOwn>([&](int r) {
                const float term = fmaf(distance(x[r], key), -factor, start);
                sums[r] += ptx::ex2(one_reference ? term : term - m[r]);
            });
        }
    }

    __device__ __forceinline__ void sum_few(i32 from, i32 ahead) {
        if (mode == products) sum_products(ahead);
        else if (mode == shared) sum_differences<true>(from);
        else sum_differences<false>(from);
    }

    // Raises the references to the greatest terms so far.
    __device__ __forceinline__ void refer(i32 from) {
        float next[kOwn];
        unroll<kOwn>([&](int r) {
            const float4 x = row(r);
            next[r] = Range<float>::lowest;
#pragma unroll 1
            for (int n = 0; n < kFew / 4; ++n) {
                const float4 key = keys[from + 8 * (n / 2) + 2 * q + n % 2];
                next[r] = fmaxf(next[r], fmaf(distance(x, key), -factor, key.w));
            }
            if (l[r].sum > 0.f) next[r] = fmaxf(next[r], m[r] - square(x) + ptx::lg2(l[r].sum));
            next[r] = quad_max(fmaxf(next[r], floor));
        });
        settle(next);
    }

    // Takes the references next, of terms as they are, and chooses how to go on.
    __device__ __forceinline__ void settle(float (&next)[kOwn]) {
        float most = Range<float>::lowest, least = most, old[kOwn];
        unroll<kOwn>([&](int r) {
            most = fmaxf(most, next[r]);
            least = fmaxf(least, -next[r]);
            old[r] = m[r] - square(row(r));
        });
        most = warp_max(most);
        least = -warp_max(least);
        const float size = fmaxf(fmaxf(least, -most), 0.f);  // that all have, at least
        const float apart = most - least + 2.f * reach;
        if (size > kLarge) mode = own;
        else mode = reach <= fminf(fmaxf(kNear, size / 16.f), kMostReach) && apart < kMostApart ? products : most - least < kApart ? shared : own;
        limit = ptx::ex2(fminf(fmaxf(8.f, size / 16.f), 100.f));
        // whole numbers, of which the distance from the greatest is a half
        float own_top = Range<float>::lowest;
        unroll<kOwn>([&](int r) {
            next[r] = rintf(next[r] + square(row(r)));
            own_top = fmaxf(own_top, next[r]);
        });
        top = warp_max(own_top);
        unroll<kOwn>([&](int r) {
            const float4 x = row(r);
            if (mode == shared) next[r] = top;
            const u32 below = ptx::pack_f16(mode == products ? top - next[r] : 0.f, 0.f);
            if (mode == products) next[r] = top - ptx::low_f16(below);
            l[r].scale(ptx::ex2(0.5f * fminf(old[r] - (next[r] - square(x)), 126.f)));
            m[r] = next[r];
            const float left = 2.f * unit * fmaf(q == 0 ? x.x : q == 1 ? x.y : x.z, scale, -(q == 0 ? middle[0] : q == 1 ? middle[1] : middle[2]));
            const float hi = ptx::low_f16(ptx::pack_f16(left, left));
            const float lo = left - hi;
            a[r / 2][r % 2] = q == 3 ? ptx::pack_f16(1024.f, 1.f) : ptx::pack_f16(hi, hi);
            a[r / 2][2 + r % 2] = q == 3 ? ptx::pack_f16(ptx::low_f16(below), 1.f) : ptx::pack_f16(lo, hi);
        });
    }

    __device__ __forceinline__ void run(float floor) {
        Needed needed(p, least, most, floor);
        i32 from = needed.next(), ahead = needed.next();
        bool referred = false;
        prime(max(from, 0));
#pragma unroll 1
        while (from >= 0) {
            sum_few(from, max(ahead, 0));
            bool fits = true;
            unroll<kOwn>([&](int r) { fits = fits && !(sums[r] >= limit); });  // NaN stays
            if (!referred && !__all_sync(~0u, fits)) {
                refer(from);
                prime(from);
                referred = true;
                continue;
            }
            unroll<kOwn>([&](int r) { l[r].add(sums[r]); });
            from = ahead;
            ahead = needed.next();
            referred = false;
        }
    }
    __device__ __forceinline__ void store() const {
        float* logs = p.of_parts + (static_cast<i64>(blockIdx.y) * gridDim.z + blockIdx.z) * p.n_rows;
        unroll<kOwn>([&](int r) {
            float sum = l[r].sum;
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            const i32 index = first + 16 * (r / 2) + 8 * (r % 2) + g;
            const float log = sum == 0.f ? kLeastLog : log2f(sum);
            if (q == 0 && index < p.n_rows) logs[index] = m[r] + (log - square(row(r)));
        });
    }
};

extern "C" __global__ __launch_bounds__(32 * kWarps, cfg::blocks) void pairwise_near(const __grid_constant__ NearParams p) {
    const i32 first = (blockIdx.x * kWarps + threadIdx.x / 32) * (16 * kTiles);
    if (first >= p.n_rows) return;
    const float* floors = p.floors + 2 * (blockIdx.z * p.of_warps + first / (16 * kTiles));
    NearRows found(p, first, floors[0]);
    found.run(floors[1]);
    found.store();
}

// Sums of all parts.
extern "C" __global__ __launch_bounds__(32 * kWarps) void pairwise_merge(const __grid_constant__ NearParams p) {
    const i32 row = blockIdx.x * (32 * kWarps) + threadIdx.x;
    if (row >= p.n_rows) return;
    const i64 batch = static_cast<i64>(blockIdx.z) * p.n_rows, at = batch + row, apart = static_cast<i64>(gridDim.z) * p.n_rows;
    const float4 x = p.rows[at];
    const float floor = p.floors[2 * static_cast<i64>(blockIdx.z) * p.of_warps];
    const bool lost = isnan(floor) || isnan(x.x) || isnan(x.y) || isnan(x.z);
    float most = lost ? nanf("") : Range<float>::lowest, sum = 0;
    for (int part = 0; part < p.parts; ++part) most = ptx::max_nan(most, p.of_parts[part * apart + at]);
    for (int part = 0; part < p.parts; ++part) sum += ptx::ex2(p.of_parts[part * apart + at] - most);
    const float log = fabsf(most) > -0.1f * kHidden ? most * infinity<float>() : most + log2f(sum);
    p.logs[batch + __float_as_int(x.w)] = static_cast<float>(log * (1 / kLog2e));
}
