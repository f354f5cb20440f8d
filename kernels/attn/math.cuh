// Scalar functions by accumulator type, and the tanh of the softcap by input type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/convert.cuh"

constexpr double kLog2e = 1.4426950408889634;

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

template <class Acc>
__device__ __forceinline__ Acc infinity() {
    if constexpr (same_type<Acc, double>) return __longlong_as_double(0x7ff0000000000000ll);
    else return __int_as_float(0x7f800000);
}

__device__ __forceinline__ float exp2_of(float x) { return ptx::ex2(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }

// Factor from scores to exponents of 2, as a sum of two numbers: rounded to one, its error would be common to all terms of a row.
template <class Acc>
struct Log2Factor {
    Acc hi, lo;

    __device__ __forceinline__ static Log2Factor make(double factor) {
        const Acc hi = static_cast<Acc>(factor);
        return {hi, static_cast<Acc>(factor - static_cast<double>(hi))};
    }
};

// 2^(x factor) to about 1.5 units in the last place, for x <= 0 or -inf.
__device__ __forceinline__ float exp2_product(float x, const Log2Factor<float>& factor) {
    const float y = x * factor.hi, result = ptx::ex2(y);
    const float rest = fmaf(x, factor.lo, fmaf(x, factor.hi, -y));  // NaN for -inf, where the result is 0
    return result == 0.f ? 0.f : fmaf(result, rest * 0.69314718f, result);
}
__device__ __forceinline__ double exp2_product(double x, const Log2Factor<double>& factor) { return exp2(x * factor.hi); }

__device__ __forceinline__ float max_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double max_of(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma_of(double a, double b, double c) { return fma(a, b, c); }

// tanh as exact as Elem's own rounding deserves: bfloat16 takes the hardware's (2^-11), float16 needs about 2^-22.
template <class Elem>
__device__ __forceinline__ auto tanh_of(float x) {
    if constexpr (same_type<Elem, __nv_bfloat16>) return ptx::tanh_approx(x);
    else if constexpr (same_type<Elem, __half>) return 1.f - 2.f / (1.f + ptx::ex2(x * static_cast<float>(2 * kLog2e)));
    else return tanhf(x);
}
template <class Elem>
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }

__device__ __forceinline__ float to_acc(float x) { return x; }
__device__ __forceinline__ double to_acc(double x) { return x; }
__device__ __forceinline__ float to_acc(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_acc(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class Out, class Acc>
__device__ __forceinline__ Out round_to(Acc x) {
    if constexpr (same_type<Out, __half>) return __float2half_rn(x);
    else if constexpr (same_type<Out, __nv_bfloat16>) return __float2bfloat16_rn(x);
    else return static_cast<Out>(x);
}

template <class T>
__device__ __forceinline__ T min_of(T a, T b) { return a < b ? a : b; }
