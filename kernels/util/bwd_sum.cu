// Sums of an array of accumulators over some of its axes, rounded once: gradients of operands that were broadcast.
//
// in: C-contiguous, size[0] x ... x size[4] x inner.  out: the same without the axes whose keep[] is 0, elements of cfg::grad.
// Grid: any; each thread adds up whole results, in index order.
#include "attn/math.cuh"
#include "ptx/types.cuh"

constexpr int kAxes = 5;

struct SumParams {
    const cfg::acc* in;
    cfg::grad* out;
    i64 inner, results;  // results: elements of out
    i32 size[kAxes];
    i32 keep[kAxes];
};

extern "C" __global__ void __launch_bounds__(256) backward_sum(const __grid_constant__ SumParams p) {
    i64 stride[kAxes], step = p.inner, along = 0;  // along the last axis that goes, whose elements are asked for together
    i32 others = 1, count = 1;
    int last = -1;
#pragma unroll
    for (int axis = kAxes - 1; axis >= 0; --axis) {
        stride[axis] = step;
        step *= p.size[axis];
        if (p.keep[axis] || p.size[axis] == 1) continue;
        if (last < 0) last = axis, count = p.size[axis], along = stride[axis];
        else others *= p.size[axis];
    }
    for (i64 at = blockIdx.x * i64(blockDim.x) + threadIdx.x; at < p.results; at += i64(gridDim.x) * blockDim.x) {
        i64 base = at, rest = 0;  // divisions take longer than all else
        if (p.results != p.inner) base = at % p.inner, rest = at / p.inner;
#pragma unroll
        for (int axis = kAxes - 1; axis >= 0; --axis)
            if (p.keep[axis] && p.size[axis] > 1) base += rest % p.size[axis] * stride[axis], rest /= p.size[axis];
        cfg::acc sum = 0;
        for (i32 other = 0; other < others; ++other) {
            const cfg::acc* from = p.in + base;
            i32 index = other;
#pragma unroll
            for (int axis = kAxes - 1; axis >= 0; --axis)
                if (!p.keep[axis] && p.size[axis] > 1 && axis != last) from += index % p.size[axis] * stride[axis], index /= p.size[axis];
#pragma unroll 8
            for (i32 term = 0; term < count; ++term) sum += from[term * along];
        }
        p.out[at] = round_to<cfg::grad>(sum);
    }
}
