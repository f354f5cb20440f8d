// The lecture's open question: which loop outside?  Two forwards around one inner step, one block per head in both.
//
// attention_keys_outside     FlashAttention's algorithm 1: each block of keys stays on the chip while all rows pass by; o, l and m
//                            live in device memory and are read, corrected and written once per block of keys
// attention_queries_outside  the lecture's change: each block of rows stays on the chip, o, l and m with it, while all keys pass by
//
// cfg::keys_on_chip is the papers' B_c, cfg::block_m their B_r; the inner step works on cfg::block_n keys at a time, whose scores fit
// in registers.  Lengths must be multiples of the blocks.  l and m are float32, o in memory is cfg::out.
#include "sm80/fwd_tiles.cuh"
#include "sm80/softmax.cuh"

using Out = cfg::out;

constexpr int stage_bytes = k_bytes + v_bytes;

using Softmax = SoftmaxRows<float, m_tiles, true>;
using Output = float[m_tiles][v_tiles][4];

constexpr int d = cfg::head_dim;
constexpr int steps = cfg::keys_on_chip / cfg::block_n;  // inner steps per block of keys
static_assert(cfg::head_dim == cfg::head_dim_v && cfg::keys_on_chip % cfg::block_n == 0);

// The arrays of one head.
struct Head {
    const Elem *q, *k, *v;  // [n, d]
    Out* o;                 // [n, d]
    float *l, *m;           // [n]
    i32 n;
    float scale;
    Log2Factor<float> to_log2;
};

__device__ __forceinline__ Head head_of(const Elem* q, const Elem* k, const Elem* v, Out* o, float* l, float* m, i32 n, float scale) {
    const i64 row = static_cast<i64>(blockIdx.x) * n;
    return {q + row * d, k + row * d, v + row * d, o + row * d, l + row, m + row, n, scale, Log2Factor<float>::of_scale(scale)};
}

template <int rows>
__device__ __forceinline__ void load_rows(u32 shared, const Elem* from) {
    load_tile<Elem, rows, d, threads, 16>(shared, from, d, d, [](i32) { return true; }, threadIdx.x);
}

// k and v of block_n keys, one behind the other: line 6.
__device__ __forceinline__ void load_step(u32 shared, const Head& head, i32 first) {
    load_rows<cfg::block_n>(shared, head.k + static_cast<i64>(first) * d);
    load_rows<cfg::block_n>(shared + k_bytes, head.v + static_cast<i64>(first) * d);
}

// Lines 9 to 12 for block_n keys, o left without its division by l.
__device__ __forceinline__ void attend(const Head& head, u32 shared, const Q& q, Softmax& rows, Output& o) {
    const u32 lane = threadIdx.x % 32;
    float s[m_tiles][n_tiles][4] = {};
    Product::scores(s, q, shared, lane);
    rows.update(s, o, head.to_log2);
    Product::values(
        o, s, shared + k_bytes, lane, [&](int c) { rows.exponentiate(s, c, head.to_log2); }, [](int, int, auto&) {}, [](int, int) {});
}

__device__ __forceinline__ i32 row_of(i32 first, int mt, int h) {
    return first + static_cast<i32>(threadIdx.x / 32) * warp_rows + mt * 16 + h * 8 + (threadIdx.x % 32) / 4;
}

struct alignas(2 * sizeof(Out)) Pair {
    Out x, y;
};

__device__ __forceinline__ Pair* pair_of(const Head& head, i32 row, int n) {
    return reinterpret_cast<Pair*>(head.o + static_cast<i64>(row) * d + n * 8 + 2 * (threadIdx.x % 4));
}

// Line 8: l_i and m_i from memory, and o_i times l_i, as the inner step holds it.
__device__ __forceinline__ void load_state(const Head& head, i32 first, Softmax& rows, Output& o) {
#pragma unroll
    for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 row = row_of(first, mt, h);
            const float l = head.l[row];
            rows.m[mt][h] = head.m[row] / head.scale;
            rows.l[mt][h] = threadIdx.x % 4 == 0 ? l : 0.f;  // `finish` adds up the four lanes of a row
#pragma unroll
            for (int n = 0; n < v_tiles; ++n) {
                const Pair pair = *pair_of(head, row, n);
                o[mt][n][2 * h] = to_acc(pair.x) * l;
                o[mt][n][2 * h + 1] = to_acc(pair.y) * l;
            }
        }
}

