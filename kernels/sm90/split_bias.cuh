// What tensor cores add to raw products for each key: a bias of keys (cfg::split_bias), or the keys' part of a score function that adds something
// that is affine in i and j (cfg::row_offsets), or does not depend on i (cfg::split_score alone).  No thread has anything to do for it.
//
// In units of raw products it is three bfloat16 that add up to it, and stands beside k as columns of 16 bytes a row, of which the others are 0.
// They are multiplied by 1/2, twice: both halves of a product's 16 columns are the same 8.
#pragma once
#include "attn/score.cuh"
#include "sm90/operands.cuh"

namespace sm90 {

constexpr bool splits = cfg::split_bias || cfg::split_score;
constexpr int part_bytes = 16;     // of a key
constexpr int halves_bytes = 128;  // eight rows of eight 1/2, of which all others are copies

constexpr u32 two_halves = 0x3F003F00;

// A key with no higher bias is sunk: no product shows in its score.
constexpr float sunk = -0x1p100f;
// From here on a bias, which is finite, is left as it is.
constexpr float outsized = 0x1p127f;

// In units of raw products.
__device__ __forceinline__ float product_unit(const Params& p) { return __fdividef(1.0f, fabsf(static_cast<float>(p.scale))); }
__device__ __forceinline__ float bias_of_product(const Params& p, float bias) {
    const float x = product_of(bias, product_unit(p));
    return fabsf(x) < outsized ? x : bias;
}

// And back: a score from its raw product.
__device__ __forceinline__ float natural_score(float x, float scale) { return splits && !cfg::row_offsets && fabsf(x) >= outsized ? x : x * scale; }

// x = first + second + third, of eight bits each; the third alone in a word.
struct BiasParts {
    u32 pair, third;

    __device__ __forceinline__ explicit BiasParts(float x) : BiasParts(x, [](float y) { return rest_of(y); }) {}
    template <class Rest>
    __device__ __forceinline__ BiasParts(float x, const Rest& rest_of) {
        const float rest = rest_of(x);
        pair = __byte_perm(__float_as_uint(x), __float_as_uint(rest), 0x7632);
        third = __float_as_uint(rest_of(rest)) >> 16;
    }
    // The same of what is finite.
    __device__ __forceinline__ static BiasParts of_finite(float x) {
        return {x, [](float y) { return y - __uint_as_float(__float_as_uint(y) & 0xFFFF0000u); }};
    }
    __device__ __forceinline__ static bool hides(u32 pair) { return (pair & 0xFFFFu) == 0xFF80u; }  // -inf
};

// The part of a place in a quad, in the upper half of a word; the last place has none.
__device__ __forceinline__ u32 part_of_place(float x, u32 place) {
    const float rest = rest_of(x), last = rest_of(rest);
    const u32 mask = place < 3 ? 0xFFFF0000u : 0;
    return __float_as_uint(place == 0 ? x : place == 1 ? rest : last) & mask;
}

// Descriptors of halves, and of the parts of keys in rows.
__device__ __forceinline__ u64 halves_descriptor(u32 halves) { return ptx::wgmma_descriptor_of_units(halves, 0, 0); }
__device__ __forceinline__ u64 parts_descriptor(u32 parts) { return ptx::wgmma_descriptor_of_units(parts, 0, 8 * part_bytes); }

// By the first threads of a block, before its first barrier.
__device__ __forceinline__ void store_halves(u32 halves) {
    if (threadIdx.x < halves_bytes / 16) ptx::store_shared_v4(halves + 16 * threadIdx.x, two_halves, two_halves, two_halves, two_halves);
    ptx::async_proxy_fence();
}

// Such a function in a key tile, in units of raw products.  Of a key tensor cores add what the function adds, or what an affine one adds beyond the
// tile's first key, the same in all rows; of a row is left what it adds at that first key.
struct SplitScore {
    const Params& p;
    TracedHead head;
    i32 first;

    __device__ __forceinline__ SplitScore(const Params& p, const TracedHead& head, i32 first_key)
        : p(p), head(head), first(static_cast<i32>(global_key(p, first_key))) {}
    __device__ __forceinline__ SplitScore(const Params& p, i32 batch, i32 head, i32 first_key)
        : SplitScore(p, TracedHead::of(p, batch, head), first_key) {}

    __device__ __forceinline__ float of(i32 i, i32 j) const {
        return product_of(natural(p, head, i, j), product_unit(p));
    }
    template <class Head>
    __device__ __forceinline__ static float natural(const Params& p, const Head& head, i32 i, i32 j) {
        float x = 0.0f;
        if constexpr (cfg::split_score) {
            const auto row = traced::row(p, head.made, head.b, head.h, i);
            const auto key = traced::key(p, head.made, head.b, head.h, j);
            traced::addend(p, head.made, row, key, 0.0f, head.b, head.h, i, j, x);
        }
        return x;
    }
    __device__ __forceinline__ float of_key(i32 key) const {
        if constexpr (!cfg::row_offsets) return bias_of_product(p, natural(p, head, first, static_cast<i32>(global_key(p, min(key, p.n_keys - 1)))));
        return rounded_difference(of(first, static_cast<i32>(global_key(p, key))), of(first, first));
    }
    __device__ __forceinline__ float of_row(i32 row) const { return of(static_cast<i32>(global_row(p, row)), first); }
};

}  // namespace sm90
