// P, dS and their tangents of a warpgroup's 64 rows of the owner's side against a tile of the other side.
//
// Element i of a thread belongs to row g + 8 (i / 2 % 2) of its warp's 16 and to column 8 (i / 4) + 2 q + i % 2 of the tile, whichever side is which.
#pragma once
#include "attn/philox.cuh"
#include "sm90/bwd_jvp_layout.cuh"
#include "sm90/operands.cuh"

namespace sm90::moved {

constexpr int elements = streamed / 2;  // of a thread
static_assert(elements <= 32, "a bit each in one register");
using Scores = float[elements];
using Fragments = u32[streamed / 16][4];

// A tile and the thread's place in it.
struct TilePlace {
    i32 own, other;  // numbers of the thread's first row and column
    i32 batch, head;

    __device__ __forceinline__ i32 row(int i) const { return keys_own ? column(i) : line(i); }
    __device__ __forceinline__ i32 key(int i) const { return keys_own ? line(i) : column(i); }
    __device__ __forceinline__ i32 line(int i) const { return own + 8 * (i / 2 % 2); }
    __device__ __forceinline__ i32 column(int i) const { return other + 8 * (i / 4) + i % 2; }
};

// The rows' numbers by element: the owner's in registers, or those that came with the tile.
struct RowNumbers {
    float own[numbers][2];
    const float2* shared;  // of the thread's first column and the next

    __device__ __forceinline__ void load_own(const TangentParams& p, i32 flat, i32 row) {
        unroll<numbers, 2>([&](int which, int half) { own[which][half] = numbers_of(p, flat, row + 8 * half)[which * cfg::unit]; });
    }
    __device__ __forceinline__ float operator()(int which, int i) const {
        if constexpr (!keys_own) return own[which][i / 2 % 2];
        const float2 pair = shared[which * (streamed / 2) + 4 * (i / 4)];
        return i % 2 ? pair.y : pair.x;
    }
};

// A bit for each element that masks show.
__device__ __forceinline__ u32 find_seen(const Params& p, const TilePlace& at) {
    const MaskSlices slices = mask_slices(p, at.batch, at.head);
    const i32 last = p.n_queries - 1;
    u32 seen = 0;
    if constexpr (keys_own) {
        unroll<2>([&](int half) {
            const i32 key = at.line(2 * half);
            const KeyMask mask(p, slices, key);
#pragma unroll 4
            for (int column = 0; column < streamed / 8; ++column)
                unroll<2>([&](int e) {
                    const i32 row = at.other + 8 * column + e;
                    seen |= static_cast<u32>(mask.visible(p, min(row, last), key)) << (4 * column + 2 * half + e);
                });
        });
    } else {
#pragma unroll 4
        for (int column = 0; column < streamed / 4; ++column) {
            const int i = 4 * (column / 2) + column % 2;
            const i32 key = at.column(i);
            const KeyMask mask(p, slices, key);
            unroll<2>([&](int half) { seen |= static_cast<u32>(mask.visible(p, min(at.line(2 * half), last), key)) << (i + 2 * half); });
        }
    }
    return seen;
}

// A bit for each element that dropout keeps.
__device__ __forceinline__ u32 find_kept(const Params& p, const TilePlace& at) {
    constexpr u32 threshold = cfg::dropout ? cfg::dropout : 1;
    const RandomStream stream = random_stream(p.dropout, at.batch, at.head);
    u32 kept = 0, words[4];
    unroll<streamed / 16>([&](int block) {
        if constexpr (!keys_own) {
            random_words(words, p, stream, at.own, at.other + 16 * block);
            unroll<4>([&](int w) { kept |= (kept_low<threshold>(words[w]) | kept_high<threshold>(words[w]) << 1) << (8 * block + 2 * w); });
        } else {  // a draw's words are those of an even key and the next
            unroll<2>([&](int e) {
                random_words(words, p, stream, at.other + 16 * block + e, at.own & ~1);
                unroll<4>([&](int w) {
                    const u32 bit = at.own & 1 ? kept_high<threshold>(words[w]) : kept_low<threshold>(words[w]);
                    kept |= bit << (8 * block + 4 * (w & 1) + w / 2 * 2 + e);
                });
            });
        }
    });
    return kept;
}

// What makes scores of products but the scale.
constexpr bool traced_scores = cfg::softcap || cfg::score || cfg::bias;

struct Weights {
    const TangentParams& p;
    const TilePlace at;
    const RowNumbers& row;
    Scores &s, &t;  // products of q and k, and their tangent

    // In place of the products f' P and (f' u + f'.) P, with u the tangent less its mean: what dX and dX. are made of.  take(i, P, P u), where slopes
    // are not 1.
    template <class Take>
    __device__ __forceinline__ void find(const Take& take) const {
        if constexpr (traced_scores) return find_traced(take);
        const float scale = static_cast<float>(p.scale);
        unroll<elements>([&](int i) {
            const float weight = power(i, product_of(s[i], scale));
            s[i] = weight, t[i] = cfg::moves ? weight * fmaf(t[i], scale, -row(mean, i)) : 0.0f;
        });
    }

    __device__ __forceinline__ float power(int i, float score) const {
        return ptx::ex2(fmaf(rounded_difference(score, row(maximum, i)), static_cast<float>(kLog2e), row(exponent, i)));
    }

    template <class Take>
    __device__ __forceinline__ void find_traced(const Take& take) const {
        const TracedHead head = TracedHead::of(p, at.batch, at.head);
        const i64 bias = cfg::bias ? slice_of(p.bias, at.batch, at.head) : 0, tbias = cfg::tbias ? slice_of(p.tbias, at.batch, at.head) : 0;
        unroll<elements>([&](int i) {
            const i32 query = at.row(i), key = at.key(i);
            const MovedScore x = move_score(p, s[i], t[i], bias, tbias, query, key, head, TracedRow::of(p, head, query), TracedKey::of(p, head, key));
            const bool seen = x.score != -infinity<float>() && row(exponent, i) != -infinity<float>();
            const float weight = seen ? power(i, x.score) : 0.0f, u = cfg::moves ? x.tangent - row(mean, i) : 0.0f;
            s[i] = weight == 0.0f ? 0.0f : weight * x.slope;
            t[i] = weight == 0.0f || !cfg::moves ? 0.0f : weight * fmaf(x.slope, u, x.bend);
            if constexpr (cfg::sloped) take(i, weight, weight == 0.0f ? 0.0f : weight * u);
        });
    }
};

// Zeros where nothing is seen.
__device__ __forceinline__ void clear_unseen(Scores& x, u32 seen) {
    unroll<elements>([&](int i) { x[i] = seen >> i & 1 ? x[i] : 0.0f; });
}

__device__ __forceinline__ u32& pair_of(Fragments& a, int i) { return a[i / 8][i / 2 % 4]; }

}  // namespace sm90::moved
