// Which tiles of keys a warp's rows may leave out, for pairwise/near.cu: pairwise_boxes has the range of each tile, pairwise_floors a bound for each warp,
// such that all terms of tiles below it are less than 2^-25 of every row's sum.
#include "pairwise/near.cuh"

using namespace pairwise;

constexpr int kThreads = 128;

// A warp has a tile.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_boxes(const __grid_constant__ NearParams p) {
    const i32 tile = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (tile >= p.tiles) return;
    const i64 at = static_cast<i64>(blockIdx.z) * p.tiles + tile;
    float most[4], least[4];
    unroll<4>([&](int c) { most[c] = least[c] = -infinity<float>(); });
    unroll<kFew / 32>([&](int n) {
        const float4 key = p.keys[at * kFew + 32 * n + threadIdx.x % 32];
        const float of[4] = {key.x, key.y, key.z, key.w};
        unroll<4>([&](int c) {
            if (c < 3 && key.w == kHidden) return;  // hidden
            most[c] = ptx::max_nan(most[c], of[c]);
            least[c] = ptx::max_nan(least[c], -of[c]);
        });
    });
    unroll<4>([&](int c) {
        most[c] = warp_max(most[c]);
        least[c] = -warp_max(least[c]);
    });
    if (threadIdx.x % 32 == 0) p.boxes[at] = {{least[0], least[1], least[2]}, least[3], {most[0], most[1], most[2]}, most[3]};
}

// A warp stands for one of pairwise_near's.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_floors(const __grid_constant__ NearParams p) {
    const i32 own = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
    if (own >= p.of_warps) return;
    const Box* boxes = p.boxes + static_cast<i64>(blockIdx.z) * p.tiles;
    const float factor = factor_of(p);
    float least[3], most[3];
    range_of_rows(p.rows + static_cast<i64>(blockIdx.z) * p.n_rows, own * 16 * kTiles, p.n_rows, least, most);
    // What every row's sum is at least: its greatest term, and terms of whole tiles.
    float best = kHidden, greatest = kHidden;
    for (i32 tile = threadIdx.x % 32; tile < p.tiles; tile += 32) {
        best = fmaxf(best, fmaf(between<true>(least, most, boxes[tile]), -factor, boxes[tile].most_log));
        greatest = ptx::max_nan(greatest, boxes[tile].most_log);
    }
    best = warp_max(best);
    const bool unknown = isnan(warp_max(greatest));
    float sum = 0;
    for (i32 tile = threadIdx.x % 32; tile < p.tiles; tile += 32) sum += ptx::ex2(fmaf(between<true>(least, most, boxes[tile]), -factor, boxes[tile].least_log) - best);
    unroll<5>([&](int n) { sum += __shfl_xor_sync(~0u, sum, 1 << n); });
    best = fmaxf(best, best + 6.f + ptx::lg2(sum));  // 64 keys each
    // The terms left out with several bounds.
    constexpr int kBounds = 5;
    constexpr float kLeast = 28.f, kStep = 4.f, kLost = 25.f;
    float lost[kBounds] = {};
    for (i32 tile = threadIdx.x % 32; tile < p.tiles; tile += 32) {
        const float bound = fmaf(between<false>(least, most, boxes[tile]), -factor, boxes[tile].most_log) - best, terms = ptx::ex2(bound + kLost + 6.f);
        unroll<kBounds>([&](int n) { lost[n] += bound < -(kLeast + kStep * n) ? terms : 0.f; });
    }
    float floor = fmaxf(kLeast + kStep * kBounds, kLost + 6.f + ptx::lg2(p.tiles));  // of so many keys none matters
    unroll<kBounds>([&](int n) {
        float all = lost[kBounds - 1 - n];
        unroll<5>([&](int step) { all += __shfl_xor_sync(~0u, all, 1 << step); });
        if (all < 1.f) floor = kLeast + kStep * (kBounds - 1 - n);
    });
    if (threadIdx.x % 32 == 0) {
        float* floors = p.floors + 2 * (static_cast<i64>(blockIdx.z) * p.of_warps + own);
        floors[0] = unknown ? nanf("") : best;
        floors[1] = unknown ? infinity<float>() : best - floor;  // no tile is needed
    }
}
