// Dropout's random bits, one Philox4x32-7 call per lane and 16 x 16 block (the contract is in cuattn/rng.py).
#pragma once
#include "attn/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/simd.cuh"

// The part of the counter that does not change within a kernel.
struct RandomStream {
    u32 batch, offset;
};

__device__ __forceinline__ RandomStream random_stream(const Dropout& dropout, i32 ib, i32 head) {
    const u32 offset = dropout.offset_data != nullptr ? *dropout.offset_data : dropout.offset;
    return {(dropout.batch + ib) * dropout.heads + dropout.head + head, offset};
}

__device__ __forceinline__ void philox(u32 (&x)[4], const u32 (&keys)[7][2]) {
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const u64 product0 = static_cast<u64>(x[0]) * 0xD2511F53u, product2 = static_cast<u64>(x[2]) * 0xCD9E8D57u;
        x[0] = static_cast<u32>(product2 >> 32) ^ x[1] ^ keys[round][0];
        x[2] = static_cast<u32>(product0 >> 32) ^ x[3] ^ keys[round][1];
        x[1] = static_cast<u32>(product2);
        x[3] = static_cast<u32>(product0);
    }
}

// Draws of the eight elements {row, row + 8} x {key, key + 1, key + 8, key + 9}, rows and keys counted from the operands' first:
// bit 3 of row, and bits 0 and 3 of key, are clear.  Word w masks register a[w] of the m16k16 fragment, low half = even key.
__device__ __forceinline__ void random_words(u32 (&words)[4], const Dropout& dropout, const RandomStream& stream, i32 row, i32 key) {
    words[0] = dropout.key + static_cast<u32>(key);
    words[1] = dropout.row + static_cast<u32>(row);
    words[2] = stream.batch;
    words[3] = stream.offset;
    philox(words, dropout.keys);
}

template <u32 threshold>
__device__ __forceinline__ bool kept_low(u32 word) { return (word << 16) >= (threshold << 16); }
template <u32 threshold>
__device__ __forceinline__ bool kept_high(u32 word) { return word >= (threshold << 16); }

#if __CUDA_ARCH__ >= 900
// All bits of the halves that lie under a limit.
template <u32 limit>
__device__ __forceinline__ u32 halves_under(u32 word) {
    static_assert(limit <= 32768);
    // min(half, limit) - limit is negative for such a half and else 0, in 16 bits.
    constexpr u32 both = limit | limit << 16, minus = (65536 - limit) | (65536 - limit) << 16;
    return ptx::max_s16x2(ptx::add_s16x2(ptx::min_u16x2(word, both), minus), 0xffffffffu);
}

// 1 in every half whose draw is kept.
template <u32 threshold>
__device__ __forceinline__ u32 kept_ones(u32 word) {
    constexpr u32 minus = 0x00010001 * ((65537 - threshold) % 65536);
    if constexpr (threshold <= 32768) {
        // min(half, threshold) - (threshold - 1) is 1 for such a half and else at most 0, in 16 bits.
        constexpr u32 both = 0x00010001 * threshold;
        return ptx::max_s16x2(ptx::add_s16x2(ptx::min_u16x2(word, both), minus), 0);
    } else {
        // max(half, threshold - 1) - (threshold - 1) is at least 1, and no more than 32767, or else 0.
        constexpr u32 both = 0x00010001 * (threshold - 1);
        return ptx::min_s16x2(ptx::add_s16x2(ptx::max_u16x2(word, both), minus), 0x00010001);
    }
}
#endif

// Zeroes the halves of a packed pair whose draws lie under the threshold.
template <u32 threshold>
__device__ __forceinline__ u32 drop_pair(u32 pair, u32 word) {
#if __CUDA_ARCH__ >= 900
    if constexpr (threshold <= 32768)
        return pair & ~halves_under<threshold>(word);
    else
        return pair & halves_under<65536 - threshold>(~word);
#else
    const u32 low = kept_low<threshold>(word) ? pair & 0xffffu : 0u;
    return (kept_high<threshold>(word) ? pair & 0xffff0000u : 0u) | low;
#endif
}

// Zeroes what is dropped of a fragment of p.
template <u32 threshold>
__device__ __forceinline__ void drop_fragment(u32 (&a)[4], const u32 (&words)[4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) a[w] = drop_pair<threshold>(a[w], words[w]);
}
template <u32 threshold>
__device__ __forceinline__ void drop_fragment(double (&a)[8], const u32 (&words)[4]) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        if (!kept_low<threshold>(words[w])) a[2 * w] = 0;
        if (!kept_high<threshold>(words[w])) a[2 * w + 1] = 0;
    }
}
