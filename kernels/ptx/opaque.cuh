// A value that the compiler must not look through, nor compute ahead of its place.
#pragma once
#include "ptx/types.cuh"

namespace ptx {

__device__ __forceinline__ i64 opaque(i64 value) {
    asm volatile("" : "+l"(value));
    return value;
}

__device__ __forceinline__ i32 opaque(i32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace ptx
