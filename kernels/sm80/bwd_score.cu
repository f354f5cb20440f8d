// Gradients of the arrays that a score function reads (attn/score_sums.cuh): dS times weights, added up where scores share an index.
//
// S and dP are computed again (Algorithm 4 lines 11-15, 17-20) for one pair of tiles after another, which are added up in registers, element
// by element, as long as a block's pairs lie alike.  At the end the block adds the elements of each of its lines, or all of them.
//
// A slice of an array is summed in shared memory, where every cfg::sharers-th thread has sums of its own that so many take turns to add to.
//
// Walk            cfg::walk: the pairs of a key tile, of a row tile, or along a diagonal, all of one head; or one pair of all heads in turn
// Shared memory   sm80/bwd_pairs.cuh; slice [slice][threads / sharers]
// Grid            owners (tiles; diagonals, the longest first) * heads * batch
// Result          sums of lines and of heads, in a fixed order; elements of arrays without one, added up in memory
#include "attn/score_walk.cuh"
#include "ptx/global.cuh"
#include "sm80/bwd_pairs.cuh"

using Sums = Scores[weights];  // those of weights that are not summed are never touched
constexpr int copies = threads / cfg::sharers;  // of a slice

// Adds to an element of the slice; a warp's lanes together.
__device__ __forceinline__ void add_to_slice(Acc* slice, i32 number, Acc share) {
    Acc& sum = slice[number * copies + threadIdx.x / cfg::sharers];
    unroll<cfg::sharers>([&](int turn) {
        if (threadIdx.x % cfg::sharers == turn) sum += share;
        if constexpr (cfg::sharers > 1) __syncwarp();
    });
}

// Adds dS times the weights of one pair of tiles.
template <class Products>
__device__ __forceinline__ void add_weighted(Sums& sums, Acc* slice, Products& products, const TilePlace& at, const ScoreSumsParams& p, const Head& head) {
    Scores s, input, ds;
    find_p<true>(s, input, products, at, p, head);
    find_ds<false, true>(ds, s, input, products, at, {});
    for_places(p, head, at.row(), at.key(), [&](int m, int n, int i, const TracedHead& of_head, const TracedRow& row, const TracedKey& key) {
        const ScorePlace place = {p, of_head, row, key};
        Acc weight[weights];
        i64 offset[weights], number[weights];
        place.ask<traced::weights>(weight, input[m][n][i]);
        place.ask<traced::offsets>(offset);
        place.ask<traced::numbers>(number);
        unroll<weights>([&](int k) {
            const Acc share = ds[m][n][i] == 0 ? Acc(0) : ds[m][n][i] * weight[k];  // of a hidden score a weight may be anything
            if (is_summed(k)) sums[k][m][n][i] += share;
            if (shared_by(k) == kShareSlice) add_to_slice(slice, static_cast<i32>(number[k]), share);
            if (shared_by(k) == kShareElement && share != 0) ptx::red_add(static_cast<Acc*>(p.elements) + offset[k], share);
        });
    });
}

// Adds a head's pairs of tiles.
__device__ __forceinline__ void add_head(Sums& sums, Acc* slice, PairSpace space, const ScoreSumsParams& p, Head& head, const ScoreWalk& place) {
    for (i32 key_tile = place.key_begin; key_tile < place.key_end; ++key_tile) {
        i32 begin, end;
        place.rows(p, key_tile, begin, end);
        if (begin >= end) continue;
        visit_key_tile(space, p, head, key_tile, begin, end,
                       [&](auto& products, const TilePlace& at) { add_weighted(sums, slice, products, at, p, head); });
    }
}

// The sums of weight k to memory.  A head's total comes from those of its lines.
__device__ __forceinline__ void store_sums(Acc* tile, const ScoreSumsParams& p, const ScoreWalk& place, int k) {
    constexpr int keys = cfg::walk == kWalkKeys ? cfg::block_n : 0, rows = cfg::walk == kWalkRows ? cfg::block_m : 0;
    constexpr int lines = cfg::walk == kWalkDiagonals ? Diagonal::lines - 1 : keys + rows;
    constexpr int pitch = cfg::walk == kWalkDiagonals ? Diagonal::lines : lines;
    const bool of_head = shared_by(k) == kShareHead;
    const i64 heads = i64(p.batch) * p.heads, number = count_alike(k) * heads + place.flat;
    Acc* const to = static_cast<Acc*>(p.sums) + (of_head ? p.heads_at + number * p.owners + place.owner : number * p.lines + place.owner * pitch);
    __shared__ Acc totals[lines > 0 ? lines : 1];
    for (int x = threadIdx.x; x < lines; x += threads) {
        const Acc sum = line_sum(tile, sums_stride, x);
        if (of_head) totals[x] = sum;
        else if (place.owner * i64(pitch) + x < p.lines) to[x] = sum;
    }
    if (!of_head) return;
    __syncthreads();  // totals are complete
    if (threadIdx.x != 0) return;
    Acc sum = 0;
    for (int x = 0; x < lines; ++x) sum += totals[x];
    *to = sum;
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) backward_score(const __grid_constant__ ScoreSumsParams p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    const PairSpace space = {ptx::shared_address(memory)};
    const ScoreWalk place(p);
    Sums sums = {};
    Acc* const slice = reinterpret_cast<Acc*>(memory + p.histogram);
    for (i32 x = threadIdx.x; x < p.slice * copies; x += threads) slice[x] = 0;
    for (i32 flat = place.flat; flat < place.flat_end; ++flat) {
        __syncthreads();  // the last head is done with
        describe_head(head, p, flat / p.heads, flat % p.heads);
        __syncthreads();  // head is complete
        add_head(sums, slice, space, p, head, place);
    }
    Acc* const tile = reinterpret_cast<Acc*>(memory);
    unroll<weights>([&](int k) {
        if (!is_summed(k)) return;
        __syncthreads();  // all tiles are done with
        if (threadIdx.x / 32 < scores_warps) save_sums(tile, sums[k]);
        __syncthreads();  // the sums are complete
        store_sums(tile, p, place, k);
    });
    __syncthreads();  // the slice is complete
    Acc* const to = static_cast<Acc*>(p.sums) + p.slices_at + (i64(place.flat) * p.owners + place.owner) * p.slice;
    for (i32 x = threadIdx.x; x < p.slice; x += threads) {
        Acc sum = 0;
        for (int copy = 0; copy < copies; ++copy) sum += slice[x * copies + copy];
        to[x] = sum;
    }
}