// Lines 12 and 13: o_i divided by l_i, l_i and m_i to memory.
__device__ __forceinline__ void store_state(const Head& head, i32 first, Softmax& rows, Output& o) {
    rows.finish();
#pragma unroll
    for (int mt = 0; mt < m_tiles; ++mt)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i32 row = row_of(first, mt, h);
            const float l = rows.l[mt][h], inverse = l == 0.f ? 0.f : 1.f / l;
            if (threadIdx.x % 4 == 0) head.l[row] = l, head.m[row] = rows.m[mt][h] * head.scale;
#pragma unroll
            for (int n = 0; n < v_tiles; ++n)
                *pair_of(head, row, n) = {round_to<Out>(o[mt][n][2 * h] * inverse), round_to<Out>(o[mt][n][2 * h + 1] * inverse)};
        }
}

// Shared memory: keys_on_chip keys and values, two tiles of q.
extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void attention_keys_outside(const Elem* q, const Elem* k, const Elem* v, Out* o_out,
                                                                                              float* l, float* m, i32 n, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 kv_shared = ptx::shared_address(memory), q_shared = kv_shared + steps * stage_bytes;
    const Head head = head_of(q, k, v, o_out, l, m, n, scale);
    for (i32 first = 0; first < n; first += cfg::block_m) {  // line 2
        Softmax rows;
        Output o = {};
        store_state(head, first, rows, o);
    }
    __syncthreads();  // l and m are written by one lane of four and read by all
    for (i32 key = 0; key < n; key += cfg::keys_on_chip) {  // line 5
        for (int step = 0; step < steps; ++step) load_step(kv_shared + step * stage_bytes, head, key + step * cfg::block_n);
        load_rows<cfg::block_m>(q_shared, head.q);
        ptx::cp_async_commit();
        for (i32 first = 0, slot = 0; first < n; first += cfg::block_m, slot ^= 1) {  // line 7
            const i32 next = first + cfg::block_m;
            if (next < n) load_rows<cfg::block_m>(q_shared + (slot ^ 1) * q_bytes, head.q + static_cast<i64>(next) * d);
            ptx::cp_async_commit();
            Softmax rows;
            Output o;
            load_state(head, first, rows, o);
            ptx::cp_async_wait<1>();
            __syncthreads();  // q_i, k_j and v_j are there
            Q tile(q_shared + slot * q_bytes, cfg::block_m, threadIdx.x / 32 * warp_rows, threadIdx.x % 32);
            tile.load();
            for (int step = 0; step < steps; ++step) attend(head, kv_shared + step * stage_bytes, tile, rows, o);
            store_state(head, first, rows, o);
            __syncthreads();  // every warp is done with q_i, and at the end of the row tiles with k_j and v_j
        }
    }
}

// Shared memory: one tile of q, two of block_n keys and values.
extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void attention_queries_outside(const Elem* q, const Elem* k, const Elem* v, Out* o_out,
                                                                                                 float* l, float* m, i32 n, float scale) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 q_shared = ptx::shared_address(memory), kv_shared = q_shared + q_bytes;
    const Head head = head_of(q, k, v, o_out, l, m, n, scale);
    for (i32 first = 0; first < n; first += cfg::block_m) {  // line 7, outside
        load_rows<cfg::block_m>(q_shared, head.q + static_cast<i64>(first) * d);
        load_step(kv_shared, head, 0);
        ptx::cp_async_commit();
        Softmax rows;
        Output o = {};
        for (i32 key = 0, slot = 0; key < n; key += cfg::block_n, slot ^= 1) {  // line 5, inside
            const i32 next = key + cfg::block_n;
            if (next < n) load_step(kv_shared + (slot ^ 1) * stage_bytes, head, next);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
            __syncthreads();  // q_i, k_j and v_j are there
            Q tile(q_shared, cfg::block_m, threadIdx.x / 32 * warp_rows, threadIdx.x % 32);
            tile.load();
            attend(head, kv_shared + slot * stage_bytes, tile, rows, o);
            __syncthreads();  // every warp is done with k_j and v_j, and at the end of the keys with q_i
        }
        store_state(head, first, rows, o);
    }
}
