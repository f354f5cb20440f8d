// Before the backward: what its main kernels need of o, do, l and m per query row, and zeros where gradients are added up in memory.
//
//   delta = (rowsum(do * o) - dlse) / dropout_scale             Algorithm 4 line 19; the scale of dropout joins the last factor of dQ, dK
//   stat  = -(m log2 e + log2 l)                                float16, bfloat16: p = 2^(s log2 e + stat), unless stat is large
//   stat  = m, inverse = 1 / l                                  float32, float64:  p = 2^((s - m) log2 e) * inverse
//
// With cfg::split_delta delta is kept in parts (attn/bwd_workspace.cuh).
//
// Rows that see nothing (l = 0) and rows beyond the last get delta = 0 and a stat (-inf; m = +inf) that makes every p of theirs 0; what
// their q, do and o hold is not looked at.
//
// Grid: groups of kStatRows rows * batch * heads, groups fastest, from the last to the first: the forward left the last rows of o in
// the L2 cache, and the main kernel begins with the first of do and dQ.  inverse follows all of stat.
#include "attn/math.cuh"
#include "attn/params.cuh"
#include "attn/bwd_workspace.cuh"
#include "attn/pack.cuh"

constexpr bool kSplitStat = sizeof(cfg::elem) >= 4;
constexpr int kThreads = 32 * cfg::warps;
constexpr int kVector = cfg::load_bytes / int(sizeof(cfg::elem));

// Blocks that share a multiprocessor: the more, the more loads are under way, up to where registers would spill; of few there are no more.
constexpr int blocks() {
    if (cfg::warps > 8) return 2;
#if __CUDA_ARCH__ >= 900
    if (kVector == 8 && cfg::head_dim_v <= 256) return !same_type<cfg::o_elem, __nv_bfloat16> || cfg::dlse || __CUDA_ARCH__ > 900 ? 4 : 6;
    if (sizeof(cfg::elem) == 4) return 4;
#endif
    return 2;
}

constexpr int lanes_per_row() {
    int lanes = 1;
    while (lanes < 32 && lanes * kVector < cfg::head_dim_v) lanes *= 2;
    return lanes;
}

constexpr int kPasses = kStatRows * lanes_per_row() / kThreads;
constexpr int kMost = sizeof(cfg::acc) == 8 ? 2 : 4;  // as many as the registers hold
constexpr int kTogether = kPasses % kMost == 0 ? kMost : kPasses % 2 == 0 ? 2 : 1;  // rows whose loads are under way at a time
static_assert(kPasses * kThreads == kStatRows * lanes_per_row() && kPasses > 0);

// Row of this lane in a pass.
__device__ __forceinline__ i64 own_row(i32 group, i32 pass) {
    return i64(group) * kStatRows + (pass * kThreads + i32(threadIdx.x)) / lanes_per_row();
}

template <class T>
using Vector = Pack<T, kVector>;

__device__ __forceinline__ cfg::acc piece_product(const cfg::elem* dout, const cfg::o_elem* o) {
    const auto a = *reinterpret_cast<const Vector<cfg::elem>*>(dout);
    const auto b = *reinterpret_cast<const Vector<cfg::o_elem>*>(o);
    cfg::acc sum = 0;
    unroll<kVector>([&](int i) { sum += to_acc(a.x[i]) * to_acc(b.x[i]); });
    return sum;
}

// This lane's share of the sum of do * o over one row, which lanes_per_row() neighbouring lanes share.
__device__ __forceinline__ cfg::acc row_product(const cfg::elem* dout, const cfg::o_elem* o, i32 columns) {
    constexpr i32 stride = lanes_per_row() * kVector;
    i32 c = threadIdx.x % lanes_per_row() * kVector;
    if constexpr (stride >= cfg::head_dim_v) return c < columns ? piece_product(dout + c, o + c) : cfg::acc(0);
    cfg::acc sum = 0;
    for (; c < columns; c += stride) sum += piece_product(dout + c, o + c);
    return sum;
}

