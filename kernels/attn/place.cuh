// Where rows, keys and heads of the operands stand in the whole problem, and what functions make of that.
#pragma once
#include "attn/params.cuh"

// Number in the whole problem of row or key `index` of the operands, of which there are `count`: counted on from `first`, or (cfg::runs) looked
// up, with dropout by sixteens.  Beyond the last any number will do for dropout; functions ask for those that exist.
__device__ __forceinline__ u32 global_index(u32 first, const i32* blocks, i32 index, i32 count) {
    constexpr i32 unit = cfg::dropout ? 16 : 1;
    if constexpr (cfg::runs) {
        if (blocks != nullptr) return static_cast<u32>(__ldg(blocks + min(index, count - 1) / unit) + index % unit);
    }
    return first + static_cast<u32>(index);
}
__device__ __forceinline__ u32 global_row(const Params& p, i32 row) { return global_index(p.dropout.row, p.dropout.row_blocks, row, p.n_queries); }
__device__ __forceinline__ u32 global_key(const Params& p, i32 key) { return global_index(p.dropout.key, p.dropout.key_blocks, key, p.n_keys); }

// What functions of scores and masks are asked about: a head, one of its rows, one of its keys, each with what follows from it alone.  Rows and
// keys beyond the last are taken for the last.  Without functions all three are empty.
template <bool functions>
struct TracedPlace {
    struct Head {
        i32 b, h;
        traced::Head made;

        __device__ __forceinline__ static Head of(const Params& p, i32 ib, i32 head) {
            const i32 b = static_cast<i32>(p.dropout.batch) + ib, h = static_cast<i32>(p.dropout.head) + head;
            return {b, h, traced::head(p, b, h)};
        }
    };
    struct Row {
        i32 i;
        traced::Row made;

        __device__ __forceinline__ static Row of(const Params& p, const Head& head, i32 row) {
            const i32 i = static_cast<i32>(global_row(p, min(row, p.n_queries - 1)));
            return {i, traced::row(p, head.made, head.b, head.h, i)};
        }
    };
    struct Key {
        i32 j;
        traced::Key made;

        __device__ __forceinline__ static Key of(const Params& p, const Head& head, i32 key) {
            const i32 j = static_cast<i32>(global_key(p, min(key, p.n_keys - 1)));
            return {j, traced::key(p, head.made, head.b, head.h, j)};
        }
    };
};
template <>
struct TracedPlace<false> {
    struct Head {
        __device__ __forceinline__ static Head of(const Params&, i32, i32) { return {}; }
    };
    struct Row {
        __device__ __forceinline__ static Row of(const Params&, const Head&, i32) { return {}; }
    };
    struct Key {
        __device__ __forceinline__ static Key of(const Params&, const Head&, i32) { return {}; }
    };
};
using TracedHead = TracedPlace<cfg::score>::Head;
using TracedRow = TracedPlace<cfg::score>::Row;
using TracedKey = TracedPlace<cfg::score>::Key;
