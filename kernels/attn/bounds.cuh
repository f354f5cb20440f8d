// Interval arithmetic for tiles of a mask function: cuattn/tracing/ranges.py in CUDA, for the operations that masks are made of.
#pragma once
#include "attn/traced.cuh"

namespace traced::bounds {

// A number's least and greatest value, and whether it may be NaN; a boolean's.
struct Interval {
    double lo, hi;
    bool nan;
};
struct Truth {
    bool lo, hi;
};

__device__ __forceinline__ double open_below(double x) { return x == x ? x : -infinity<double>(); }
__device__ __forceinline__ double open_above(double x) { return x == x ? x : infinity<double>(); }
__device__ __forceinline__ bool is_open(double x) { return x - x != 0; }  // infinite
__device__ __forceinline__ bool is_open(const Interval& x) { return is_open(x.lo) || is_open(x.hi); }

__device__ __forceinline__ Interval anything() { return {-infinity<double>(), infinity<double>(), true}; }
__device__ __forceinline__ Truth either() { return {false, true}; }
__device__ __forceinline__ Interval point(double x) { return x == x ? Interval{x, x, false} : anything(); }
__device__ __forceinline__ Interval joined(const Interval& x, const Interval& y) { return {fmin(x.lo, y.lo), fmax(x.hi, y.hi), x.nan || y.nan}; }
__device__ __forceinline__ Truth truth_of(const Interval& x) { return {x.lo > 0.5, x.hi > 0.5}; }

// An integer that doubles hold, or an open one; a number as wide as any rounding of it.
__device__ __forceinline__ Interval whole(const Interval& x) {
    const bool beyond = !(x.lo > -9007199254740992.0 && x.hi < 9007199254740992.0);
    return beyond ? Interval{-infinity<double>(), infinity<double>(), false} : Interval{x.lo, x.hi, false};
}
__device__ __forceinline__ double moved(double x, double direction) {
    if (is_open(x)) return x;
    const double y = x + direction * (fabs(x) * 9.5367431640625e-7 + 1e-37);
    return x * direction <= 0 && y * direction > 0 ? 0 : y;  // signs are exact
}
__device__ __forceinline__ Interval widened(const Interval& x) {
    constexpr double most = 3.4028234663852886e38;
    const double lo = moved(x.lo, -1), hi = moved(x.hi, 1);
    return {lo > most ? most : lo < -most ? -infinity<double>() : lo, hi < -most ? -most : hi > most ? infinity<double>() : hi, x.nan};
}

__device__ __forceinline__ Interval add(const Interval& x, const Interval& y) {
    return {open_below(x.lo + y.lo), open_above(x.hi + y.hi), x.nan || y.nan || (is_open(x) && is_open(y))};
}
__device__ __forceinline__ Interval negative(const Interval& x) { return {-x.hi, -x.lo, x.nan}; }
__device__ __forceinline__ Interval subtract(const Interval& x, const Interval& y) { return add(x, negative(y)); }
// Around four values at the corners; NaN opens the interval.
__device__ __forceinline__ Interval around(double a, double b, double c, double d, bool nan) {
    if (a != a || b != b || c != c || d != d) return {-infinity<double>(), infinity<double>(), nan};
    return {fmin(fmin(a, b), fmin(c, d)), fmax(fmax(a, b), fmax(c, d)), nan};
}
__device__ __forceinline__ Interval multiply(const Interval& x, const Interval& y) {
    return around(x.lo * y.lo, x.lo * y.hi, x.hi * y.lo, x.hi * y.hi, x.nan || y.nan || is_open(x) || is_open(y));
}
__device__ __forceinline__ Interval absolute(const Interval& x) {
    const double a = fabs(x.lo), b = fabs(x.hi);
    return {x.lo <= 0 && x.hi >= 0 ? 0 : fmin(a, b), fmax(a, b), x.nan};
}
__device__ __forceinline__ Interval squared(const Interval& x) {
    const Interval size = absolute(x);
    return {size.lo * size.lo, size.hi * size.hi, x.nan};
}
__device__ __forceinline__ Interval maximum(const Interval& x, const Interval& y) { return {fmax(x.lo, y.lo), fmax(x.hi, y.hi), x.nan || y.nan}; }
__device__ __forceinline__ Interval minimum(const Interval& x, const Interval& y) { return {fmin(x.lo, y.lo), fmin(x.hi, y.hi), x.nan || y.nan}; }
__device__ __forceinline__ Interval select(const Truth& c, const Interval& x, const Interval& y) { return c.lo ? x : c.hi ? joined(x, y) : y; }
__device__ __forceinline__ Truth select(const Truth& c, const Truth& x, const Truth& y) { return c.lo ? x : c.hi ? Truth{x.lo && y.lo, x.hi || y.hi} : y; }

// Of integers; the divisor 0 gives 0.
__device__ __forceinline__ Interval floor_divide(const Interval& x, const Interval& y) {
    if (y.lo <= 0 && y.hi >= 0) {
        const double most = fmax(fabs(x.lo), fabs(x.hi)) + 1;
        return {-most, most, false};
    }
    const Interval quotient = around(x.lo / y.lo, x.lo / y.hi, x.hi / y.lo, x.hi / y.hi, false);
    return {floor(quotient.lo), floor(quotient.hi), false};
}
__device__ __forceinline__ Interval remainder(const Interval& x, const Interval& y) {
    if (y.lo == y.hi && y.lo > 0 && !is_open(x)) {
        const double first = floor(x.lo / y.lo) * y.lo;
        if (first == floor(x.hi / y.lo) * y.lo) return {x.lo - first, x.hi - first, false};
    }
    return {fmin(y.lo + 1, 0.0), fmax(y.hi - 1, 0.0), false};
}

// Elements of an array that no kernel writes, where the indices of each axis lie in an interval, as far as these are few; wrapped and clamped.
template <class T>
struct Box {
    const T* at;
    int count = 1;  // elements; 0: too many, or it is not known which
    int sizes[4];
    long long steps[4];
    int axes = 0;

