// Adds up, for every element of an array that a score function reads, what sm80/bwd_score.cu has summed: of one weight, in a fixed order.
//
//   result[e] = elements[e] + scale sum of the sums (of heads, rows, keys, diagonals) whose index is e
//
// Each block owns some elements and goes through all indices; its warps share them, and each has sums of its own.  Heads that an index does
// not depend on (not cfg::by_batch, not cfg::by_head) have their sums added up first.
//
// Shared memory   sums [warps][owned]
// Grid            elements / owned
#include "attn/score_sums.cuh"

using Acc = cfg::acc;

constexpr int weights = cfg::weights;
using Weighted = typename CountTo<weights>::type;
using Diagonal = Diagonals<cfg::block_m, cfg::block_n>;
constexpr bool of_lines = cfg::gathers == kShareLine, of_diagonals = of_lines && cfg::walk == kWalkDiagonals;

// The row and the key of a line, counted from the operands' first; or a line that does not exist.
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
        }
    }
};

// The sum of a line, over the heads that share its index: those with the same b or the same h, where the index depends on them.
__device__ __forceinline__ Acc sum_of_line(const ScoreSumsParams& p, i32 ib, i32 head, i32 line) {
    const Acc* from = static_cast<const Acc*>(p.sums) + p.first + line;
    Acc sum = 0;
    for (i32 b = ib; b < (cfg::by_batch ? ib + 1 : p.batch); ++b)
        for (i32 h = head; h < (cfg::by_head ? head + 1 : p.heads); ++h) sum += from[(i64(b) * p.heads + h) * p.lines];
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

extern "C" __global__ void __launch_bounds__(32 * cfg::warps) score_sums(const __grid_constant__ ScoreSumsParams p) {
    extern __shared__ __align__(16) unsigned char memory[];
    Acc* const all = reinterpret_cast<Acc*>(memory);
    const i64 first = i64(blockIdx.x) * p.owned;
    for (i32 e = threadIdx.x; e < cfg::warps * p.owned; e += 32 * cfg::warps) all[e] = 0;
    __syncthreads();  // the sums are 0
    if constexpr (cfg::gathers != kShareNothing) {
        const i32 warp = threadIdx.x / 32, batch = cfg::by_batch ? p.batch : 1, heads = cfg::by_head ? p.heads : 1;
        const i64 count = i64(batch) * heads * p.lines, share = (count + 32 * cfg::warps - 1) / (32 * cfg::warps) * 32;
        const i64 end = min(count, (warp + 1) * share);
        for (i64 begin = warp * share; begin < end; begin += 32) {
            const i64 index = begin + threadIdx.x % 32, flat = index / p.lines;
            const i32 ib = static_cast<i32>(flat / heads), head = static_cast<i32>(flat % heads), place = static_cast<i32>(index % p.lines);
            const Line line(p, place);
            i64 offsets[weights];
            const TracedHead of_head = TracedHead::of(p, ib, head);
            find_offsets(offsets, Weighted(), p, of_head, TracedRow::of(p, of_head, line.row), TracedKey::of(p, of_head, line.key));
            const i64 number = offsets[cfg::weight] - first;
            const bool owned = index < end && line.exists && number >= 0 && number < p.owned;
            if (__any_sync(~0u, owned)) add_by_number(all + warp * p.owned, owned ? static_cast<i32>(number) : -1, owned ? sum_of_line(p, ib, head, place) : Acc(0));
        }
    }
    __syncthreads();  // the sums are complete
    for (i32 e = threadIdx.x; e < p.owned && first + e < p.size; e += 32 * cfg::warps) {
        Acc sum = 0;
        for (int warp = 0; warp < cfg::warps; ++warp) sum += all[warp * p.owned + e];
        if constexpr (cfg::adds) sum += static_cast<const Acc*>(p.elements)[first + e];
        if constexpr (cfg::rounds) sum *= static_cast<Acc>(p.dropout_scale);
        static_cast<cfg::result*>(p.result)[first + e] = round_to<cfg::result>(sum);
    }
}
