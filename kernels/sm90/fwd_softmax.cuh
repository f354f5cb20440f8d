// The two matrix products of a step, on one warpgroup's 64 rows, and the running softmax between them: a thread holds parts of rows g and
// g + 8 of its warp's 16; four lanes share a row.
#pragma once
#include "sm90/fwd_layout.cuh"
#include "sm90/scores.cuh"

namespace sm90::fwd {

using Scores = float[cfg::block_n / 2];
using Output = float[cfg::head_dim_v / 2];
using Weights = u32[cfg::block_n / 16][4];          // P as A fragments, one per 16 keys

// Both products call `beside` after each of their instructions: a warp is held up while it issues them, until the tensor
// cores have come that far, and other work costs nothing there.
constexpr int score_steps = cfg::head_dim / 16, value_steps = cfg::block_n / 16;

// S = Q K^T, asynchronous.  q is the address of this warpgroup's rows.  The caller commits.
template <class Beside>
__device__ __forceinline__ void compute_s(Scores& s, u32 q, u32 k, const Beside& beside) {
    ptx::wgmma_fence();
    unroll<score_steps>([&](int step) {
        const int slab = step / 4, column = 32 * (step % 4);
        const u64 a = ptx::wgmma_descriptor(q, 16, eight_rows) + ((slab * cfg::block_m * row_bytes + column) >> 4);
        const u64 b = ptx::wgmma_descriptor(k, 16, eight_rows) + ((slab * cfg::block_n * row_bytes + column) >> 4);
        ptx::Product<cfg::block_n>::ss<is_bfloat16, sign, 0>(s, a, b, step > 0);
        beside(step);
    });
}

// O += P V, asynchronous.
template <class Beside>
__device__ __forceinline__ void compute_o(Output& o, const Weights& p, u32 v, const Beside& beside) {
    ptx::wgmma_fence();
    unroll<value_steps>([&](int step) {
        const u64 b = ptx::wgmma_descriptor(v, cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
        ptx::Product<cfg::head_dim_v>::rs<is_bfloat16, 1, 1>(o, p[step], b, 1);
        beside(step);
    });
    ptx::wgmma_commit();
}

// Exponents are taken relative to a reference that follows the row maximum lazily: it moves only when the maximum has
// outgrown it by this many powers of two.  Sums and outputs then never need rescaling in most steps, at the price of
// weights up to 256 instead of 1, which 16-bit floats hold with the same relative accuracy.  Times a tangent they must stay below float16's largest
// number, 2^16.
constexpr float slack = cfg::moves && !is_bfloat16 ? 2.0f : 8.0f;

// From this many powers of two on the reference of a row, rounded, would move its weights by half a rounding of float16 or more.  Such a
// row is far: its maximum is taken from each of its scores before they are scaled, which is exact at the maximum, and its shift is 0.
constexpr float far = 1 << 13;

// What the scores of a thread's two rows lack in a key tile (SplitScore): it is added to maxima, and to exponents.
struct RowOffsets {
    float offset[2];
    __device__ __forceinline__ void set_offset(int r, float x) { offset[r] = x; }
    __device__ __forceinline__ float least(int r) const { return offset[r]; }  // of what is positive without
    __device__ __forceinline__ float real(float x, int r) const { return sum_of(x, offset[r]); }
};
struct NoOffsets {
    __device__ __forceinline__ void set_offset(int, float) {}
    __device__ __forceinline__ float least(int) const { return 0.0f; }
    __device__ __forceinline__ float real(float x, int) const { return x; }
};

// Of the thread's two rows.  The decision to move the reference is taken per row, from the row's data alone.
struct Softmax : Either<cfg::row_offsets, RowOffsets, NoOffsets>::type {
    float top[2];    // exact maximum of the raw scores, this lane's share
    float limit[2];  // scores above it move the reference; -inf for a row that has seen nothing, or is far
    float shift[2];  // minus the reference, in powers of two
    float sum[2];    // of exp2(score * scale + shift), this lane's share
    float scale;     // |scale| * log2(e)

    __device__ __forceinline__ void reset() {
        unroll<2>([&](int r) {
            top[r] = limit[r] = minus_infinity();
            shift[r] = sum[r] = 0.0f;
        });
    }
};

// Score i belongs to row (i / 2) % 2 of the thread's two rows.
__device__ __forceinline__ constexpr int half_of(int i) { return (i >> 1) & 1; }

// What move_reference leaves to be done where some row of the warp is far, or was.  `moved`: the row has a new reference, `first`: it had none
// that is a power of two.  The largest score of each row in this tile is in `largest`.
__device__ __forceinline__ void keep_far_rows(Softmax& state, float (&factor)[2], Scores& s, const float (&largest)[2],
                                              const bool (&moved)[2], const bool (&first)[2]) {
    float minuend[2];
    unroll<2>([&](int r) {
        const float before = quad_max(state.top[r]), top = first[r] ? fmaxf(before, largest[r]) : largest[r];
        const bool is_far = moved[r] && fabsf(top * state.scale) >= far;
        if (moved[r] && first[r])
            factor[r] = ptx::ex2(is_far ? (before - top) * state.scale : fmaf(before, state.scale, state.shift[r]));
        if (is_far) state.shift[r] = 0.0f, state.limit[r] = minus_infinity();
        minuend[r] = is_far ? top : 0.0f;
    });
    unroll<cfg::block_n / 2>([&](int i) {
        s[i] = state.real(s[i], half_of(i)) - minuend[half_of(i)];
    });
    unroll<2>([&](int r) { state.set_offset(r, 0.0f); });
}

// Moves the reference of the rows that outgrew it; factor is what their earlier sums and outputs shrink by.  Far rows come here with every
// key tile that they see.
__device__ __forceinline__ void move_reference(Softmax& state, float (&factor)[2], Scores& s, const float (&top)[2]) {
    float largest[2];
    bool moved[2], first[2], some_far = false;
    // Asked before maxima are exchanged, which takes longer: of a far row some lane has the maximum.
    unroll<2>([&](int r) {
        first[r] = state.limit[r] == minus_infinity();
        some_far |= first[r] && state.top[r] > minus_infinity();
        some_far |= fabsf(top[r] * state.scale) >= far && top[r] != minus_infinity();
    });
    some_far = __any_sync(~0u, some_far);
    unroll<2>([&](int r) {
        largest[r] = quad_max(top[r]);
        moved[r] = largest[r] > state.limit[r];
        factor[r] = 1.0f;
        if (moved[r]) {
            const float shift = -largest[r] * state.scale;
            factor[r] = first[r] ? 0.0f : ptx::ex2(shift - state.shift[r]);
            state.shift[r] = shift;
            state.limit[r] = largest[r] + __fdividef(slack, state.scale);
        }
    });
    if (uniform(some_far)) keep_far_rows(state, factor, s, largest, moved, first);
    unroll<2>([&](int r) { state.sum[r] *= factor[r]; });
}

// The largest of a thread's scores in each of its two rows.
__device__ __forceinline__ void find_largest(float (&top)[2], const Scores& s) {
    // Two chains per row: a single one would be bound by its latency.
    float chain[4] = {s[0], s[1], s[2], s[3]};
#pragma unroll
    for (int i = 4; i < cfg::block_n / 2; ++i) chain[i & 3] = fmaxf(chain[i & 3], s[i]);
    top[0] = fmaxf(chain[0], chain[1]), top[1] = fmaxf(chain[2], chain[3]);
}

// The same where it is positive, else 0; NaN if one of them is.  Positive floats are ordered as their bits are, and one
// instruction finds the largest of three integers.
__device__ __forceinline__ void find_largest_positive(float (&top)[2], const Scores& s) {
    i32 chain[4] = {};
    unroll<cfg::block_n / 4>([&](int i) { chain[i & 3] = __vimax3_s32(chain[i & 3], __float_as_int(s[2 * i]), __float_as_int(s[2 * i + 1])); });
    unroll<2>([&](int r) { top[r] = __int_as_float(max(chain[r], chain[r + 2])); });
}

constexpr bool often_negative = cfg::prescaled || splits;  // are all scores of a row in a tile?

// Brings the maximum up to date, and the reference if need be; true when earlier outputs of the warp must be multiplied by
// factor.  With `settled` the rows are expected to have positive scores and to stay within their limits.  What hidden keys may have made of
// their scores, NaN among it, is never settled: `hide` is called then.
template <class Hide>
__device__ __forceinline__ bool follow(Softmax& state, float (&factor)[2], Scores& s, bool settled, const Hide& hide) {
    float top[2];
    if (settled) {
        find_largest_positive(top, s);
        // Of scores that are no higher than 0 nothing need be known where the row has seen a higher one.
        const bool below[2] = {often_negative && state.top[0] >= state.least(0), often_negative && state.top[1] >= state.least(1)};
        settled = __all_sync(~0u, (top[0] > 0.0f || below[0]) && state.real(top[0], 0) <= state.limit[0] && (top[1] > 0.0f || below[1]) && state.real(top[1], 1) <= state.limit[1]);
        unroll<2>([&](int r) { top[r] = state.real(top[r], r); });
    }
    bool grown = false;
    if (!settled) {
        hide();
        find_largest(top, s);
        unroll<2>([&](int r) { top[r] = state.real(top[r], r); });
        grown = __any_sync(~0u, top[0] > state.limit[0] || top[1] > state.limit[1]);
        if (grown) move_reference(state, factor, s, top);
    }
    unroll<2>([&](int r) { state.top[r] = fmaxf(state.top[r], top[r]); });
    return grown;
}

// What is added to exponents.
__device__ __forceinline__ float shift_of(const Softmax& state, int r) {
    return cfg::row_offsets ? fmaf(state.least(r), state.scale, state.shift[r]) : state.shift[r];
}

// Replaces the scores by exp2(score * scale + shift) and adds them up; calls `beside` after each block of 16 keys, with the
// sums so far.
template <class Beside>
__device__ __forceinline__ void exponentiate(Softmax& state, Scores& s, const Beside& beside) {
    float chain[4];
    unroll<cfg::block_n / 2>([&](int i) {
        s[i] = ptx::ex2(fmaf(s[i], state.scale, shift_of(state, half_of(i))));
        chain[i & 3] = i < 4 ? s[i] : chain[i & 3] + s[i];
        if (i % 8 == 7) beside(i / 8, chain);
    });
    unroll<2>([&](int r) { state.sum[r] += chain[2 * r] + chain[2 * r + 1]; });
}

// The accumulator of 16 columns is, rounded, the A fragment of the next product: no data moves between lanes.
__device__ __forceinline__ void round_weights(Weights& p, const Scores& s) {
    unroll<cfg::block_n / 4>([&](int i) { p[i / 4][i % 4] = pack(s[2 * i], s[2 * i + 1]); });
}

__device__ __forceinline__ void rescale(Output& o, const float (&factor)[2]) {
    unroll<cfg::head_dim_v / 2>([&](int i) { o[i] *= factor[half_of(i)]; });
}

}  // namespace sm90::fwd
