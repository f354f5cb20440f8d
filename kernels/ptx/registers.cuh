// Instructions on registers: conversions, approximate functions, pairs of 16-bit numbers, and what the compiler must not see through.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// Functions of one and of two arguments, each one instruction; r and a: kinds of register of the result and of the arguments.  Of two, PTX names
// the one for the high half of a pair first; instructions other than packing do not care.
#define PTX_UNARY(name, instruction, Result, r, Argument, a)        \
    __device__ __forceinline__ Result name(Argument x) {            \
        Result result;                                              \
        asm(instruction " %0, %1;" : "=" r(result) : a(x));         \
        return result;                                              \
    }
#define PTX_BINARY(name, instruction, Result, r, Argument, a)       \
    __device__ __forceinline__ Result name(Argument x, Argument y) {   \
        Result result;                                              \
        asm(instruction " %0, %2, %1;" : "=" r(result) : a(x), a(y));  \
        return result;                                              \
    }

// Two float32 rounded to nearest even and packed, the first in the low half; `positive`: with negative numbers as 0.
PTX_BINARY(pack_bf16, "cvt.rn.bf16x2.f32", u32, "r", float, "f")
PTX_BINARY(pack_f16, "cvt.rn.f16x2.f32", u32, "r", float, "f")
PTX_BINARY(pack_positive_bf16, "cvt.rn.relu.bf16x2.f32", u32, "r", float, "f")
PTX_BINARY(pack_positive_f16, "cvt.rn.relu.f16x2.f32", u32, "r", float, "f")

// One half of a packed pair as float32.
#define PTX_HALF(name, half)                                                                                          \
    __device__ __forceinline__ float name(u32 pair) {                                                                 \
        float r;                                                                                                      \
        asm("{\n.reg .f16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, " half ";\n}" : "=f"(r) : "r"(pair));       \
        return r;                                                                                                     \
    }
PTX_HALF(low_f16, "lo")
PTX_HALF(high_f16, "hi")

// Of the special-function unit: 2^x, relative error 2^-22, 2^-inf = 0; log2 x; 1 / x to a unit of the last place, 1 / inf = 0;
// the square root, to 2^-22.
PTX_UNARY(ex2, "ex2.approx.ftz.f32", float, "f", float, "f")
PTX_UNARY(lg2, "lg2.approx.ftz.f32", float, "f", float, "f")
PTX_UNARY(lg2_any, "lg2.approx.f32", float, "f", float, "f")  // of denormal numbers, too
PTX_UNARY(rcp, "rcp.approx.ftz.f32", float, "f", float, "f")
PTX_UNARY(sqrt, "sqrt.approx.ftz.f32", float, "f", float, "f")

// The greater, the lesser number; NaN if one of them is.
PTX_BINARY(max_nan, "max.NaN.f32", float, "f", float, "f")
PTX_BINARY(min_nan, "min.NaN.f32", float, "f", float, "f")

// Two 16-bit numbers in one register.  The instructions on integers exist from sm_90 on.
PTX_BINARY(mul_f16x2, "mul.rn.f16x2", u32, "r", u32, "r")
#if __CUDA_ARCH__ >= 900
PTX_BINARY(min_u16x2, "min.u16x2", u32, "r", u32, "r")
PTX_BINARY(max_u16x2, "max.u16x2", u32, "r", u32, "r")
PTX_BINARY(max_s16x2, "max.s16x2", u32, "r", u32, "r")
PTX_BINARY(add_s16x2, "add.s16x2", u32, "r", u32, "r")
#endif

// Byte permutation: byte i of the result is byte (selector >> 4i) & 7 of the pair {b, a}.
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// x if a bit is set, else -x.  A multiply-add under a predicate: of a negation, or a product with -1, the assembler makes a select, and so
// uses the pipe on which selects, minima and integers compete.
__device__ __forceinline__ float negate_unless(float x, u32 bits) {
    asm("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\n@p fma.rn.f32 %0, %0, 0fC0000000, %0;\n}" : "+f"(x) : "r"(bits));
    return x;
}

// A value that the compiler must not look through, nor compute ahead of its place.
__device__ __forceinline__ i64 opaque(i64 value) {
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

__device__ __forceinline__ float opaque(float value) {
    asm volatile("" : "+f"(value));
    return value;
}

// Zero in the register that x has.  Assigned under a condition, a zero may cost a copy of x in every turn of a loop.
__device__ __forceinline__ void set_zero(double& x) { asm volatile("mov.f64 %0, 0d0000000000000000;" : "+d"(x)); }
__device__ __forceinline__ void set_zero(float& x) { asm volatile("mov.f32 %0, 0f00000000;" : "+f"(x)); }

// Moves registers between warpgroups: the giver calls `release`, the taker blocks in `claim` until the pool has them.
#define PTX_SET_REGISTERS(name, change)                                                    \
    template <u32 registers>                                                               \
    __device__ __forceinline__ void name() {                                               \
        static_assert(registers % 8 == 0 && registers >= 24 && registers <= 256);          \
        asm volatile("setmaxnreg." change ".sync.aligned.u32 %0;" ::"n"(registers));       \
    }
PTX_SET_REGISTERS(registers_release, "dec")
PTX_SET_REGISTERS(registers_claim, "inc")

}  // namespace ptx
