// Copies, converts and adds rows of arrays: out = a, or a + b, rounded once.
//
// Elements of a row are neighbours, in packs of cfg::width; arrays differ in where rows begin.  out may be a or b.
// Grid: packs of a row, kPacks to a thread, and rows (a block takes every gridDim.y-th).
#include "attn/math.cuh"
#include "attn/pack.cuh"
#include "ptx/types.cuh"

constexpr int kThreads = 256;
constexpr int kPacks = 4;  // of a thread, all of which are loaded before the first is stored

// Mirrored by ADD_PARAMS in cuattn/cuda/params.py.
struct AddParams {
    const cfg::part *a, *b;
    cfg::out* out;
    i64 a_row, b_row, out_row;  // elements from row to row
    i64 rows, packs;            // packs of a row
};

template <class T>
__device__ __forceinline__ Pack<T, cfg::width> load(const T* row, i64 pack) {
    return reinterpret_cast<const Pack<T, cfg::width>*>(row)[pack];
}

extern "C" __global__ void __launch_bounds__(kThreads) add(const __grid_constant__ AddParams p) {
    const i64 first = blockIdx.x * i64(kThreads * kPacks) + threadIdx.x;
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        Pack<cfg::part, cfg::width> a[kPacks], b[kPacks];
#pragma unroll
        for (int n = 0; n < kPacks; ++n) {
            const i64 pack = first + n * kThreads;
            if (pack >= p.packs) continue;
            a[n] = load(p.a + row * p.a_row, pack);
            if constexpr (cfg::adds) b[n] = load(p.b + row * p.b_row, pack);
        }
#pragma unroll
        for (int n = 0; n < kPacks; ++n) {
            const i64 pack = first + n * kThreads;
            if (pack >= p.packs) continue;
            Pack<cfg::out, cfg::width> sum;
#pragma unroll
            for (int i = 0; i < cfg::width; ++i) {
                if constexpr (cfg::adds) sum.x[i] = round_to<cfg::out>(to_acc(a[n].x[i]) + to_acc(b[n].x[i]));
                else sum.x[i] = round_to<cfg::out>(to_acc(a[n].x[i]));
            }
            reinterpret_cast<Pack<cfg::out, cfg::width>*>(p.out + row * p.out_row)[pack] = sum;
        }
    }
}
