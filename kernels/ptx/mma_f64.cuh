// Double-precision warp matrix products (sm_90 and newer have the large shape).
//
// Lane l, g = l / 4, q = l % 4:  a[0] = A(g, q)  a[1] = A(g+8, q)  a[2] = A(g, q+4)  a[3] = A(g+8, q+4);  b0 = B(q, g)  b1 = B(q+4, g);
// d as every m16n8 D.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mma_m16n8k8_f64(double (&d)[4], const double (&a)[4], double b0, double b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
        : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
}
#endif

}  // namespace ptx
