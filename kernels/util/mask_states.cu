// States of tiles of a mask function: what rows and keys decide alone is computed for each of them and bounded in each tile; the rest is
// bounded by these (attn/bounds.cuh).
//
// mask_values: grid instances x (row tiles + key tiles, fastest), in one axis; a warp each.  values: [instance] of row tiles' intervals
//              [row_tiles][row_count], then of key tiles' [key_tiles][key_count].
// mask_states: a thread for 4 x 4 tiles of an instance, to p.rough or, if that is null, p.states.  There, beside a boolean mask, whose states
//              are there, the lower state holds.
#include "attn/bounds.cuh"
#include "util/mask_params.cuh"

using traced::bounds::Interval;
namespace function = traced::mask;

constexpr int kThreads = 128;

struct Numbers {
    i32 b, h;

    // Of an instance of all masks together.
    __device__ __forceinline__ static Numbers of(const MaskParams& p, i32 instance) {
        const i32 matrix = static_cast<i32>(source_offset(p, p.function, instance)), outer = quotient(matrix, p.matrices.heads);
        return {p.matrices.first_b + outer, p.matrices.first_h + matrix - outer * p.matrices.heads};
    }
};

// Where the intervals of an instance's row tiles begin, and behind them those of its key tiles.
__device__ __forceinline__ Interval* intervals_of(const MaskParams& p, i32 instance) {
    const i64 size = static_cast<i64>(p.row_tiles) * function::row_count + static_cast<i64>(p.key_tiles) * function::key_count;
    return static_cast<Interval*>(p.values) + instance * size;
}

// Joins the intervals of a warp's lanes.
__device__ __forceinline__ Interval joined_in_warp(Interval x) {
    for (int lane = 16; lane > 0; lane /= 2) {
        const Interval other{__shfl_xor_sync(~0u, x.lo, lane), __shfl_xor_sync(~0u, x.hi, lane), __shfl_xor_sync(~0u, static_cast<int>(x.nan), lane) != 0};
        x = traced::bounds::joined(x, other);
    }
    return x;
}

// Bounds `count` values of the indices in [first, end); compute(index, values) makes them.  Lanes beyond the last repeat it.
template <int count, class Compute>
__device__ __forceinline__ void bound_tile(Interval* to, const i32* indices, i32 first, i32 end, const Compute& compute) {
    if constexpr (count > 0) {
        Interval found[count];
        for (i32 place = first; place < end; place += 32) {
            double values[count];
            compute(__ldg(indices + min(place + static_cast<i32>(threadIdx.x % 32), end - 1)), values);
#pragma unroll
            for (int i = 0; i < count; ++i) {
                const Interval own = traced::bounds::point(values[i]);
                found[i] = place == first ? own : traced::bounds::joined(found[i], own);
            }
        }
#pragma unroll
        for (int i = 0; i < count; ++i) {
            const Interval all = joined_in_warp(found[i]);
            if (threadIdx.x % 32 == 0) to[i] = all;
        }
    }
}

extern "C" __global__ __launch_bounds__(kThreads) void mask_values(const __grid_constant__ MaskParams p) {
    const i64 warp = static_cast<i64>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32, tiles = p.row_tiles + p.key_tiles;
    const i32 instance = static_cast<i32>(warp / tiles), tile = static_cast<i32>(warp % tiles), n = tile - p.row_tiles;
    if (instance >= p.instances) return;
    const Numbers at = Numbers::of(p, instance);
    const i32* indices = static_cast<const i32*>(p.function.data);
    Interval* to = intervals_of(p, instance);
    if (n < 0) {
        const i32 first = tile * cfg::block_m;
        bound_tile<function::row_count>(to + static_cast<i64>(tile) * function::row_count, indices, first, min(first + cfg::block_m, p.n_queries),
                                        [&](i32 i, double* values) { function::row_values(p, at.b, at.h, i, values); });
    } else {
        const i32 first = n * cfg::block_n;
        bound_tile<function::key_count>(to + static_cast<i64>(p.row_tiles) * function::row_count + static_cast<i64>(n) * function::key_count, indices + p.n_queries,
                                        first, min(first + cfg::block_n, p.n_keys), [&](i32 j, double* values) { function::key_values(p, at.b, at.h, j, values); });
    }
}

extern "C" __global__ __launch_bounds__(kThreads) void mask_states(const __grid_constant__ MaskParams p) {
    const i64 thread = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
    const i32 instance = static_cast<i32>(thread / p.states_instance), columns = (p.key_tiles + 3) / 4;
    if (instance >= p.instances) return;
    const i32 word = static_cast<i32>(thread % p.states_instance), first_m = word / columns * 4, first_n = word % columns * 4;
    const Numbers at = Numbers::of(p, instance);
    const Interval *rows = intervals_of(p, instance), *keys = rows + static_cast<i64>(p.row_tiles) * function::row_count;
    u32 states = 0;
#pragma unroll 1
    for (i32 tile = 0; tile < 16; ++tile) {
        const i32 m = first_m + tile / 4, n = first_n + tile % 4;
        if (m >= p.row_tiles || n >= p.key_tiles) continue;
        const auto truth = function::visible_in(p, at.b, at.h, rows + static_cast<i64>(m) * function::row_count, keys + static_cast<i64>(n) * function::key_count);
        states |= ((truth.hi ? kSomeSeen : 0) | (truth.lo ? 0 : kSomeHidden)) << state_shift(m, n);
    }
    u32& to = (p.rough != nullptr ? p.rough : p.states)[instance * p.states_instance + word];
    if (boolean_mask && p.rough == nullptr) {
        constexpr u32 seen = 0x55555555 * kSomeSeen, hidden = 0x55555555 * kSomeHidden;
        states = (states & to & seen) | ((states | to) & hidden);
    }
    to = states;
}