__device__ __forceinline__ cfg::acc sum_lanes(cfg::acc sum) {
#pragma unroll
    for (int distance = lanes_per_row() / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
}

// Splits a row's delta, which all of its lanes know: x = hi + mid + lo, eight bits each.
__device__ __forceinline__ void split(u16* parts, u32 row, float x) {
    static_assert(!cfg::split_delta || lanes_per_row() >= kDeltaParts);
    const u32 part = threadIdx.x % lanes_per_row();
    const float rest = rest_of(x), last = rest_of(rest);
    if (part < kDeltaParts)
        parts[delta_part(row % kStatRows, part)] = __float_as_uint(part == 0 ? x : part == 1 ? rest : last) >> 16;
}

// The group's delta in parts, once all are there; 16 bytes a thread.
__device__ __forceinline__ void store_parts(const Params& p, const u16* parts, i64 first_row) {
    constexpr u32 units = kStatRows * kDeltaParts / 8;
    uint4* to = static_cast<uint4*>(p.delta) + first_row / kStatRows * units;
    if (threadIdx.x < units) to[threadIdx.x] = reinterpret_cast<const uint4*>(parts)[threadIdx.x];
}

// The gradient by a row's log-sum-exp, 0 where there is none.
__device__ __forceinline__ cfg::acc lse_gradient(const Params& p, const BatchIndex& index, i32 head, i64 row) {
    if (!cfg::dlse || row >= p.n_queries) return 0;
    return static_cast<const cfg::acc*>(p.dlse.data)[slice_offset(p.dlse, index, head) + row * p.dlse.row];
}

// Returns whether the row is a far one.
__device__ __forceinline__ bool store_stat(const Params& p, i64 at, bool empty, cfg::acc l, cfg::acc m) {
    cfg::acc* stat = static_cast<cfg::acc*>(p.stat);
    if constexpr (kSplitStat) {
        stat[at] = empty ? infinity<cfg::acc>() : l < infinity<cfg::acc>() ? m : l - l;  // NaN, which m may have passed over
        stat[at + i64(gridDim.x) * kStatRows] = empty ? cfg::acc(0) : 1 / l;
        return false;
    } else {
        const bool far = is_far_row(m);
        stat[at] = empty ? -infinity<float>() : -fmaf(far ? 0.f : m, float(kLog2e), ptx::lg2(l));
        return far;
    }
}

// The group's rows of dq_acc, which holds row_tiles * block_m rows per instance of q.
__device__ __forceinline__ void zero_accumulator(const Params& p, const BatchIndex& index, i32 head, i32 group) {
    const i64 instance = slice_offset(p.dq, index, head) / (i64(p.n_queries) * p.head_dim);
    const i64 rows = i64(p.row_tiles) * cfg::block_m, first = i64(group) * kStatRows;
    constexpr int row_units = cfg::head_dim * int(sizeof(cfg::acc)) / 16;
    uint4* to = static_cast<uint4*>(p.dq_acc) + (instance * rows + first) * row_units;
    const i32 units = static_cast<i32>(min(i64(kStatRows), rows - first)) * row_units;
    for (i32 i = threadIdx.x; i < units; i += kThreads) to[i] = make_uint4(0, 0, 0, 0);
    constexpr int tiles = kStatRows / cfg::block_m;
    const i32 tile = group * tiles + threadIdx.x;
    if (p.turns != nullptr && threadIdx.x < tiles && tile < p.row_tiles) p.turns[instance * p.row_tiles + tile] = 0;
}

// Several blocks of the key kernel add to dK and dV of all keys.
constexpr bool adds_parts = cfg::in_parts && !cfg::deterministic;

// The rows of dK and dV from p.shared_key on, counted through all heads, to which several blocks of the key kernel add (p.splits > 1 or adds_parts).
__device__ __forceinline__ void zero_shared_keys(const Params& p) {
    const i64 rows = i64(p.batch) * p.kv_heads * p.n_keys - p.shared_key;
    const auto zero = [&](void* data, i64 columns) {
        cfg::acc* to = static_cast<cfg::acc*>(data) + p.shared_key * columns;
        for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < rows * columns; i += i64(gridDim.x) * kThreads) to[i] = 0;
    };
    zero(adds_parts ? p.dk_acc : p.dk.data, p.head_dim);
    zero(adds_parts ? p.dv_acc : p.dv.data, p.head_dim_v);
}

