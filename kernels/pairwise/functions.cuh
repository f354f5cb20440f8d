// Functions of the distance between two points, and what they are made of.
//
// They take z = factor |x - y|^2, whose factor is such that exponentials are of base 2 (BASES in cuattn/pairwise/functions.py): z = w log2 e
// of the Gaussian, w log2(e)^2 of those of sqrt(w), and w of Cauchy's, with w as in FUNCTIONS there.
#pragma once
#include "attn/math.cuh"
#include "ptx/registers.cuh"

namespace pairwise {

enum Function { gaussian, laplacian, cauchy, matern32, matern52 };

__device__ __forceinline__ float power_of_2(float x) { return ptx::ex2(x); }
__device__ __forceinline__ double power_of_2(double x) { return exp2(x); }
__device__ __forceinline__ float root(float x) { return ptx::sqrt(x); }
__device__ __forceinline__ double root(double x) { return ::sqrt(x); }
__device__ __forceinline__ float inverse(float x) { return ptx::rcp(x); }
__device__ __forceinline__ double inverse(double x) { return 1.0 / x; }

template <class Acc>
struct Value {
    Acc value, slope;  // k(w) and -dk/dw; nobody pays for what is not read
};

template <int function, class Acc>
__device__ __forceinline__ Value<Acc> evaluate(Acc z) {
    if constexpr (function == gaussian) {
        const Acc k = power_of_2(-z);
        return {k, k};
    } else if constexpr (function == cauchy) {
        const Acc k = inverse(Acc(1) + z);
        return {k, k * k};
    } else {
        const Acc t2 = root(z), k = power_of_2(-t2), t = t2 * Acc(0.6931471805599453);
        if constexpr (function == laplacian) return {k, z > Acc(0) ? Acc(0.5) * k * inverse(t) : Acc(0)};
        else if constexpr (function == matern32) return {fma_of(t, k, k), Acc(0.5) * k};
        else return {k * fma_of(t, fma_of(t, Acc(1.0 / 3), Acc(1)), Acc(1)), fma_of(t, k, k) * Acc(1.0 / 6)};
    }
}

}  // namespace pairwise
