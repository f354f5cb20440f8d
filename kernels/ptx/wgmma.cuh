// wgmma: one warpgroup (128 threads) multiplies a 64 x 16 by a 16 x n block into float32 accumulators, asynchronously.
//
// B is read from shared memory through a descriptor, A from shared memory (ss) or from registers (rs).  Accumulator i
// of thread t is element (row, column) = (16 w + g + 8 ((i / 2) % 2), 8 (i / 4) + 2 q + i % 2) with w = t / 32,
// g = (t % 32) / 4, q = t % 4.  An instruction takes all its registers as operands, so each n needs its own text: the
// macros below spell the operand lists once, in groups of eight registers.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// Orders the registers written so far (accumulators, A fragments) before the products issued next.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `pending` of the newest committed groups are unfinished.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving uses of registers that a product writes across the surrounding statements.
template <int n>
__device__ __forceinline__ void wgmma_pin(float (&registers)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Descriptor of a tile stored as slabs of 64 columns: 128-byte rows, 128-byte swizzle, the slab 1024-byte aligned.
// `stride` is the distance in bytes between 8-row groups along the contraction (or row) axis, `leading` the distance
// between slabs where the instruction's wide axis crosses them (transposed operands; ignored otherwise).
__device__ __forceinline__ u64 wgmma_descriptor(u32 address, u32 leading, u32 stride) {
    constexpr u64 swizzle_128 = 1ull << 62;
    return swizzle_128 | (static_cast<u64>(stride >> 4) << 32) | (static_cast<u64>(leading >> 4) << 16) |
           ((address & 0x3FFFF) >> 4);
}

// Descriptor of a tile whose rows have 16 bytes, one after the other: eight columns.  The next eight lie `leading` bytes further, the next eight
// rows `stride` bytes.
__device__ __forceinline__ u64 wgmma_descriptor_of_units(u32 address, u32 leading, u32 stride) {
    return (static_cast<u64>(stride >> 4) << 32) | (static_cast<u64>(leading >> 4) << 16) | ((address & 0x3FFFF) >> 4);
}

// Product<n>::ss / rs<bfloat16, sign, transpose>: d (+)= sign * a @ b, `accumulate` = 0 overwrites d.  `transpose`: b lies
// along the result's columns in memory.
template <int n>
struct Product;

#define WGMMA_DHALF "%0, %1, %2, %3"
#define WGMMA_D1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define WGMMA_D2 WGMMA_D1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define WGMMA_D3 WGMMA_D2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define WGMMA_D4 WGMMA_D3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_D5 WGMMA_D4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_D6 WGMMA_D5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_D7 WGMMA_D6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define WGMMA_D8 WGMMA_D7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_D9 WGMMA_D8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define WGMMA_D10 WGMMA_D9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define WGMMA_D11 WGMMA_D10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define WGMMA_D12 WGMMA_D11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_D13 WGMMA_D12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define WGMMA_D14 WGMMA_D13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define WGMMA_D15 WGMMA_D14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define WGMMA_D16 WGMMA_D15 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA_R(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
                   "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_RHALF "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WGMMA_R1 WGMMA_R(0)
#define WGMMA_R2 WGMMA_R1, WGMMA_R(8)
#define WGMMA_R3 WGMMA_R2, WGMMA_R(16)
#define WGMMA_R4 WGMMA_R3, WGMMA_R(24)
#define WGMMA_R5 WGMMA_R4, WGMMA_R(32)
#define WGMMA_R6 WGMMA_R5, WGMMA_R(40)
#define WGMMA_R7 WGMMA_R6, WGMMA_R(48)
#define WGMMA_R8 WGMMA_R7, WGMMA_R(56)
#define WGMMA_R9 WGMMA_R8, WGMMA_R(64)
#define WGMMA_R10 WGMMA_R9, WGMMA_R(72)
#define WGMMA_R11 WGMMA_R10, WGMMA_R(80)
#define WGMMA_R12 WGMMA_R11, WGMMA_R(88)
#define WGMMA_R13 WGMMA_R12, WGMMA_R(96)
#define WGMMA_R14 WGMMA_R13, WGMMA_R(104)
#define WGMMA_R15 WGMMA_R14, WGMMA_R(112)
#define WGMMA_R16 WGMMA_R15, WGMMA_R(120)

// type: of A and B; groups: n / 16; i0..i7: the numbers of the operands that follow the n / 2 accumulators.
#define WGMMA_SS(n, type, groups, i0, i1, i2, i3, i4)                                                               \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i2 ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_D##groups "}, %" #i0     \
                 ", %" #i1 ", p, %" #i3 ", 1, 0, %" #i4 ";\n}"                                                       \
                 : WGMMA_R##groups                                                                                  \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(sign), "n"(transpose))
#define WGMMA_RS(n, type, groups, i0, i1, i2, i3, i4, i5, i6, i7)                                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #i5 ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" WGMMA_D##groups "}, {%" #i0    \
                 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4 ", p, %" #i6 ", 1, %" #i7 ";\n}"                           \
                 : WGMMA_R##groups                                                                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(sign), "n"(transpose))
#define WGMMA_PRODUCT(n, groups, i0, i1, i2, i3, i4, i5, i6, i7)                                                    \
    template <>                                                                                                     \
    struct Product<n> {                                                                                             \
        template <bool bfloat16, int sign, int transpose>                                                           \
        static __device__ __forceinline__ void ss(float (&d)[n / 2], u64 a, u64 b, u32 accumulate) {                \
            if constexpr (bfloat16)                                                                                 \
                WGMMA_SS(n, "bf16", groups, i0, i1, i2, i3, i4);                                                    \
            else                                                                                                    \
                WGMMA_SS(n, "f16", groups, i0, i1, i2, i3, i4);                                                     \
        }                                                                                                           \
        template <bool bfloat16, int sign, int transpose>                                                           \
        static __device__ __forceinline__ void rs(float (&d)[n / 2], const u32 (&a)[4], u64 b, u32 accumulate) {    \
            if constexpr (bfloat16)                                                                                 \
                WGMMA_RS(n, "bf16", groups, i0, i1, i2, i3, i4, i5, i6, i7);                                        \
            else                                                                                                    \
                WGMMA_RS(n, "f16", groups, i0, i1, i2, i3, i4, i5, i6, i7);                                         \
        }                                                                                                           \
    };

WGMMA_PRODUCT(8, HALF, 4, 5, 6, 7, 8, 9, 10, 11)
WGMMA_PRODUCT(16, 1, 8, 9, 10, 11, 12, 13, 14, 15)
WGMMA_PRODUCT(32, 2, 16, 17, 18, 19, 20, 21, 22, 23)
WGMMA_PRODUCT(48, 3, 24, 25, 26, 27, 28, 29, 30, 31)
WGMMA_PRODUCT(64, 4, 32, 33, 34, 35, 36, 37, 38, 39)
WGMMA_PRODUCT(80, 5, 40, 41, 42, 43, 44, 45, 46, 47)
WGMMA_PRODUCT(96, 6, 48, 49, 50, 51, 52, 53, 54, 55)
WGMMA_PRODUCT(112, 7, 56, 57, 58, 59, 60, 61, 62, 63)
WGMMA_PRODUCT(128, 8, 64, 65, 66, 67, 68, 69, 70, 71)
WGMMA_PRODUCT(144, 9, 72, 73, 74, 75, 76, 77, 78, 79)
WGMMA_PRODUCT(160, 10, 80, 81, 82, 83, 84, 85, 86, 87)
WGMMA_PRODUCT(176, 11, 88, 89, 90, 91, 92, 93, 94, 95)
WGMMA_PRODUCT(192, 12, 96, 97, 98, 99, 100, 101, 102, 103)
WGMMA_PRODUCT(256, 16, 128, 129, 130, 131, 132, 133, 134, 135)

}  // namespace ptx
