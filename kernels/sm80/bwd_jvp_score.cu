// Gradients of the arrays that a score function reads and their tangents: dS times weights, and what the tangents of both add, element by element.
//
//   d x[index] += dS w(s),   d. x[index] += dS. w(s) + dS (w'(s) s. + w.)     for every expression that reads an array x
//
// A block owns the rows of one tile of one head and goes through its key tiles.  Elements are added up in memory, in no fixed order.
//
// Shared memory   q, q., do, do. of the row tile; k, k., v, v. of a key tile
// Grid            row tiles * heads * batch, tiles fastest
#include "attn/score_sums.cuh"
#include "ptx/global.cuh"
#include "sm80/bwd_jvp.cuh"

constexpr int weights = cfg::weights;

// One key tile.
__device__ __forceinline__ void attend(const TangentParams& p, const Head& h, i32 own0, i32 stream0, bool partial, u32 own, u32 stream, const RowNumbers& numbers) {
    Scores product = {}, moved = {}, s, t, slope, bend;
    add_products(product, moved, own, stream);
    unroll<n_tiles, 4>([&](int n, int i) { s[0][n][i] = product[0][n][i], t[0][n][i] = moved[0][n][i]; });
    make_p(p, h, own0, stream0, partial, numbers, s, t, slope, bend);
    make_ds(p, h, own0, stream0, own, stream, numbers, s, t);
    for_elements<keys_own, n_tiles>(p, h, own0, stream0, [&](int n, int i, i32, i32, const TracedRow& row, const TracedKey& key) {
        const Acc ds = s[0][n][i], tds = t[0][n][i];
        if (ds == 0 && tds == 0) return;  // as of what is hidden, where a weight may be anything
        Capped input = {product_of(product[0][n][i], Acc(p.scale)), 1};
        if constexpr (cfg::softcap) input = cap_product(p, product[0][n][i]);
        const Acc tangent = input.slope * moved[0][n][i] * Acc(p.scale);
        const ScorePlace at = {p, h, row, key};
        Acc found[3 * weights];  // and their tangents by those of arrays, and their derivatives by the score
        i64 place[weights];      // of the elements in their arrays
        at.ask<traced::weights_moved>(found, input.score);
        at.ask<traced::places>(place);
        unroll<weights>([&](int k) {
            const Acc share = ds == 0 ? Acc(0) : ds * found[k];
            const Acc more = ds == 0 ? Acc(0) : ds * (found[weights + k] + found[2 * weights + k] * tangent);
            if constexpr (cfg::primal) ptx::red_add(static_cast<double*>(p.elements[k]) + place[k], double(share));
            ptx::red_add(static_cast<double*>(p.telements[k]) + place[k], double((tds == 0 ? Acc(0) : tds * found[k]) + more));
        });
    });
}

extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void backward_jvp_score(const __grid_constant__ TangentParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 own = ptx::shared_address(memory), stage = own + OwnSide::bytes;
    __shared__ Head h;
    const i32 tile = static_cast<i32>(blockIdx.x) % p.row_tiles, flat = blockIdx.x / p.row_tiles, own0 = tile * cfg::block_m;
    if (threadIdx.x == 0) describe(p, h, flat / p.heads, flat % p.heads, tile);
    __syncthreads();  // h is complete
    for_key_tiles(p, h, own0, p.key_tiles, own, stage, [&](const RowNumbers& numbers, i32 first, bool partial) {
        attend(p, h, own0, first, partial, own, stage, numbers);
    });
}
