// What gradients by tensor cores have of each row, and of a tile's pairs: g_ij = (u_i . v_j) (-dk/dw)_ij, whose sums are in pairwise/slopes.cu.
//
// The g of a tile are left factors of products with its keys, as two halves relative to the power of two of the greatest g that a row has had,
// which grows: so rows of any size keep their digits.
#pragma once
#include "pairwise/points.cuh"

namespace pairwise {

// What a thread has of one of its two rows.
struct WeightedRow {
    float of_row, u[kColumns];
    u32 exponent = split::kLeast;  // 2^e of the greatest g so far
    float share, up;               // of the last tile: by what earlier sums shrink, and 2^(14 - e)
    float weight = 0, moment = 0;
    Total<float> values[kColumns];

    __device__ __forceinline__ void load(const ProductParams& p, const Share& share, i64 at) {
        of_row = p.of_row[at];
        unroll<kColumns>([&](int c) { u[c] = share.column + c < p.columns ? p.u[at * p.columns + share.column + c] : 0.f; });
    }
    // Takes the greatest g of a tile that this thread has.
    __device__ __forceinline__ void refer(float greatest) {
        const u32 next = max(exponent, split::largest<4>(__float_as_uint(greatest)) & 0x7f800000u);
        share = next - exponent < 126u << 23 ? __uint_as_float((127u << 23) - (next - exponent)) : 0.f;
        exponent = next;
        up = split::scale_up(exponent);
    }
    // Writes row `index`, whose point is at `place`; pulled(eight, e) is of coordinate 8 eight + 2 (lane % 4) + e, relative to 2^(e - 14).
    template <class Pulled>
    __device__ __forceinline__ void store(const ProductParams& p, const Share& share, i32 index, i64 place, const Pulled& pulled) {
        const int lane = threadIdx.x % 32;
        const bool writes = index < p.n_rows;
        const i64 at = share.of_blocks() * p.n_rows + index;
        const float all = quad_sum(weight), all_moments = quad_sum(moment), down = 1.f / up;
        unroll<kDim / 8, 2>([&](int eight, int e) {
            const int c = 8 * eight + 2 * (lane % 4) + e;
            if (writes) p.directions[at * kDim + c] = fmaf(p.x[place * kDim + c], all, -down * pulled(eight, e));
        });
        if (writes && lane % 4 == 0) p.moments[at] = all_moments;
        if constexpr (cfg::values) {
            unroll<kWidth>([&](int c) {
                const float sum = quad_sum(values[c].sum);
                if (writes && lane % 4 == 0 && share.column + c < p.columns) p.sums[(share.of_parts() * p.n_rows + index) * p.columns + share.column + c] = sum;
            });
        }
    }
};

// Of a tile.
struct TileWeights {
    float weights[2] = {}, moments[2] = {}, values[2][kColumns] = {}, greatest[2] = {};

    // Returns g of a thread's row r and a key, from x.y; v(c): the key's.
    template <class Values>
    __device__ __forceinline__ float weigh(const WeightedRow& row, int r, float s, float of_key, float unit, const Values& v) {
        const float constant = row.of_row + of_key, z = fmaxf(fmaf(-unit, s, constant), 0.f);
        const Value<float> k = [&]() -> Value<float> {
            if constexpr (cfg::logs) {
                const float value = power_of_2(fmaf(unit, s, constant));
                return {value, value};
            } else return evaluate<cfg::function>(z);
        }();
        float product = 0;
        unroll<kWidth>([&](int c) {
            product = fmaf(row.u[c], v(c), product);
            if constexpr (cfg::values) values[r][c] = fmaf(k.value, v(c), values[r][c]);
        });
        const float own = product * k.slope;
        greatest[r] = fmaxf(greatest[r], fabsf(own));
        weights[r] += own;
        moments[r] = fmaf(own, z, moments[r]);
        return own;
    }
    __device__ __forceinline__ void add_to(WeightedRow (&rows)[2]) {
        unroll<2>([&](int r) {
            rows[r].weight += weights[r];
            rows[r].moment += moments[r];
            unroll<kColumns>([&](int c) { rows[r].values[c].add(values[r][c]); });
            rows[r].refer(greatest[r]);
        });
    }
};

}  // namespace pairwise
