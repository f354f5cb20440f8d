// dBias = dS and its tangent, summed over every axis that the bias was broadcast along: heads and batch, query rows (cfg::sum_rows), keys
// (cfg::sum_keys).
//
// One block owns one tile of the bias (one row or column of tiles where rows or keys are summed).  It computes dS for all the heads that read its
// bias and adds them up in registers in a fixed order.
//
// Shared memory   q, q., do, do. of a row tile; k, k., v, v. of a key tile; at the end the sums, [block_m][block_n]
// Grid            tiles of the bias (keys fastest, then rows) * instances of the bias * splits
// Result          dbias_acc, tdbias_acc [splits][like dbias]: part s takes every splits-th head
#include "sm80/bwd_jvp.cuh"

struct Place {
    i32 row_begin, row_end, key_begin, key_end, instance, split;

    __device__ __forceinline__ explicit Place(const TangentParams& p) {
        i32 rest = blockIdx.x;
        const auto take = [&](bool summed, i32 tiles, i32& begin, i32& end) {
            begin = summed ? 0 : rest % tiles;
            end = summed ? tiles : begin + 1;
            if (!summed) rest /= tiles;
        };
        take(cfg::sum_keys, p.key_tiles, key_begin, key_end);
        take(cfg::sum_rows, p.row_tiles, row_begin, row_end);
        split = rest % p.splits, instance = rest / p.splits;
    }
};

// Adds dS and its tangent of one head.
__device__ __forceinline__ void add_head(const TangentParams& p, Head& h, i32 flat, const Place& place, u32 own, u32 stage, Scores& sum, Scores& tsum) {
    for (i32 tile = place.row_begin; tile < place.row_end; ++tile) {
        const i32 own0 = tile * cfg::block_m;
        __syncthreads();  // everybody is done with the tiles and with h
        if (threadIdx.x == 0) {
            describe(p, h, flat / p.heads, flat % p.heads, tile);
            h.place.lowest = max(h.place.lowest, place.key_begin);
        }
        __syncthreads();  // h is complete
        load_queries<OwnSide>(p, h, own0, own);
        RowNumbers numbers;
        numbers.load_own(p, h, own0);
        TileWalk walk(p, h.place, place.key_end);
        for (Tile next = walk.next(); next.exists(); next = walk.next()) {
            const i32 first = next.n() * cfg::block_n;
            fetch_stream(p, h, first, stage);
            Scores s = {}, t = {}, slope, bend;
            make_weights(p, h, own0, first, next.partial(), own, stage, numbers, s, t, slope, bend);
            make_ds(p, h, own0, first, own, stage, numbers, s, t);
            unroll<n_tiles, 4>([&](int n, int i) { sum[0][n][i] += s[0][n][i], tsum[0][n][i] += t[0][n][i]; });
        }
    }
}

// Lays the sums of all warps side by side, and adds up rows or keys where these are summed.
__device__ __forceinline__ void store(const TangentParams& p, const Place& place, Acc* tile, const Scores& sum, void* to) {
    const i32 lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16 + lane / 4;
    __syncthreads();  // the tiles are free, or what was stored before has been read
    unroll<n_tiles, 4>([&](int n, int i) { tile[(row0 + i / 2 * 8) * cfg::block_n + 8 * n + lane % 4 * 2 + i % 2] = sum[0][n][i]; });
    __syncthreads();  // the sums are there
    constexpr int rows = cfg::sum_rows ? 1 : cfg::block_m, keys = cfg::sum_keys ? 1 : cfg::block_n;
    const i64 all_rows = cfg::sum_rows ? 1 : p.n_queries, all_keys = cfg::sum_keys ? 1 : p.n_keys;
    for (int index = threadIdx.x; index < rows * keys; index += threads) {
        const int row = index / keys, key = index % keys;
        Acc x = 0;
        for (int r = row; r < (cfg::sum_rows ? cfg::block_m : row + 1); ++r)
            for (int c = key; c < (cfg::sum_keys ? cfg::block_n : key + 1); ++c) x += tile[r * cfg::block_n + c];
        const i64 to_row = cfg::sum_rows ? 0 : i64(place.row_begin) * cfg::block_m + row;
        const i64 to_key = cfg::sum_keys ? 0 : i64(place.key_begin) * cfg::block_n + key;
        if (to_row >= all_rows || to_key >= all_keys) continue;
        static_cast<Stat*>(to)[((i64(place.split) * p.bias_instances + place.instance) * all_rows + to_row) * all_keys + to_key] = static_cast<Stat>(x);
    }
}

extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void backward_jvp_bias(const __grid_constant__ TangentParams p) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Head h;
    const u32 own = ptx::shared_address(memory), stage = own + OwnSide::bytes;
    const Place place(p);
    const i64 size = (cfg::sum_rows ? 1 : i64(p.n_queries)) * (cfg::sum_keys ? 1 : p.n_keys);
    Scores sum = {}, tsum = {};
    i32 member = 0;  // heads that read this bias are dealt out to the splits in turn
    for (i32 flat = 0; flat < p.batch * p.heads; ++flat) {
        if (slice_offset(p.dbias, batch_index(p, flat / p.heads), flat % p.heads) != place.instance * size) continue;
        if (member++ % p.splits == place.split) add_head(p, h, flat, place, own, stage, sum, tsum);
    }
    if constexpr (cfg::primal) store(p, place, reinterpret_cast<Acc*>(memory), sum, p.dbias_acc);
    store(p, place, reinterpret_cast<Acc*>(memory), tsum, p.tdbias_acc);
}
