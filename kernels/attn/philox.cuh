// Dropout's random bits, one Philox4x32-7 call per lane and 16 x 16 block (the contract is in cuattn/rng.py).
#pragma once
#include "attn/place.cuh"
#include "ptx/registers.cuh"

// The part of the counter that does not change within a kernel.
struct RandomStream {
    u32 batch, offset;
};

__device__ __forceinline__ u32 random_batch(const Dropout& dropout, i32 ib, i32 head) {
    return (dropout.batch + ib) * dropout.heads + dropout.head + head;
}

__device__ __forceinline__ u32 random_offset(const Dropout& dropout) {
    return dropout.offset_data != nullptr ? *dropout.offset_data : dropout.offset;
}

__device__ __forceinline__ RandomStream random_stream(const Dropout& dropout, i32 ib, i32 head) {
    return {random_batch(dropout, ib, head), random_offset(dropout)};
}

constexpr u32 kPhilox0 = 0xD2511F53, kPhilox2 = 0xCD9E8D57;  // multipliers of counter words 0 and 2

__device__ __forceinline__ u32 high_word(u64 product) { return static_cast<u32>(product >> 32); }

// From round `first` on.
template <int first>
__device__ __forceinline__ void philox(u32 (&x)[4], const u32 (&keys)[7][2]) {
#pragma unroll
    for (int round = first; round < 7; ++round) {
        const u64 product0 = static_cast<u64>(x[0]) * kPhilox0, product2 = static_cast<u64>(x[2]) * kPhilox2;
        x[0] = high_word(product2) ^ x[1] ^ keys[round][0];
        x[2] = high_word(product0) ^ x[3] ^ keys[round][1];
        x[1] = static_cast<u32>(product2);
        x[3] = static_cast<u32>(product0);
    }
}

// Draws of the eight elements {row, row + 8} x {key, key + 1, key + 8, key + 9}, rows and keys counted from the operands' first:
// bit 3 of row, and bits 0 and 3 of key, are clear.  Word w masks register a[w] of the m16k16 fragment, low half = even key.
__device__ __forceinline__ void random_words(u32 (&words)[4], const Params& p, const RandomStream& stream, i32 row, i32 key) {
    words[0] = global_key(p, key);
    words[1] = global_row(p, row);
    words[2] = stream.batch;
    words[3] = stream.offset;
    philox<0>(words, p.dropout.keys);
}

// random_words in steps, for many rows and keys of the whole problem: until round 1, where a row and a key meet, each goes alone.
//
// What a stream and the round keys add on the way: to a row and to a key's product in round 0, to the key's next in round 1.
struct StreamWords {
    u32 row, key, next;
};

__device__ __forceinline__ StreamWords stream_words(const Dropout& dropout, const RandomStream& stream) {
    const u64 product = static_cast<u64>(stream.batch) * kPhilox2;
    return {high_word(product) ^ dropout.keys[0][0], stream.offset ^ dropout.keys[0][1], static_cast<u32>(product) ^ dropout.keys[1][0]};
}

// What the first rounds make of a key alone: low halves of the products of rounds 0 and 1, and the product of round 2.
struct KeyProducts {
    u32 first_low, second_low;
    u64 third;
};

__device__ __forceinline__ KeyProducts key_products(const StreamWords& stream, u32 key) {
    const u64 first = static_cast<u64>(key) * kPhilox0;
    const u64 second = static_cast<u64>(high_word(first) ^ stream.key) * kPhilox2;
    const u64 third = static_cast<u64>(high_word(second) ^ stream.next) * kPhilox0;
    return {static_cast<u32>(first), static_cast<u32>(second), third};
}

// mixed_row: row ^ stream.row.
__device__ __forceinline__ void random_words(u32 (&words)[4], const Dropout& dropout, u32 mixed_row, const KeyProducts& key) {
    const u64 row = static_cast<u64>(mixed_row) * kPhilox0;
    const u64 product = static_cast<u64>(high_word(row) ^ key.first_low ^ dropout.keys[1][1]) * kPhilox2;
    words[0] = high_word(product) ^ key.second_low ^ dropout.keys[2][0];
    words[1] = static_cast<u32>(product);
    words[2] = high_word(key.third) ^ static_cast<u32>(row) ^ dropout.keys[2][1];
    words[3] = static_cast<u32>(key.third);
    philox<3>(words, dropout.keys);
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

// Threshold in every half whose draw is kept, threshold - 1 in the others.
template <u32 threshold>
__device__ __forceinline__ u32 clamp_draws(u32 word) {
    return ptx::max_u16x2(ptx::min_u16x2(word, 0x00010001 * threshold), 0x00010001 * (threshold - 1));
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
