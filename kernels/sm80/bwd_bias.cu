// dBias = dS, summed over every axis that the bias was broadcast along: heads and batch, query rows (cfg::sum_rows), keys (cfg::sum_keys).
//
// One block owns one tile of the bias (one row or column of tiles where rows or keys are summed).  It recomputes dS for all the heads that
// read its bias (Algorithm 4 lines 11-15, 17-20) and adds them up in registers in a fixed order: no atomics, no N x N memory.
//
// Shared memory   sm80/bwd_pairs.cuh
// Grid            tiles of the bias (keys fastest, then rows) * instances of the bias * splits
// Result          dbias, or (cfg::split) dbias_acc [splits][like dbias]: part s takes every splits-th head
#include "attn/bias_sums.cuh"
#include "sm80/bwd_pairs.cuh"

// Adds dS of one pair of tiles to the warp's sums.
template <class Products>
__device__ __forceinline__ void add_ds(Scores& sums, Products& products, const TilePlace& at, const Params& p, const Head& head) {
    Scores s, slope, ds;
    find_p(s, slope, products, at, p, head);
    find_ds<false, true>(ds, s, slope, products, at, {});
    for_scores([&](int m, int n, int i) { sums[m][n][i] += ds[m][n][i]; });
}

// Adds dS of one head to the sums, over the block's tiles.
__device__ __forceinline__ void add_head(Scores& sums, PairSpace space, const Params& p, Head& head, const BiasPlace& place) {
    for (i32 key_tile = place.key_begin; key_tile < place.key_end; ++key_tile)
        visit_key_tile(space, p, head, key_tile, place.row_begin, place.row_end,
                       [&](auto& products, const TilePlace& at) { add_ds(sums, products, at, p, head); });
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) backward_bias(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    const PairSpace space = {ptx::shared_address(memory)};
    const BiasPlace place(p);
    const i64 size = bias_rows(p) * bias_keys(p);
    Scores sums = {};
    i32 member = 0;  // heads that read this bias are dealt out to the splits in turn
    for (i32 flat = 0; flat < p.batch * p.heads; ++flat) {
        if (slice_offset(p.dbias, batch_index(p, flat / p.heads), flat % p.heads) != place.instance * size) continue;
        if (member++ % p.splits != place.split) continue;
        describe_head(head, p, flat / p.heads, flat % p.heads);
        add_head(sums, space, p, head, place);
    }
    __syncthreads();  // all tiles are done with
    if (threadIdx.x / 32 < scores_warps) save_sums(reinterpret_cast<Acc*>(memory), sums);
    __syncthreads();  // the sums are complete
    store_bias_sums<threads>(reinterpret_cast<const Acc*>(memory), p, place, threadIdx.x, bias_sums_to(p), static_cast<Acc>(p.dropout_scale));
}
