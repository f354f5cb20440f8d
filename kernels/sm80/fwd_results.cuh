// o, l and m on their way to memory: over very many keys in parts, from teams of one block, from blocks that divide the keys, and at the end.
#pragma once
#include "attn/merge.cuh"
#include "attn/pack.cuh"
#include "ptx/registers.cuh"
#include "sm80/fwd_work.cuh"

template <class Out>
__device__ __forceinline__ void store_pair(Out* out, Acc x, Acc y, bool first, bool second, bool together) {
    if (together && second) {
        *reinterpret_cast<Pack<Out, 2>*>(out) = {{round_to<Out>(x), round_to<Out>(y)}};
    } else {
        if (first) out[0] = round_to<Out>(x);
        if (second) out[1] = round_to<Out>(y);
    }
}

// A (packed) row of the results: contiguous arrays, or a part's share of the workspace.
struct ResultRow {
    i64 at;
    bool exists;

    __device__ __forceinline__ ResultRow(const Params& p, const Work& w, i32 packed, i32 part) {
        const i32 row = packed / cfg::pack, head = w.head + packed % cfg::pack;
        exists = row < p.n_queries;
        at = ((static_cast<i64>(part) * p.batch + w.ib) * p.heads + head) * p.n_queries + row;
    }
    __device__ __forceinline__ Stored* o(const Params& p) const {
        return static_cast<Stored*>(cfg::split ? p.o_part : p.o.data) + at * p.head_dim_v;
    }
};

// Row `mt`, `h` of this lane in the tile, and among the results.
__device__ __forceinline__ i32 own_row(int mt, int h) {
    const i32 own = ptx::opaque(static_cast<i32>(thread()));  // what follows from it is not kept in registers
    return own / 32 * warp_rows + mt * 16 + h * 8 + own % 32 / 4;
}
__device__ __forceinline__ ResultRow result_row(const Params& p, const Work& w, int mt, int h) {
    return {p, w, w.row0 + own_row(mt, h), cfg::split ? static_cast<i32>(blockIdx.y) : 0};
}

// Over very many keys sums lose digits: after every cfg::flush_every key tiles (0: never) o is added to the result in memory, and starts anew.
// Shared memory holds the rows' maxima when that was done last, +inf before.
__device__ __forceinline__ i32 flush_group(Tile tile) { return tile.n() / max(cfg::flush_every, 1); }

__device__ __forceinline__ u32 flushed_maximum(u32 maxima, int mt, int h) { return maxima + own_row(mt, h) * int(sizeof(Acc)); }

__device__ __forceinline__ void start_flushes(u32 maxima) {
    unroll<m_tiles, 2>([&](int mt, int h) { ptx::store_shared(flushed_maximum(maxima, mt, h), infinity<Acc>()); });
    __syncwarp();
}

// Adds o to the result in memory or, at last, that to o.
template <bool last>
__device__ __forceinline__ void flush(const Params& p, const Work& w, u32 maxima, const Softmax& rows, Acc (&o)[m_tiles][v_tiles][4]) {
    unroll<m_tiles, 2>([&](int mt, int h) {
        const ResultRow row = result_row(p, w, mt, h);
        Acc before;
        ptx::load_shared(before, flushed_maximum(maxima, mt, h));
        const bool any = before != infinity<Acc>();
        const Acc factor = exp2_term(before - Softmax::finite(rows.m[mt][h]), w.to_log2);
        __syncwarp();  // the lanes that share the row have read
        ptx::store_shared(flushed_maximum(maxima, mt, h), rows.m[mt][h]);
        if (!row.exists) return;
        constexpr int together = v_tiles % 8 == 0 ? 8 : v_tiles % 4 == 0 ? 4 : 2;  // tiles whose loads are under way at a time
#pragma unroll
        for (int first = 0; first < v_tiles; first += together) {
            Stored* const from = row.o(p) + blockIdx.z * cfg::head_dim_v + Product::column(0, threadIdx.x % 4);
            const i32 columns = p.head_dim_v - blockIdx.z * cfg::head_dim_v - Product::column(0, threadIdx.x % 4);
            Acc flushed[together][2];
            unroll<together, 2>([&](int n, int e) {
                const i32 col = Product::column(first + n, 0) + e;
                flushed[n][e] = any && (cfg::exact || col < columns) ? Acc(from[col]) : Acc(0);
            });
            unroll<together, 2>([&](int n, int e) {
                const i32 col = Product::column(first + n, 0) + e;
                Acc& x = o[mt][first + n][2 * h + e];
                const Acc sum = any ? fma_of(flushed[n][e], factor, x) : x;
                x = last ? sum : Acc(0);
                if (!last && (cfg::exact || col < columns)) from[col] = sum;
            });
        }
    });
}

