// Scalar functions by accumulator type.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx/registers.cuh"

constexpr double kLog2e = 1.4426950408889634, kLog2eRest = 2.0355273740931033e-17;  // their sum is log2 e

template <class A, class B>
constexpr bool same_type = false;
template <class A>
constexpr bool same_type<A, A> = true;

// The first type if the flag is set, else the second.
template <bool first, class A, class B>
struct Either {
    using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
    using type = B;
};

// Calls work(i, j, ...) for all i, j, ... below the extents, the last one fastest; unrolled.
template <int extent, int... others, class Work>
__device__ __forceinline__ void unroll(const Work& work) {
#pragma unroll
    for (int i = 0; i < extent; ++i) {
        if constexpr (sizeof...(others) == 0) work(i);
        else unroll<others...>([&](auto... indices) { work(i, indices...); });
    }
}

template <class Acc>
__device__ __forceinline__ Acc infinity() {
    if constexpr (same_type<Acc, double>) return __longlong_as_double(0x7ff0000000000000ll);
    else return __int_as_float(0x7f800000);
}

__device__ __forceinline__ float max_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double max_of(double a, double b) { return fmax(a, b); }
__device__ __forceinline__ float tanh_of(float x) { return tanhf(x); }
__device__ __forceinline__ double tanh_of(double x) { return tanh(x); }
__device__ __forceinline__ float size_of(float x) { return fabsf(x); }
__device__ __forceinline__ double size_of(double x) { return fabs(x); }
__device__ __forceinline__ float fma_of(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma_of(double a, double b, double c) { return fma(a, b, c); }

// A product that is rounded by itself, never fused into the sum that takes it.
__device__ __forceinline__ float product_of(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product_of(double a, double b) { return __dmul_rn(a, b); }

// A sum of numbers that are rounded first, even where one is a product.
__device__ __forceinline__ float sum_of(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double sum_of(double a, double b) { return __dadd_rn(a, b); }

// a - b with a rounded first, even where it is a product: what it is compared with was rounded too.
__device__ __forceinline__ float rounded_difference(float a, float b) { return __fadd_rn(a, -b); }
__device__ __forceinline__ double rounded_difference(double a, double b) { return __dadd_rn(a, -b); }

// What remains of x behind its eight leading bits; of infinity and NaN nothing.
__device__ __forceinline__ float rest_of(float x) {
    const float rest = x - __uint_as_float(__float_as_uint(x) & 0xFFFF0000u);
    return rest == rest ? rest : 0.f;
}

// Factor from scores to exponents of 2, as a sum of two numbers: rounded to one, its error would be common to all terms of a row.
// Both are positive, so that -inf stays -inf.
template <class Acc>
struct Log2Factor {
    Acc hi, lo;

    // factor + rest, the factor positive and the rest at most half a unit of its last place.
    __device__ __forceinline__ static Log2Factor make(double factor, double rest = 0) {
        if constexpr (same_type<Acc, double>) {
            const double hi = __longlong_as_double(__double_as_longlong(factor) - 1);
            return {hi, (factor - hi) + rest};
        } else {
            const float hi = __double2float_rz(factor);
            return {hi, fmaxf(static_cast<float>(factor - hi), 1e-30f)};
        }
    }
    __device__ __forceinline__ static Log2Factor of_e() { return make(kLog2e, kLog2eRest); }
    __device__ __forceinline__ static Log2Factor of_scale(double scale) {
        const double factor = scale * kLog2e;
        return make(factor, fma(scale, kLog2e, -factor) + scale * kLog2eRest);
    }
    __device__ __forceinline__ Acc operator()(Acc x) const { return fma_of(x, hi, x * lo); }
};

// 2^(x factor) to about 1.5 units in the last place, for x <= 0 or -inf.
__device__ __forceinline__ float exp2_product(float x, const Log2Factor<float>& factor) {
    const float y = x * factor.hi, result = ptx::ex2(y);
    const float rest = fmaf(x, factor.lo, fmaf(x, factor.hi, -y));  // NaN for -inf, where the result is 0
    return result == 0.f ? 0.f : fmaf(result, rest * 0.69314718f, result);
}

// f q(f) = 2^f - 1 for f in [-1/2, 1/2]; q of degree 10 minimax (2e-17).
__device__ __forceinline__ double exp2_less_one(double f) {
    constexpr double coefficients[] = {4.4549605981865186e-10, 7.072585949269223e-09, 1.0178062445845774e-07, 1.321544258792169e-06,
                                       1.525273382983612e-05,  0.0001540353044173605, 0.0013333558146416936,  0.009618129107606888,
                                       0.0555041086648216,     0.24022650695910097,   0.6931471805599453};
    double q = coefficients[0];
#pragma unroll
    for (int i = 1; i < 11; ++i) q = fma(q, f, coefficients[i]);
    return f * q;
}

constexpr double kRounds = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, kept in the low bits

// 0 where x factor < -1022.  2^(n + f) = 2^n 2^f with n the nearest integer, so that f has all of the product's digits.
__device__ __forceinline__ double exp2_product(double x, const Log2Factor<double>& factor) {
    const double product = x * factor.hi;
    const bool tiny = product < -1022.0;
    const double clamped = tiny ? 0.0 : x, shifted = (tiny ? 0.0 : product) + kRounds;
    const double f = fma(clamped, factor.lo, fma(clamped, factor.hi, kRounds - shifted));
    const double power = __hiloint2double(tiny ? 0 : (__double2loint(shifted) + 1023) << 20, 0);  // 2^n
    return fma(exp2_less_one(f), power, power);
}

// e^x y to about 2 units in the last place, for x <= 0 or -inf and y from 2^-40 to 1.
__device__ __forceinline__ float exp_times(float x, float y) { return exp2_product(x, Log2Factor<float>::of_e()) * y; }

// 0 where x <= -680, which is below 2^-981: y 2^n is found by adding exponents.  Tensor cores leave other instructions for doubles few turns.
__device__ __forceinline__ double exp_times(double x, double y) {
    const Log2Factor<double> factor = Log2Factor<double>::of_e();
    const double shifted = fma(x, factor.hi, kRounds);
    const double f = fma(x, factor.lo, fma(x, factor.hi, kRounds - shifted));
    const double scaled = __hiloint2double(__double2hiint(y) + (__double2loint(shifted) << 20), __double2loint(y));
    const double result = fma(exp2_less_one(f), scaled, scaled);
    const u32 high = __double2hiint(x), lowest = 0xc0854000, last = 0xfff00000;  // of -680 and -inf
    return high - lowest <= last - lowest ? 0.0 : result;
}

// The same for the terms of a sum: float32 with the rounding error of the product.
__device__ __forceinline__ float exp2_term(float x, const Log2Factor<float>& factor) { return ptx::ex2(factor(x)); }
__device__ __forceinline__ double exp2_term(double x, const Log2Factor<double>& factor) { return exp2_product(x, factor); }

// The sum over the four lanes that share a row of an accumulator.
template <class Acc>
__device__ __forceinline__ Acc quad_sum(Acc x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// The largest over the same lanes.
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

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

// Two numbers rounded to a 16-bit type, `low` in the low half; with `positive`, negative ones become 0.
template <class Elem, bool positive = false>
__device__ __forceinline__ u32 pack(float low, float high) {
    if constexpr (same_type<Elem, __nv_bfloat16>) return positive ? ptx::pack_positive_bf16(low, high) : ptx::pack_bf16(low, high);
    else return positive ? ptx::pack_positive_f16(low, high) : ptx::pack_f16(low, high);
}

// Two numbers of a 16-bit type, that in the low half first.
template <class Elem>
__device__ __forceinline__ float2 unpack(u32 pair) {
    if constexpr (same_type<Elem, __nv_bfloat16>) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
    else return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
