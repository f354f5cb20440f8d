// Gradients of arrays that score functions read: what the two kernels that make them share (kernels/sm80/bwd_score.cu, kernels/util/score_sums.cu).
//
//   d loss / d x[index(b, h, i, j)] += dS(b, h, i, j) weight(s, b, h, i, j)     for every expression in which a function reads an array x
//
// The first kernel adds what belongs together whatever the array: the elements of a head, of a row, of a key or of a diagonal, since the index
// is the same for all of them.  The second one adds these sums where they belong.  Of other indices the first kernel adds every element itself.
#pragma once
#include "attn/place.cuh"

// Which scores share an index; a weight that a launch has nothing to do with shares nothing.
enum Shared { kShareNothing, kShareHead, kShareLine, kShareElement };

// What a block of the first kernel walks over, whose lines are: the keys of a key tile, rows of a row tile, diagonals of tiles along a diagonal;
// or all heads, for one pair of tiles.
enum Walk { kWalkKeys, kWalkRows, kWalkDiagonals, kWalkHeads };

struct ScoreSums {
    void* sums;      // cfg::acc: [weights of the launch that share lines][heads * batch][lines], then [those of heads][heads * batch][owners]
    void* elements;  // cfg::acc: gradients of arrays whose elements are added one by one, or null
    void* result;    // cfg::acc or cfg::grad
    i64 first;       // of the second kernel's sums; of the first kernel's sums of heads
    i64 size;        // elements of the array
    i32 owners;      // blocks to a head: tiles, or diagonals of tiles
    i32 lines;       // sums to a head
    i32 owned;       // elements that a block of the second kernel adds up
};

struct ScoreSumsParams : Params, ScoreSums {};

// Tiles' corners lie on every kDiagonalStep-th diagonal, of those that begin at keys on the (keys - 1)th tile's first.
constexpr i32 common_divisor(i32 a, i32 b) { return b == 0 ? a : common_divisor(b, a % b); }
template <int rows, int keys>
struct Diagonals {
    static constexpr i32 step = common_divisor(rows, keys), lines = rows + keys;  // of one of them, the last unused

    // Row less key of the upper left corner of a diagonal's tiles.
    __device__ __forceinline__ static i32 corner(i32 owner, i32 key_tiles) { return owner * step - (key_tiles - 1) * keys; }
    // Row less key of line x.
    __device__ __forceinline__ static i32 difference(i32 corner, i32 x) { return corner + x - (keys - 1); }
};

// traced::weights and traced::offsets return a number for each weight.
template <int... n>
struct Numbers {};
template <int count, int... n>
struct CountTo : CountTo<count - 1, count - 1, n...> {};
template <int... n>
struct CountTo<0, n...> {
    using type = Numbers<n...>;
};

template <int count, int... n>
__device__ __forceinline__ void find_weights(cfg::acc (&weights)[count], Numbers<n...>, const Params& p, cfg::acc s, const TracedHead& head, const TracedRow& row, const TracedKey& key) {
    traced::weights(p, head.made, row.made, key.made, s, head.b, head.h, row.i, key.j, weights[n]...);
}
template <int count, int... n>
__device__ __forceinline__ void find_offsets(i64 (&offsets)[count], Numbers<n...>, const Params& p, const TracedHead& head, const TracedRow& row, const TracedKey& key) {
    traced::offsets(p, head.made, row.made, key.made, cfg::acc(0), head.b, head.h, row.i, key.j, offsets[n]...);
}