// What the main kernel for compute capability 9.0 adds dBias to, or where it stores that of visible tiles.
constexpr bool zeroed_dbias = cfg::dbias == kDbiasDiagonals || (cfg::dbias == kDbiasStored && (cfg::mask != 0 || cfg::band_left || cfg::band_right));

__device__ __forceinline__ void zero_bias_gradient(const Params& p) {
    const bool added = cfg::dbias == kDbiasDiagonals;
    const i64 elements = added ? p.dbias.head : i64(p.n_queries) * p.n_keys;
    const i64 units = p.bias_instances * elements * int(added ? sizeof(cfg::acc) : sizeof(cfg::bias_grad)) / 16;  // rows are whole units
    uint4* to = static_cast<uint4*>(added ? p.dbias_acc : p.dbias.data);
    for (i64 i = i64(blockIdx.x) * kThreads + threadIdx.x; i < units; i += i64(gridDim.x) * kThreads) to[i] = make_uint4(0, 0, 0, 0);
}

extern "C" __global__ void __launch_bounds__(kThreads, blocks()) backward_preprocess(const __grid_constant__ Params p) {
    const i32 block = gridDim.x - 1 - blockIdx.x, group = block % stat_groups(p), flat = block / stat_groups(p), head = flat % p.heads;
    const BatchIndex index = batch_index(p, flat / p.heads);
    const cfg::elem* dout = static_cast<const cfg::elem*>(p.dout.data) + slice_offset(p.dout, index, head);
    const cfg::o_elem* o = static_cast<const cfg::o_elem*>(p.o.data) + slice_offset(p.o, index, head);
    const cfg::acc* l = static_cast<const cfg::acc*>(p.l.data) + slice_offset(p.l, index, head);
    const cfg::acc* m = static_cast<const cfg::acc*>(p.m.data) + slice_offset(p.m, index, head);
    const cfg::acc inverse_scale = 1 / p.dropout_scale;

    if constexpr (cfg::atomic_dq) zero_accumulator(p, index, head, group);
    if (adds_parts || (sizeof(cfg::elem) == 8 && p.splits > 1)) zero_shared_keys(p);
    if constexpr (zeroed_dbias) zero_bias_gradient(p);
    __shared__ __align__(16) u16 parts[cfg::split_delta ? kStatRows * kDeltaParts : 1];
    bool any_empty = false, any_far = false;
    for (i32 pass = 0; pass < kPasses; pass += kTogether) {
        cfg::acc sum[kTogether], row_l[kTogether], row_m[kTogether];
        unroll<kTogether>([&](int i) {
            // A row beyond the last reads a valid address all the same.
            const i64 row = own_row(group, pass + i), source = row < p.n_queries ? row : 0;
            row_l[i] = l[source * p.l.row];
            row_m[i] = m[source * p.m.row];
            sum[i] = row_product(dout + source * p.dout.row, o + source * p.o.row, p.head_dim_v);
        });
        unroll<kTogether>([&](int i) {
            const i64 row = own_row(group, pass + i);
            const bool inside = row < p.n_queries;
            const bool empty = !inside || row_l[i] == 0;
            any_empty |= inside && empty;
            const cfg::acc product = sum_lanes(sum[i]);
            const i64 at = stat_row(p, flat, row);
            const cfg::acc delta = empty ? cfg::acc(0) : (product - lse_gradient(p, index, head, row)) * inverse_scale;
            if constexpr (cfg::split_delta) split(parts, row, delta);
            if (threadIdx.x % lanes_per_row() == 0) {
                if constexpr (!cfg::split_delta) static_cast<cfg::acc*>(p.delta)[at] = delta;
                any_far |= store_stat(p, at, empty, row_l[i], row_m[i]);
            }
        });
    }
    const i32 flags = all_flags(any_empty, any_far);  // parts are complete
    if constexpr (cfg::split_delta) store_parts(p, parts, stat_row(p, flat, i64(group) * kStatRows));
    if (threadIdx.x == 0) p.counters[block] = flags;
    if (p.ticket != nullptr && blockIdx.x == 0 && threadIdx.x < 2) p.ticket[threadIdx.x] = 0;
}
