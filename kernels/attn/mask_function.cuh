// A mask function: what it is asked about, a matrix, one of its rows, one of its keys, each with what follows from it alone.
//
// P is Params or MaskParams.  Rows and keys beyond the last are taken for the last.
#pragma once
#include "attn/mask_format.cuh"
#include "attn/params.cuh"

template <class P>
__device__ __forceinline__ i32 function_index(const P& p, i32 place) { return __ldg(static_cast<const i32*>(p.function.data) + place); }

struct FunctionHead {
    i32 b, h;
    traced::mask::Head made;

    // Matrices are counted as the mask's own leading axes do.
    template <class P>
    __device__ __forceinline__ static FunctionHead of(const P& p, i32 matrix) {
        const i32 outer = quotient(matrix, p.matrices.heads), b = p.matrices.first_b + outer, h = p.matrices.first_h + matrix - outer * p.matrices.heads;
        return {b, h, traced::mask::head(p, b, h)};
    }
};

struct FunctionRow {
    i32 i;
    traced::mask::Row made;

    template <class P>
    __device__ __forceinline__ static FunctionRow of(const P& p, const FunctionHead& head, i32 row) {
        const i32 i = function_index(p, min(row, p.n_queries - 1));
        return {i, traced::mask::row(p, head.made, head.b, head.h, i)};
    }
};

struct FunctionKey {
    i32 j;
    traced::mask::Key made;

    template <class P>
    __device__ __forceinline__ static FunctionKey of(const P& p, const FunctionHead& head, i32 key) {
        const i32 j = function_index(p, p.n_queries + min(key, p.n_keys - 1));
        return {j, traced::mask::key(p, head.made, head.b, head.h, j)};
    }
};

template <class P>
__device__ __forceinline__ bool function_shows(const P& p, const FunctionHead& head, const FunctionRow& row, const FunctionKey& key) {
    bool visible;
    traced::mask::visible(p, head.made, row.made, key.made, 0.0f, head.b, head.h, row.i, key.j, visible);
    return visible;
}
