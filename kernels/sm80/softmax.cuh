// Online softmax of a warp's rows: running maximum m and sum l, in the units of exponents to base 2.
//
// m is the exact maximum of the scores as they are held (raw products, or finished scores when cfg::prescaled); `to_log2`
// converts them to exponents of 2.  l is this lane's part of the row sum until `finish` adds up the four lanes.
#pragma once
#include "attn/math.cuh"

// fused: one multiply-add per exponent, whose rounding error |m log2 e| 2^-24 is common to the row, and at most 2^-17: rows with larger maxima
// take differences of scores first.  Enough for 16-bit input.  Else all do, and l is summed by 4 keys, then with a correction (Kahan), for it
// may have 2^19 terms.
template <class Acc, int m_tiles, bool fused>
struct SoftmaxRows {
    static constexpr bool corrected = !fused;
    static constexpr Acc far = 128;  // largest exponent of m that is fused
    Acc m[m_tiles][2], l[m_tiles][2];
    Acc excess[corrected ? m_tiles : 1][2];  // what l is too large by

    __device__ __forceinline__ SoftmaxRows() {
        unroll<m_tiles, 2>([&](int mt, int h) {
            m[mt][h] = -infinity<Acc>(), l[mt][h] = 0;
            if constexpr (corrected) excess[mt][h] = 0;
        });
    }

    // What is subtracted from a row's scores: its maximum, or 0 while it has seen nothing.
    static __device__ __forceinline__ Acc finite(Acc top) { return top == -infinity<Acc>() ? Acc(0) : top; }

    // Takes the maximum over a tile of scores and scales o and l to the new one.
    template <int n_tiles, int v_tiles>
    __device__ __forceinline__ void update(Acc (&s)[m_tiles][n_tiles][4], Acc (&o)[m_tiles][v_tiles][4], const Log2Factor<Acc>& to_log2) {
        Acc alpha[m_tiles][2];
        bool changed = false;
        unroll<m_tiles, 2>([&](int mt, int h) {
            Acc top = m[mt][h];
            unroll<n_tiles>([&](int n) { top = max_of(top, max_of(s[mt][n][2 * h], s[mt][n][2 * h + 1])); });
            top = max_of(top, __shfl_xor_sync(~0u, top, 1));
            top = max_of(top, __shfl_xor_sync(~0u, top, 2));
            const Acc step = m[mt][h] - finite(top);
            if constexpr (fused) alpha[mt][h] = ptx::ex2(step * to_log2.hi);
            else alpha[mt][h] = exp2_term(step, to_log2);
            changed |= top != m[mt][h];
            m[mt][h] = top;
        });
        bool distant = false;
        unroll<m_tiles, 2>([&](int mt, int h) { distant |= fused && is_distant(m[mt][h], to_log2); });
        if (fused && __any_sync(~0u, distant)) {  // maxima that are too large to be fused are subtracted from their rows' scores
            unroll<m_tiles, 2>([&](int mt, int h) {
                if (is_distant(m[mt][h], to_log2)) unroll<n_tiles, 2>([&](int n, int e) { s[mt][n][2 * h + e] -= m[mt][h]; });
            });
        }
        // Most tiles raise no maximum; multiplying by 1 would change nothing.
        if (__any_sync(~0u, changed)) {
            unroll<m_tiles, 2>([&](int mt, int h) {
                l[mt][h] *= alpha[mt][h];
                if constexpr (corrected) excess[mt][h] *= alpha[mt][h];
                unroll<v_tiles, 2>([&](int n, int e) { o[mt][n][2 * h + e] *= alpha[mt][h]; });
            });
        }
    }

    static __device__ __forceinline__ bool is_distant(Acc top, const Log2Factor<Acc>& to_log2) { return size_of(finite(top) * to_log2.hi) > far; }

    // Turns the scores of keys 16 c .. 16 c + 15 into exp(s - m), in place, and adds them to l.
    template <int n_tiles>
    __device__ __forceinline__ void exponentiate(Acc (&s)[m_tiles][n_tiles][4], int c, const Log2Factor<Acc>& to_log2) {
        unroll<m_tiles, 2>([&](int mt, int h) {
            Acc sum = 0;
            const Acc shift = !fused ? finite(m[mt][h]) : is_distant(m[mt][h], to_log2) ? Acc(0) : finite(m[mt][h]) * to_log2.hi;
            unroll<4>([&](int e) {
                Acc& x = s[mt][2 * c + e / 2][2 * h + e % 2];
                if constexpr (fused) x = ptx::ex2(fmaf(x, to_log2.hi, -shift));
                else x = exp2_term(x - shift, to_log2);
                if constexpr (corrected) sum += x;
                else l[mt][h] += x;
            });
            if constexpr (corrected) {
                const Acc y = sum - excess[mt][h], total = l[mt][h] + y;
                if (sum != 0) excess[mt][h] = (total - l[mt][h]) - y, l[mt][h] = total;  // keys that a row does not see leave no trace in it
            }
        });
    }

    // Adds the four lanes' parts of l.
    __device__ __forceinline__ void finish() {
        unroll<m_tiles, 2>([&](int mt, int h) {
            l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 1);
            l[mt][h] += __shfl_xor_sync(~0u, l[mt][h], 2);
        });
    }
};
