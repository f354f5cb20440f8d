// Where the kernels that sum dS over what shares a bias (kernels/sm80/bwd_bias.cu, kernels/sm80/bwd_jvp_bias.cu, kernels/sm90/bwd_dbias.cu) have their
// place, and leave a tile of sums.
#pragma once
#include "attn/math.cuh"
#include "attn/params.cuh"

constexpr int bias_sums_stride = cfg::block_n + 1;

// A place, by default the block's: the range of tiles it sums over and the bias instance it belongs to.
struct BiasPlace {
    i32 row_begin, row_end, key_begin, key_end, instance, split;

    __device__ __forceinline__ explicit BiasPlace(const Params& p, i32 number = blockIdx.x) {
        i32 rest = number;
        auto take = [&](bool summed, i32 tiles, i32& begin, i32& end) {
            begin = summed ? 0 : rest % tiles;
            end = summed ? tiles : begin + 1;
            if (!summed) rest /= tiles;
        };
        take(cfg::sum_keys, p.key_tiles, key_begin, key_end);
        take(cfg::sum_rows, p.row_tiles, row_begin, row_end);
        split = rest % p.splits;
        instance = rest / p.splits;
    }

    // How many there are.
    __device__ __forceinline__ static i32 count(const Params& p) {
        return (cfg::sum_keys ? 1 : p.key_tiles) * (cfg::sum_rows ? 1 : p.row_tiles) * p.splits * p.bias_instances;
    }
};

__device__ __forceinline__ i64 bias_rows(const Params& p) { return cfg::sum_rows ? 1 : p.n_queries; }
__device__ __forceinline__ i64 bias_keys(const Params& p) { return cfg::sum_keys ? 1 : p.n_keys; }

// Where the sums go: to the gradient, or (cfg::split) unrounded to parts of it.
__device__ __forceinline__ auto* bias_sums_to(const Params& p) {
    if constexpr (cfg::split) return static_cast<cfg::acc*>(p.dbias_acc);
    else return static_cast<cfg::bias_grad*>(p.dbias.data);
}

// One number of the result per thread: a sum over the rows or keys of the tile where those are summed, times a factor.
template <int threads, class Out>
__device__ __forceinline__ void store_bias_sums(const cfg::acc* sums, const Params& p, const BiasPlace& place, int thread, Out* to, cfg::acc factor) {
    constexpr int rows = cfg::sum_rows ? 1 : cfg::block_m, keys = cfg::sum_keys ? 1 : cfg::block_n;
    const i64 size = bias_rows(p) * bias_keys(p);
    for (int index = thread; index < rows * keys; index += threads) {
        const int row = index / keys, key = index % keys;
        cfg::acc sum = 0;
        for (int r = row; r < (cfg::sum_rows ? cfg::block_m : row + 1); ++r)
            for (int c = key; c < (cfg::sum_keys ? cfg::block_n : key + 1); ++c) sum += sums[r * bias_sums_stride + c];
        const i64 to_row = cfg::sum_rows ? 0 : i64(place.row_begin) * cfg::block_m + row;
        const i64 to_key = cfg::sum_keys ? 0 : i64(place.key_begin) * cfg::block_n + key;
        if (to_row >= bias_rows(p) || to_key >= bias_keys(p)) continue;
        const i64 at = place.instance * size + to_row * bias_keys(p) + to_key;
        const i64 part = cfg::split ? i64(place.split) * p.bias_instances : 0;
        sum *= factor;
        to[part * size + at] = round_to<Out>(sum);
    }
}
