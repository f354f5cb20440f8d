// A choice that stays off the pipe on which selects, minima and integers compete.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

// x if a bit is set, else -x.  A multiply-add under a predicate: of a negation, or a product with -1, the assembler makes a select.
__device__ __forceinline__ float negate_unless(float x, u32 bits) {
    asm("{\n.reg .pred p;\nsetp.eq.u32 p, %1, 0;\n@p fma.rn.f32 %0, %0, 0fC0000000, %0;\n}" : "+f"(x) : "r"(bits));
    return x;
}

}  // namespace ptx