    __device__ __forceinline__ explicit Box(const T* array) : at(array) {}
    __device__ __forceinline__ Box& along(const Interval& index, long long length, long long step) {
        constexpr int most = 16;
        if (!(index.hi - index.lo < most) || (index.lo < 0 && index.hi >= 0) || axes == 4) count = 0;
        if (count == 0) return *this;
        const auto inside = [&](double x) { return clamped(wrapped(static_cast<long long>(x), length), length); };
        const long long first = inside(index.lo);
        sizes[axes] = static_cast<int>(inside(index.hi) - first) + 1, steps[axes] = step;
        at += first * step, count *= sizes[axes++];
        if (count > most) count = 0;
        return *this;
    }
    __device__ __forceinline__ Interval values() const {
        if (count == 0) return anything();
        Interval found{infinity<double>(), -infinity<double>(), false};
        for (int number = 0; number < count; ++number) {
            const T* element = at;
            for (int axis = 0, rest = number; axis < axes; rest /= sizes[axis++]) element += rest % sizes[axis] * steps[axis];
            found = joined(found, point(static_cast<double>(fetched(element))));
        }
        return found;
    }
};

__device__ __forceinline__ Interval floor(const Interval& x) { return {::floor(x.lo), ::floor(x.hi), x.nan}; }
__device__ __forceinline__ Interval ceil(const Interval& x) { return {::ceil(x.lo), ::ceil(x.hi), x.nan}; }
__device__ __forceinline__ Interval trunc(const Interval& x) { return {::trunc(x.lo), ::trunc(x.hi), x.nan}; }
__device__ __forceinline__ Interval rint(const Interval& x) { return {::rint(x.lo), ::rint(x.hi), x.nan}; }
__device__ __forceinline__ Interval sqrt(const Interval& x) { return {::sqrt(fmax(x.lo, 0.0)), ::sqrt(fmax(x.hi, 0.0)), x.nan || x.lo < 0}; }
__device__ __forceinline__ Interval to_float(const Interval& x) { return x; }
__device__ __forceinline__ Interval to_float(const Truth& x) { return {double(x.lo), double(x.hi), false}; }
__device__ __forceinline__ Interval to_integer(const Interval& x) {
    const double lo = fmin(fmax(::trunc(x.lo), -2147483648.0), 2147483647.0), hi = fmin(fmax(::trunc(x.hi), -2147483648.0), 2147483647.0);
    return {x.nan ? fmin(lo, 0.0) : lo, x.nan ? fmax(hi, 0.0) : hi, false};
}
__device__ __forceinline__ Interval to_integer(const Truth& x) { return to_float(x); }

// NaN compares as false.
__device__ __forceinline__ Truth less(const Interval& x, const Interval& y) { return {x.hi < y.lo && !x.nan && !y.nan, x.lo < y.hi}; }
__device__ __forceinline__ Truth less_equal(const Interval& x, const Interval& y) { return {x.hi <= y.lo && !x.nan && !y.nan, x.lo <= y.hi}; }
__device__ __forceinline__ Truth equal(const Interval& x, const Interval& y) {
    return {x.lo == y.hi && x.hi == y.lo && !x.nan && !y.nan, x.hi >= y.lo && x.lo <= y.hi};
}
__device__ __forceinline__ Truth logical_not(const Truth& x) { return {!x.hi, !x.lo}; }
__device__ __forceinline__ Truth logical_and(const Truth& x, const Truth& y) { return {x.lo && y.lo, x.hi && y.hi}; }
__device__ __forceinline__ Truth logical_or(const Truth& x, const Truth& y) { return {x.lo || y.lo, x.hi || y.hi}; }
__device__ __forceinline__ Truth logical_xor(const Truth& x, const Truth& y) {
    const bool known = x.lo == x.hi && y.lo == y.hi, differ = x.lo != y.lo;
    return {known && differ, !known || differ};
}

}  // namespace traced::bounds
