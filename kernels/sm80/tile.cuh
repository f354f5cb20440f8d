// Tiles in shared memory: rows of `row_bytes`, 16-byte chunks XOR-swizzled so that 8 rows of one chunk column lie in
// different banks (what ldmatrix and the copies want).
#pragma once
#include "ptx/shared.cuh"

// Byte offset of a chunk.  Rows that are an odd multiple of 64 bytes alternate between two bank halves by themselves.  Doubles are read by pairs
// of chunks, from rows r .. r + 3 of one product and rows r, r + 2, r + 4, r + 6 of the other.  The pairs are exchanged so that both fall into
// different banks.
template <int row_bytes, bool doubles = false>
__device__ __forceinline__ u32 swizzle(u32 row, u32 chunk) {
    static_assert(row_bytes % (doubles ? 128 : 64) == 0, "tile rows are multiples of 64 bytes, of doubles 128");
    const u32 key = doubles ? ((row + (row >> 2 & 1)) & 3) << 1 : row_bytes % 128 == 0 ? row & 7 : (row >> 1) & 3;
    return row * row_bytes + ((chunk ^ key) << 4);
}

// The address pattern of one lane through a tile: a row of its own, and groups of step_bytes (32: chunk pairs) in order.
// offset(step) = swizzle(row, step_bytes / 16 * step + chunk); rows 16 further down are at + 16 * row_bytes.
template <int row_bytes, int step_bytes = 32, bool doubles = false>
struct LaneRow {
    u32 base, key;

    __device__ __forceinline__ LaneRow(u32 row, u32 chunk) {
        const u32 first = swizzle<row_bytes, doubles>(row, chunk);
        key = first & (row_bytes % 128 == 0 ? 0x70 : 0x30);
        base = first - key;
    }
    __device__ __forceinline__ u32 offset(int step) const {
        constexpr u32 low = row_bytes % 128 == 0 ? 0x7f : 0x3f;
        return base + ((step * step_bytes) & ~low) + (((step * step_bytes) & low) ^ key);
    }
};

// Copies 16 bytes of a row, of which `valid` bytes exist; the rest becomes zero.  `load_bytes` is what the alignment allows.
template <int load_bytes>
__device__ __forceinline__ void copy_chunk(u32 dst, const u8* src, i32 valid) {
    if constexpr (load_bytes >= 4) {
#pragma unroll
        for (int at = 0; at < 16; at += load_bytes) {
            const i32 left = valid - at;
            const i32 bytes = left < 0 ? 0 : (left < load_bytes ? left : load_bytes);
            ptx::cp_async<load_bytes>(dst + at, bytes > 0 ? src + at : src, bytes);
        }
    } else {
        u32 word[4] = {0, 0, 0, 0};
#pragma unroll
        for (int at = 0; at < 16; at += 2) {
            if (at < valid) word[at / 4] |= static_cast<u32>(*reinterpret_cast<const u16*>(src + at)) << (8 * (at % 4));
        }
        ptx::store_shared_v4(dst, word[0], word[1], word[2], word[3]);
    }
}

// Bytes of a 16-byte chunk that exist when a row has n_cols <= cols elements.
template <class Elem, int cols>
__device__ __forceinline__ i32 chunk_bytes(int chunk, i32 n_cols) {
    if (n_cols >= cols) return 16;
    const i32 bytes = n_cols * static_cast<i32>(sizeof(Elem)) - chunk * 16;
    return bytes < 0 ? 0 : (bytes < 16 ? bytes : 16);
}

// Long loops of copies hold too many addresses when they are unrolled altogether, and so do kernels for doubles.
constexpr int unrolled_steps(int steps, int element_bytes) {
    if (element_bytes == 4) return steps <= 8 ? steps : 2;
    return steps <= 16 && element_bytes < 8 ? steps : 8;
}

// Copies a tile of `rows` x `cols` elements, `threads` threads together, of which this is number `thread`.  source(row) is the row's first element, or null for a row of
// zeros; `any` is an address that may be named (not read) instead.  n_cols <= cols columns exist.
template <class Elem, int rows, int cols, int threads, int load_bytes, class Source>
__device__ __forceinline__ void gather_tile(u32 shared, const Elem* any, i32 n_cols, const Source& source, u32 thread) {
    constexpr int chunks = cols * sizeof(Elem) / 16, total = rows * chunks, steps = (total + threads - 1) / threads;
    constexpr int unrolled = unrolled_steps(steps, sizeof(Elem));
#pragma unroll unrolled
    for (int step = 0; step < steps; ++step) {
        const int index = thread + step * threads;
        if (total % threads != 0 && index >= total) break;
        const int row = index / chunks, chunk = index % chunks;
        const Elem* from = source(row);
        const i32 valid = from == nullptr ? 0 : chunk_bytes<Elem, cols>(chunk, n_cols);
        const u8* bytes = valid > 0 ? reinterpret_cast<const u8*>(from) + chunk * 16 : reinterpret_cast<const u8*>(any);
        copy_chunk<load_bytes>(shared + swizzle<cols * sizeof(Elem), sizeof(Elem) == 8>(row, chunk), bytes, valid);
    }
}

// The same for rows at a fixed stride (elements) from `from`, without holding an address per row; live(row) says which exist.
template <class Elem, int rows, int cols, int threads, int load_bytes, class Live>
__device__ __forceinline__ void load_tile(u32 shared, const Elem* from, i64 stride, i32 n_cols, const Live& live, u32 thread) {
    constexpr int chunks = cols * sizeof(Elem) / 16;
    if constexpr (threads % chunks == 0 && rows % (threads / chunks) == 0) {
        constexpr int rows_per_step = threads / chunks;
        const int row = thread / chunks, chunk = thread % chunks;
        const i32 whole = chunk_bytes<Elem, cols>(chunk, n_cols);
        const u8* bytes = reinterpret_cast<const u8*>(from + row * stride) + chunk * 16;
        const i64 advance = stride * static_cast<i64>(rows_per_step * sizeof(Elem));
        constexpr int steps = rows / rows_per_step, unrolled = unrolled_steps(steps, sizeof(Elem));
#pragma unroll unrolled
        for (int step = 0; step < steps; ++step) {
            const int at = row + step * rows_per_step;
            copy_chunk<load_bytes>(shared + swizzle<cols * sizeof(Elem), sizeof(Elem) == 8>(at, chunk), bytes, live(at) ? whole : 0);
            bytes += advance;
        }
    } else {
        gather_tile<Elem, rows, cols, threads, load_bytes>(shared, from, n_cols, [&](i32 row) { return live(row) ? from + row * stride : nullptr; }, thread);
    }
}
