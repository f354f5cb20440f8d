// Adds up, for every element of an array that a score function reads, what a kernel before has summed: of one weight, in a fixed order.
//
//   result[e] = elements[e] + scale sum of the sums (of heads, rows, keys, diagonals) whose index is e
//
// Each block owns some elements and goes through the indices of all heads that may read them; its warps share the lines, and each has sums of its
// own.  Heads that an index does not depend on (not cfg::by_batch, not cfg::by_head) have their sums added up first; where only the first element
// that a head reads does (cfg::alike), an index is computed once for all of them.
//
// Shared memory   sums [warps][owned]
// Blocks          elements / owned, the first of a grid
#pragma once
#include "attn/score_sums.cuh"

using Acc = cfg::acc;

constexpr int weights = cfg::weights;
using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;
constexpr bool of_lines = cfg::gathers == kShareLine, of_slices = cfg::gathers == kShareSlice, of_diagonals = of_lines && cfg::walk == kWalkDiagonals;

// The row and the key of a line, counted from the operands' first; or a line that does not exist.  The number of a slice's element is their sum.
struct Line {
    i32 row = 0, key = 0;
    bool exists = true;

    __device__ __forceinline__ Line(const ScoreSumsParams& p, i32 line) {
        if constexpr (of_diagonals) {
            const i32 owner = line / Diagonal::lines, x = line - owner * Diagonal::lines;
            const i32 difference = Diagonal::difference(Diagonal::corner(owner, p.key_tiles), x);
            row = max(difference, 0), key = max(-difference, 0);
            exists = x < Diagonal::lines - 1 && row < p.n_queries && key < p.n_keys;
        } else if constexpr (of_lines) {
            (cfg::walk == kWalkRows ? row : key) = line;
        } else if constexpr (of_slices) {
            row = min(line, p.n_queries - 1), key = line - row;
        }
    }
};

// What functions know of a line's row and key; those of a slice's element are not the problem's.
__device__ __forceinline__ TracedRow row_of(const Params& p, const TracedHead& head, const Line& line) {
    if constexpr (of_slices) return {line.row, traced::row(p, head.made, head.b, head.h, line.row)};
    return TracedRow::of(p, head, line.row);
}
__device__ __forceinline__ TracedKey key_of(const Params& p, const TracedHead& head, const Line& line) {
    if constexpr (of_slices) return {line.key, traced::key(p, head.made, head.b, head.h, line.key)};
    return TracedKey::of(p, head, line.key);
}

// The sum of a line, over the blocks that have a part of it, and over the heads that share its index: those with the same b or the same h,
// where the index depends on them.
__device__ __forceinline__ Acc sum_of_line(const ScoreSumsParams& p, i32 ib, i32 head, i32 line) {
    const Acc* from = static_cast<const Acc*>(p.sums) + p.first + line;
    Acc sum = 0;
    for (i32 b = ib; b < (cfg::by_batch ? ib + 1 : p.batch); ++b)
        for (i32 h = head; h < (cfg::by_head ? head + 1 : p.heads); ++h)
            for (i32 owner = 0; owner < p.owners; ++owner) sum += from[((i64(b) * p.heads + h) * p.owners + owner) * p.lines];
    return sum;
}

// Adds the lanes' values to the sums with their numbers (-1: none), lanes with the same number in a fixed order.
__device__ __forceinline__ void add_by_number(Acc* sums, i32 number, Acc value) {
    const u32 lane = threadIdx.x % 32, alike = __match_any_sync(~0u, number);
    const bool first = number >= 0 && __ffs(alike) - 1 == static_cast<i32>(lane);
    if (__any_sync(~0u, number >= 0 && alike != 1u << lane)) {
        Acc total = 0;
#pragma unroll 8
        for (int other = 0; other < 32; ++other) {
            const Acc x = __shfl_sync(~0u, value, other);
            if (alike >> other & 1) total += x;
        }
        value = total;
    }
    if (first) sums[number] += value;
    __syncwarp();
}

