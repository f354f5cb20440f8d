// Warp matrix products D = A B + D (mma.sync), one function per shape and type.
//
// Lane l holds, with g = l / 4 and q = l % 4 (PTX ISA, "Matrix fragments for mma"):
//   m16n8k16, 16 bit   a[0] = A(g, 2q..)   a[1] = A(g+8, 2q..)   a[2] = A(g, 8+2q..)   a[3] = A(g+8, 8+2q..)
//                      b[0] = B(2q.., g)   b[1] = B(8+2q.., g)              (two values per register, low half first)
//   every m16n8 D      d[0] = D(g, 2q)     d[1] = D(g, 2q+1)     d[2] = D(g+8, 2q)     d[3] = D(g+8, 2q+1)
//   m8n8k4, f64        a = A(g, q)         b = B(q, g)           d[0] = D(g, 2q)       d[1] = D(g, 2q+1)
//   m16n8k8, f64       a[0] = A(g, q)     a[1] = A(g+8, q)   a[2] = A(g, q+4)   a[3] = A(g+8, q+4);  b0 = B(q, g)  b1 = B(q+4, g)   (from sm_90 on)
#pragma once
#include "ptx/types.cuh"

namespace ptx {

#define PTX_MMA_16(type)                                                                                                 \
    __device__ __forceinline__ void mma_m16n8k16_##type(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {              \
        asm("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type                                                     \
            ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                 \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                             \
    }
PTX_MMA_16(f16)
PTX_MMA_16(bf16)

__device__ __forceinline__ void mma_m8n8k4_f64(double (&d)[2], double a, double b) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(d[0]), "+d"(d[1])
                 : "d"(a), "d"(b));
}

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], double b0, double b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
#endif

}  // namespace ptx
