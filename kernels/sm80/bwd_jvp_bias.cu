// dBias = dS and its tangent, summed over every axis that the bias was broadcast along: heads and batch, query rows (cfg::sum_rows), keys
// (cfg::sum_keys).
//
// One block owns one tile of the bias (one row or column of tiles where rows or keys are summed).  It computes dS for all the heads that read its
// bias and adds them up in registers in a fixed order.
//
// Shared memory   q, q., do, do. of a row tile; k, k., v, v. of a key tile; at the end the sums, [block_m][block_n]
// Grid            tiles of the bias (keys fastest, then rows) * instances of the bias * splits
// Result          dbias_acc, tdbias_acc [splits][like dbias]: part s takes every splits-th head
#include "attn/bias_sums.cuh"
#include "sm80/bwd_jvp.cuh"

// Adds dS and its tangent of one head.
__device__ __forceinline__ void add_head(const TangentParams& p, Head& h, i32 flat, const BiasPlace& place, u32 own, u32 stage, Scores& sum, Scores& tsum) {
    for (i32 tile = place.row_begin; tile < place.row_end; ++tile) {
        const i32 own0 = tile * cfg::block_m;
        __syncthreads();  // everybody is done with the tiles and with h
        if (threadIdx.x == 0) {
            describe(p, h, flat / p.heads, flat % p.heads, tile);
            h.place.lowest = max(h.place.lowest, place.key_begin);
        }
        __syncthreads();  // h is complete
        for_key_tiles(p, h, own0, place.key_end, own, stage, [&](const RowNumbers& numbers, i32 first, bool partial) {
            Scores s = {}, t = {}, slope, bend;
            make_weights(p, h, own0, first, partial, own, stage, numbers, s, t, slope, bend);
            make_ds(p, h, own0, first, own, stage, numbers, s, t);
            unroll<n_tiles, 4>([&](int n, int i) { sum[0][n][i] += s[0][n][i], tsum[0][n][i] += t[0][n][i]; });
        });
    }
}

// Lays the sums of all warps side by side, and adds up rows or keys where these are summed.
__device__ __forceinline__ void store(const TangentParams& p, const BiasPlace& place, Acc* tile, const Scores& sum, void* parts) {
    const i32 lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 + lane / 4;
    __syncthreads();  // the tiles are free, or what was stored before has been read
    unroll<n_tiles, 4>([&](int n, int i) { tile[(row0 + i / 2 * 8) * bias_sums_stride + 8 * n + lane % 4 * 2 + i % 2] = sum[0][n][i]; });
    __syncthreads();  // the sums are there
    store_bias_sums<threads>(tile, p, place, threadIdx.x, static_cast<Stat*>(parts), Acc(1));
}

extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void backward_jvp_bias(const __grid_constant__ TangentParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Head h;
    const u32 own = ptx::shared_address(memory), stage = own + OwnSide::bytes;
    const BiasPlace place(p);
    const i64 size = bias_rows(p) * bias_keys(p);
    Scores sum = {}, tsum = {};
    i32 member = 0;  // heads that read this bias are dealt out to the splits in turn
    for (i32 flat = 0; flat < p.batch * p.heads; ++flat) {
        if (slice_offset(p.dbias, batch_index(p, flat / p.heads), flat % p.heads) != place.instance * size) continue;
        if (member++ % p.splits == place.split) add_head(p, h, flat, place, own, stage, sum, tsum);
    }
    if constexpr (cfg::primal) store(p, place, reinterpret_cast<Acc*>(memory), sum, p.dbias_acc);
    store(p, place, reinterpret_cast<Acc*>(memory), tsum, p.tdbias_acc);
}
