// Gradients of arrays that score functions read: what the two kernels that make them share (kernels/sm80/bwd_score.cu, attn/score_gather.cuh).
//
//   d loss / d x[index(b, h, i, j)] += dS(b, h, i, j) weight(s, b, h, i, j)     for every expression in which a function reads an array x
//
// The first kernel adds what belongs together whatever the array: the elements of a head, of a row, of a key or of a diagonal, since the index
// is the same for all of them; or, where a head reads no more than a small slice of the array, those of each element of that.  The second one
// adds these sums where they belong.  Of other indices the first kernel adds every element itself.
#pragma once
#include "attn/diagonals.cuh"
#include "attn/place.cuh"

// Which scores share an index; a weight that a launch has nothing to do with shares nothing.
enum Shared { kShareNothing, kShareHead, kShareLine, kShareSlice, kShareElement };

// What a block of the first kernel walks over, whose lines are: the keys of a key tile, rows of a row tile, diagonals of tiles along a diagonal;
// or all heads, for one pair of tiles.
enum Walk { kWalkKeys, kWalkRows, kWalkDiagonals, kWalkHeads };

struct ScoreSums {
    void* sums;      // cfg::acc: [weights of the launch that share lines][heads * batch][lines], [those of heads][heads * batch][owners], and of one
                     // of slices [heads * batch][owners][slice]
    void* elements;  // cfg::acc: gradients of arrays whose elements are added one by one, or null
    void* result;    // second kernel: cfg::result
    i64 first;       // second kernel: the first of its sums
    i64 reach;       // second kernel: elements from the first to the last that a head may read, less 1
    i64 size;        // second kernel: elements of the array
    i64 heads_at, slices_at;  // first kernel: where in `sums` those of heads and of slices begin
    i32 owners;      // blocks to a head: tiles, or diagonals of tiles; second kernel: sums to a line
    i32 lines;       // sums to a head
    i32 slice;       // elements of a slice
    i32 histogram;   // first kernel: where in shared memory it has their sums
    i32 owned;       // second kernel: elements that a block adds up
};

struct ScoreSumsParams : Params, ScoreSums {};

// The numbers from 0 on.
template <int... n>
struct Numbers {};
template <int count, int... n>
struct CountTo : CountTo<count - 1, count - 1, n...> {};
template <int... n>
struct CountTo<0, n...> {
    using type = Numbers<n...>;
};

// What functions of weights are asked about: traced::weights, steps, tilts, numbers, offsets, bases.
struct ScorePlace {
    const Params& p;
    const TracedHead& head;
    const TracedRow& row;
    const TracedKey& key;

    // Asks one of them, which returns a number for each weight.
    template <auto function, class T, int count>
    __device__ __forceinline__ void ask(T (&found)[count], cfg::acc s = 0) const {
        ask<function>(found, s, typename CountTo<count>::type());
    }

private:
    template <auto function, class T, int count, int... n>
    __device__ __forceinline__ void ask(T (&found)[count], cfg::acc s, Numbers<n...>) const {
        function(p, head.made, row.made, key.made, s, head.b, head.h, row.i, key.j, found[n]...);
    }
};