// Which tiles of o a team finishes.
__device__ __forceinline__ bool finishes(int n) { return cfg::teams == 1 || n % cfg::teams == team(); }

// Adds up what the teams have, in shared memory: each leaves its o in its own ring, and finishes every cfg::teams-th tile of o.
__device__ __forceinline__ void combine_teams(const Work& w, u32 rings, Softmax& rows, Acc (&o)[m_tiles][v_tiles][4]) {
    static_assert(cfg::teams == 1 || m_tiles * (v_tiles * 4 + 4) * 32 * int(sizeof(Acc)) <= ring_bytes, "a ring has room for o, l and m");
    const u32 lane = threadIdx.x % 32;
    const auto place = [&](int team, int index) { return rings + team * ring_bytes + (index * 32 + lane) * u32(sizeof(Acc)); };
    rows.finish();
    unroll<m_tiles, 2>([&](int mt, int h) {
        ptx::store_shared(place(team(), 4 * mt + 2 * h), rows.m[mt][h]), ptx::store_shared(place(team(), 4 * mt + 2 * h + 1), rows.l[mt][h]);
    });
    const auto output = [&](int mt, int n) { return 4 * (m_tiles + mt * v_tiles + n); };
    unroll<m_tiles, v_tiles, 4>([&](int mt, int n, int i) { ptx::store_shared(place(team(), output(mt, n) + i), o[mt][n][i]); });
    __syncthreads();  // all teams' results are there
    Acc weight[cfg::teams][m_tiles][2];
    unroll<m_tiles, 2>([&](int mt, int h) {
        Acc top = -infinity<Acc>(), sum = 0;
        unroll<cfg::teams>([&](int t) {
            ptx::load_shared(weight[t][mt][h], place(t, 4 * mt + 2 * h));
            top = max_of(top, weight[t][mt][h]);
        });
        unroll<cfg::teams>([&](int t) {
            Acc l;
            ptx::load_shared(l, place(t, 4 * mt + 2 * h + 1));
            weight[t][mt][h] = exp2_term(weight[t][mt][h] - Softmax::finite(top), w.to_log2);
            sum += l * weight[t][mt][h];
        });
        rows.m[mt][h] = top, rows.l[mt][h] = sum;
    });
    unroll<m_tiles, v_tiles>([&](int mt, int n) {
        if (!finishes(n)) return;
        unroll<4>([&](int i) {
            Acc sum = 0;
            unroll<cfg::teams>([&](int t) {
                Acc x;
                ptx::load_shared(x, place(t, output(mt, n) + i));
                sum += x * weight[t][mt][i / 2];
            });
            o[mt][n][i] = sum;
        });
    });
}

