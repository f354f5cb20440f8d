// What the generated text of score and mask functions is made of (cuattn/tracing/cuda.py), beside the operators of C++:
// NumPy's meaning of operations that C++ leaves undefined or defines otherwise.
#pragma once
#include "attn/math.cuh"

namespace traced {

// NaN if one of the numbers is.
template <class T>
__device__ __forceinline__ T maximum_of(T a, T b) {
    if constexpr (same_type<T, float>) return ptx::max_nan(a, b);
    else return a > b || a != a ? a : b;
}
template <class T>
__device__ __forceinline__ T minimum_of(T a, T b) {
    if constexpr (same_type<T, float>) return ptx::min_nan(a, b);
    else return a < b || a != a ? a : b;
}
template <class T>
__device__ __forceinline__ T absolute_of(T a) { return a < 0 ? -a : a; }
__device__ __forceinline__ float absolute_of(float a) { return fabsf(a); }
__device__ __forceinline__ double absolute_of(double a) { return fabs(a); }
template <class T>
__device__ __forceinline__ T sign_of(T a) { return a != a ? a : static_cast<T>((a > 0) - (a < 0)); }
template <class T>
__device__ __forceinline__ bool is_infinite(T a) { return a - a != a - a && a == a; }

// Integers: quotients and remainders are 0 for the divisor 0; x / -1 is formed without overflow.
template <class T>
__device__ __forceinline__ T truncated_remainder(T a, T b) { return b == 0 || b == -1 ? 0 : a % b; }
template <class T>
__device__ __forceinline__ T floor_remainder(T a, T b) {
    const T rest = truncated_remainder(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
template <class T>
__device__ __forceinline__ T floor_quotient(T a, T b) {
    if (b == 0) return 0;
    if (b == -1) return static_cast<T>(0ull - static_cast<unsigned long long>(a));
    const T quotient = a / b, rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
}
// By a divisor that is known to be positive.
template <class T>
__device__ __forceinline__ T remainder_by_positive(T a, T b) {
    const T rest = a % b;
    return rest < 0 ? rest + b : rest;
}
template <class T>
__device__ __forceinline__ T quotient_by_positive(T a, T b) { return a / b - (a % b < 0); }

// What int32 holds of a number, towards 0; NaN gives 0.
template <class T>
__device__ __forceinline__ T truncated_to(bool a) { return a; }
template <class T>
__device__ __forceinline__ T truncated_to(float a) { return __float2int_rz(a); }
template <class T>
__device__ __forceinline__ T truncated_to(double a) { return a == a ? __double2int_rz(a) : 0; }

// Numbers: the remainder is exact, and the quotient the whole number that belongs to it.
__device__ __forceinline__ float truncated_remainder(float a, float b) { return fmodf(a, b); }
__device__ __forceinline__ double truncated_remainder(double a, double b) { return fmod(a, b); }
__device__ __forceinline__ float rounded(float a) { return rintf(a); }
__device__ __forceinline__ double rounded(double a) { return rint(a); }
template <class T>
__device__ __forceinline__ T floored_remainder(T a, T b) {
    const T rest = truncated_remainder(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ float floor_remainder(float a, float b) { return floored_remainder(a, b); }
__device__ __forceinline__ double floor_remainder(double a, double b) { return floored_remainder(a, b); }
template <class T>
__device__ __forceinline__ T floored_quotient(T a, T b) { return b == 0 ? a / b : rounded((a - floored_remainder(a, b)) / b); }
__device__ __forceinline__ float floor_quotient(float a, float b) { return floored_quotient(a, b); }
__device__ __forceinline__ double floor_quotient(double a, double b) { return floored_quotient(a, b); }

// log(e^a + e^b)
template <class T, class Exp, class Log>
__device__ __forceinline__ T sum_of_exponentials(T a, T b, T log2, const Exp& exp, const Log& log1p) {
    if (a == b) return a + log2;  // infinities too
    const T most = maximum_of(a, b), least = minimum_of(a, b);
    return most + log1p(exp(least - most));
}
__device__ __forceinline__ float log_add_exp(float a, float b) {
    return sum_of_exponentials(a, b, 0.693147181f, [](float x) { return expf(x); }, [](float x) { return log1pf(x); });
}
__device__ __forceinline__ double log_add_exp(double a, double b) {
    return sum_of_exponentials(a, b, 0.69314718055994531, [](double x) { return exp(x); }, [](double x) { return log1p(x); });
}

// tanh to about 2^-22 of 1, for 16-bit problems.
__device__ __forceinline__ float short_tanh(float x) { return fmaf(-2.f, ptx::rcp(1.f + ptx::ex2(x * static_cast<float>(2 * kLog2e))), 1.f); }

// Base 2; of a power of two exact, as NumPy's, which steps at these depend on.
__device__ __forceinline__ float binary_logarithm(float x) { return log2f(x); }
__device__ __forceinline__ double binary_logarithm(double x) {
    const double y = log2(x), whole = rint(y);
    return ldexp(1.0, static_cast<int>(whole)) == x ? whole : y;
}

// Shifts by any count.
template <class T, class Count>
__device__ __forceinline__ T shifted_left(T a, Count n) { return n < 0 || n > 63 ? 0 : static_cast<T>(static_cast<unsigned long long>(a) << n); }
template <class T, class Count>
__device__ __forceinline__ T shifted_right(T a, Count n) { return static_cast<T>(static_cast<long long>(a) >> (n < 0 || n > 63 ? 63 : n)); }

// Indices, of an axis that is not empty.
template <class T, class Length>
__device__ __forceinline__ T wrapped(T index, Length length) { return index < 0 ? index + length : index; }
template <class T, class Length>
__device__ __forceinline__ T clamped(T index, Length length) {
    const Length last = length - 1;
    if constexpr (same_type<T, Length>) return max(min(index, last), T(0));
    else return index < 0 ? 0 : index < length ? index : static_cast<T>(last);
}

// An element of an array that no kernel writes.
template <class T>
__device__ __forceinline__ T fetched(const T* at) {
    if constexpr (same_type<T, bool>) return *at;
    else return __ldg(at);
}

}  // namespace traced