// What functions say of a line, for this weight.
__device__ __forceinline__ i64 offset_of(const ScoreSumsParams& p, const TracedHead& head, const Line& line) {
    i64 found[weights];
    ScorePlace{p, head, row_of(p, head, line), key_of(p, head, line)}.ask<traced::offsets>(found);
    return found[cfg::weight];
}
__device__ __forceinline__ i64 base_of(const ScoreSumsParams& p, const TracedHead& head) {
    i64 found[weights];
    const TracedKey first_key = TracedKey::of(p, head, 0);
    const TracedRow first_row = TracedRow::of(p, head, 0);
    ScorePlace{p, head, first_row, first_key}.ask<traced::bases>(found);
    return found[cfg::weight];
}

// How far behind a head's first element the one that is read with line `index` lies; none (negative whatever it is added to) at the end.
constexpr i64 nowhere = -(i64(1) << 62);
__device__ __forceinline__ i64 distance_of(const ScoreSumsParams& p, const TracedHead& head, i64 base, i32 index, i32 end) {
    const Line line(p, min(index, p.lines - 1));
    return index < end && line.exists ? offset_of(p, head, line) - base : nowhere;
}

// Adds this warp's lines of all heads to its sums, whose first is element number `first`.
__device__ __forceinline__ void add_lines(Acc* sums, const ScoreSumsParams& p, i64 first) {
    constexpr int together = 8;  // steps of 32 lines, for which a head is asked once
    const TracedHead any = TracedHead::of(p, 0, 0);
    const i32 batch = cfg::by_batch ? p.batch : 1, heads = cfg::by_head ? p.heads : 1;
    const i32 share = (p.lines + 32 * cfg::warps - 1) / (32 * cfg::warps) * 32, begin = threadIdx.x / 32 * share, end = min(p.lines, begin + share);
    for (i32 at = begin + static_cast<i32>(threadIdx.x % 32); at < begin + share; at += 32 * together) {
        i64 distance[together] = {};
        if constexpr (cfg::alike) unroll<together>([&](int step) { distance[step] = distance_of(p, any, base_of(p, any), at + 32 * step, end); });
        for (i32 ib = 0; ib < batch; ++ib) {
            for (i32 head = 0; head < heads; ++head) {
                const TracedHead of_head = TracedHead::of(p, ib, head);
                const i64 base = base_of(p, of_head), before = base - first;
                if (before >= p.owned || before + p.reach < 0) continue;  // as for all threads
                u32 some = 0;  // steps with lines that read what this block owns
                unroll<together>([&](int step) {
                    const i64 number = before + (cfg::alike ? distance[step] : distance_of(p, of_head, base, at + 32 * step, end));
                    if (__any_sync(~0u, number >= 0 && number < p.owned)) some |= 1u << step;
                });
                for (; some != 0; some &= some - 1) {
                    const i32 index = at + 32 * (__ffs(some) - 1);
                    const i64 number = before + distance_of(p, of_head, base, index, end);
                    const bool owned = number >= 0 && number < p.owned;
                    add_by_number(sums, owned ? static_cast<i32>(number) : -1, owned ? sum_of_line(p, ib, head, index) : Acc(0));
                }
            }
        }
    }
}

// Whether a block has elements.
__device__ __forceinline__ bool gathers(const ScoreSumsParams& p) { return i64(blockIdx.x) * p.owned < p.size; }

__device__ __forceinline__ void gather(const ScoreSumsParams& p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Acc* const all = reinterpret_cast<Acc*>(memory);
    const i64 first = i64(blockIdx.x) * p.owned;
    for (i32 e = threadIdx.x; e < cfg::warps * p.owned; e += 32 * cfg::warps) all[e] = 0;
    __syncthreads();  // the sums are 0
    if constexpr (cfg::gathers != kShareNothing) add_lines(all + threadIdx.x / 32 * p.owned, p, first);
    __syncthreads();  // the sums are complete
    for (i32 e = threadIdx.x; e < p.owned && first + e < p.size; e += 32 * cfg::warps) {
        Acc sum = 0;
        for (int warp = 0; warp < cfg::warps; ++warp) sum += all[warp * p.owned + e];
        if constexpr (cfg::adds) sum += static_cast<const Acc*>(p.elements)[first + e];
        if constexpr (cfg::rounds) sum *= static_cast<Acc>(p.dropout_scale);
        static_cast<cfg::result*>(p.result)[first + e] = round_to<cfg::result>(sum);
    }
}
