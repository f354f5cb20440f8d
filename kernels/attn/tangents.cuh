// Derivatives along tangents: what their kernels take beside Params, and a score with its derivatives.
#pragma once
#include "attn/score.cuh"

// Tangents have a "t" before the operand's name; those that are not given are never read.
constexpr int kWeights = 10;  // expressions of a score function that read arrays, at most

struct Tangents {
    Operand tq, tk, tv, tbias, tdo, to, tlse;  // to: cfg::out (jvp), cfg::o_elem (backward); tlse: cfg::stat, col unused
    Operand tdq, tdk, tdv, tdbias, ddo;
    void* tdbias_acc;  // cfg::stat: [splits][like tdbias], as dbias_acc
    void *elements[kWeights], *telements[kWeights];  // float64: sums of gradients of arrays and of their tangents, by expression; null: there are none
    i64 sizes[kWeights];
    void* rows;  // backward: [five numbers][heads * batch][n_queries] of every row, in cfg::acc (RowNumber)
};

struct TangentParams : Params, Tangents {};

// Of a row: what scores are relative to, 1 / l (0: the row sees nothing), D, its tangent, and the tangent of lse.
enum RowNumber { kRowMaximum, kRowInverse, kRowDelta, kRowMovedDelta, kRowMean, kRowNumbers };

// A score, its tangent, its slope by the scaled product, and the tangent of that.
struct MovedScore {
    cfg::acc score, tangent, slope, bend;
};

// From a product and its tangent, neither scaled: scale, softcap, function, bias.  A bias of -inf hides whatever the product is.
template <class Head, class Row, class Key>  // TracedHead, TracedRow, TracedKey
__device__ __forceinline__ MovedScore move_score(const TangentParams& p, cfg::acc product, cfg::acc moved, i64 bias_offset, i64 tbias_offset, i32 row, i32 key,
                                                 const Head& head, const Row& traced_row, const Key& traced_key) {
    using Acc = cfg::acc;
    MovedScore x = {product_of(product, Acc(p.scale)), moved * Acc(p.scale), 1, 0};
    if constexpr (cfg::softcap) {
        const Capped capped = cap_product(p, product);
        x = {capped.score, capped.slope * x.tangent, capped.slope, 0};
        if constexpr (cfg::moves) x.bend = Acc(-2) * x.score * x.tangent / (Acc(p.softcap) * Acc(p.softcap));
    }
    if constexpr (cfg::score) {
        Acc value, slope, along, curve, bend;
        traced::moved(p, head.made, traced_row.made, traced_key.made, x.score, head.b, head.h, traced_row.i, traced_key.j, value, slope, along, curve, bend);
        x.bend = x.bend * slope + x.slope * (curve * x.tangent + bend);
        x = {value, slope * x.tangent + along, x.slope * slope, x.bend};
    }
    if constexpr (cfg::bias) {
        const Acc bias = bias_at(p, bias_offset, row, key);
        x.score = bias == -infinity<Acc>() ? bias : sum_of(x.score, bias);
    }
    if constexpr (cfg::tbias) {
        const auto* tbias = static_cast<const cfg::bias_elem*>(p.tbias.data) + tbias_offset;
        x.tangent += to_acc(tbias[min(row, p.n_queries - 1) * p.tbias.row + min(key, p.n_keys - 1) * p.tbias.col]);
    }
    return x;
}