// Lines 15 and 16: divides by l and writes the warp's rows of o, l and m.
__device__ __forceinline__ void store(const Params& p, const Work& w, const Softmax& rows, Acc (&o)[m_tiles][v_tiles][4]) {
    Product::arrange(o);
    Acc* l_out = static_cast<Acc*>(cfg::split ? p.l_part : p.l.data);
    Acc* m_out = static_cast<Acc*>(cfg::split ? p.m_part : p.m.data);
    const i32 q = threadIdx.x % 4, col0 = blockIdx.z * cfg::head_dim_v;
    const bool together = cfg::exact || p.head_dim_v % 2 == 0;
    // m leaves in natural units of the score: raw maxima are scaled here.
    const Acc unit = cfg::prescaled ? Acc(1) : static_cast<Acc>(p.scale);
    unroll<m_tiles, 2>([&](int mt, int h) {
        const ResultRow row = result_row(p, w, mt, h);
        if (!row.exists) return;
        const Acc l = rows.l[mt][h];
        const Acc inverse = l == Acc(0) ? Acc(0) : static_cast<Acc>(cfg::dropout != 0 ? p.dropout_scale : 1.0) / l;
        if ((cfg::statistics || cfg::split) && q == 0 && blockIdx.z == 0 && team() == 0) l_out[row.at] = l, m_out[row.at] = rows.m[mt][h] * unit;
        unroll<v_tiles>([&](int n) {
            if (!finishes(n)) return;
            const i32 col = col0 + Product::column(n, q);
            store_pair(row.o(p) + col, o[mt][n][2 * h] * inverse, o[mt][n][2 * h + 1] * inverse, cfg::exact || col < p.head_dim_v,
                       cfg::exact || col + 1 < p.head_dim_v, together);
        });
    });
}

// Whether the other blocks of this row tile are done, and what they wrote to memory may be read.  The row tile's counter goes
// back to 0 by itself.  All threads of the block call this after their last store.
__device__ __forceinline__ bool last_of_parts(const Params& p) {
    __shared__ bool last;
    __threadfence();  // what this thread stored comes before the count
    __syncthreads();
    if (threadIdx.x == 0) {
        const u32 top = gridDim.y - 1;
        last = atomicInc(reinterpret_cast<u32*>(p.counters) + blockIdx.x, top) == top;
    }
    __syncthreads();
    __threadfence();  // and the count before what is read
    return last;
}

// Adds up one row of o over all parts, a warp together; `row` counts the rows of o, l and m.
__device__ __forceinline__ void merge_row(const Params& p, i64 row) {
    constexpr int held = (cfg::head_dim_v + 31) / 32;
    const int lane = threadIdx.x % 32;
    const i64 rows = static_cast<i64>(p.batch) * p.heads * p.n_queries;  // of a part
    // Other multiprocessors wrote the parts: they are read past this one's cache.
    const Shares<Acc> shares(
        p.splits, [&](int part) { return __ldcg(static_cast<const Acc*>(p.l_part) + part * rows + row); },
        [&](int part) { return __ldcg(static_cast<const Acc*>(p.m_part) + part * rows + row); });
    Acc sum[held] = {};
    const Acc* o = static_cast<const Acc*>(p.o_part) + row * p.head_dim_v + lane;
#pragma unroll 8
    for (i32 part = 0; part < p.splits; ++part) {
        const Acc w = shares[part];
        unroll<held>([&](int i) {
            const Acc x = lane + 32 * i < p.head_dim_v ? __ldcg(o + 32 * i) : Acc(0);
            sum[i] += w == Acc(0) ? Acc(0) : product_of(w, x);
        });
        o += rows * p.head_dim_v;
    }
    unroll<held>([&](int i) {
        if (lane + 32 * i < p.head_dim_v) static_cast<cfg::out*>(p.o.data)[row * p.head_dim_v + lane + 32 * i] = round_to<cfg::out>(sum[i]);
    });
    if (cfg::statistics && lane == 0) static_cast<Acc*>(p.l.data)[row] = shares.l, static_cast<Acc*>(p.m.data)[row] = shares.m;
}

// Merges the parts of this block's rows if it is the last to have one: no second kernel, and the parts are still in the cache.  Which block that
// is differs from run to run; what it adds up, and in which order, does not.
__device__ __forceinline__ void merge(const Params& p, const Work& w) {
    if (!last_of_parts(p)) return;
    for (i32 r = threadIdx.x / 32; r < cfg::block_m; r += cfg::warps * cfg::teams) {
        const ResultRow row(p, w, w.row0 + r, 0);
        if (row.exists) merge_row(p, row.at);
    }
}
