// Points with at most three coordinates for pairwise/near.cu: where each lies on Hilbert's curve, and the points in an order, with something beside each.
#include "attn/math.cuh"

// Mirrored by ORDER in cuattn/pairwise/near.py.
struct OrderParams {
    const float *points, *least, *most;  // (batch, count, cfg::dim), and each coordinate's range, (batch, cfg::dim)
    const i64* order;                    // (batch, count), or null
    const cfg::log* logs;                // (batch, count), natural: beside each; null: its place
    u64* codes;                          // (batch, count)
    float4* packed;                      // (batch, padded)
    i32 count, padded;
};

constexpr int kThreads = 128, kDim = cfg::dim, kBits = 16;
constexpr float kHidden = -1e30f;

// Skilling's transposed form (AIP Conf. Proc. 707, 2004), whose bits in turn are the place on the curve.
extern "C" __global__ __launch_bounds__(kThreads) void pairwise_codes(const __grid_constant__ OrderParams p) {
    const i32 index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= p.count) return;
    const i64 at = static_cast<i64>(blockIdx.z) * p.count + index;
    const float *least = p.least + blockIdx.z * kDim, *most = p.most + blockIdx.z * kDim;
    float extent = 0;
    unroll<kDim>([&](int c) { extent = fmaxf(extent, most[c] - least[c]); });
    u32 x[kDim];
    unroll<kDim>([&](int c) { x[c] = min(static_cast<u32>((p.points[at * kDim + c] - least[c]) / extent * (1 << kBits)), (1u << kBits) - 1); });
#pragma unroll
    for (u32 bit = 1u << (kBits - 1); bit > 1; bit >>= 1) {
        unroll<kDim>([&](int c) {
            const u32 exchanged = (x[0] ^ x[c]) & (bit - 1);
            if (x[c] & bit) x[0] ^= bit - 1;
            else {
                x[0] ^= exchanged;
                x[c] ^= exchanged;
            }
        });
    }
    unroll<kDim - 1>([&](int c) { x[c + 1] ^= x[c]; });
    u32 turned = 0;
#pragma unroll
    for (u32 bit = 1u << (kBits - 1); bit > 1; bit >>= 1) turned ^= x[kDim - 1] & bit ? bit - 1 : 0;
    u64 code = 0;
#pragma unroll
    for (int bit = kBits - 1; bit >= 0; --bit) unroll<kDim>([&](int c) { code = 2 * code + ((x[c] ^ turned) >> bit & 1); });
    p.codes[at] = code;
}

extern "C" __global__ __launch_bounds__(kThreads) void pairwise_pack(const __grid_constant__ OrderParams p) {
    const i32 index = blockIdx.x * kThreads + threadIdx.x;
    if (index >= p.padded) return;
    const i64 batch = static_cast<i64>(blockIdx.z) * p.count;
    float4 packed = {0, 0, 0, kHidden};
    if (index < p.count) {
        const i32 own = p.order == nullptr ? index : static_cast<i32>(p.order[batch + index]);
        const float* point = p.points + (batch + own) * kDim;
        packed.x = point[0];
        if constexpr (kDim > 1) packed.y = point[1];
        if constexpr (kDim > 2) packed.z = point[2];
        if (p.logs == nullptr) packed.w = __int_as_float(own);
        else if (isnan(packed.x) || isnan(packed.y) || isnan(packed.z)) packed.w = nanf("");
        else packed.w = ptx::max_nan(ptx::min_nan(static_cast<float>(kLog2e * static_cast<double>(p.logs[batch + own])), -kHidden), kHidden);
    }
    p.packed[static_cast<i64>(blockIdx.z) * p.padded + index] = packed;
}
