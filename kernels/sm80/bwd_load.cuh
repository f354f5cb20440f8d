// What the backward kernels look up of one query head, and its tiles from global to shared memory, asynchronously, into rows with padding
// (sm80/bwd_tiles.cuh).
#pragma once
#include "attn/bwd_workspace.cuh"
#include "attn/philox.cuh"
#include "attn/row_walk.cuh"
#include "attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "sm80/bwd_layout.cuh"

// Rows of elements in global memory, of which so many columns exist.
struct Columns {
    const Elem* data;
    i64 row_stride;
    i32 count;

    __device__ __forceinline__ Columns from(i32 first) const { return {data + first, row_stride, count - first}; }
};

// The part of the problem that one query head sees; in shared memory, registers being short.
struct Head : TracedHead {
    const Elem *q, *k, *v, *dout;
    const Acc *stat, *delta, *inverse;  // (padded rows)
    const Acc* m;             // as the forward left it
    Acc* dq_acc;              // this head's accumulator, in the order of add_queries
    i64 bias;                 // offset of this head's slice
    MaskSlices mask;
    RandomStream random;
    WalkTables walk;
    const i32* row_flags;     // of this head, by kStatRows rows
    bool has_empty_rows;      // does any of its rows see nothing?
    bool has_far_rows;        // see is_far_row
};

// See backward_preprocess: no p of such a row is above 0.
__device__ __forceinline__ bool is_empty_row(Acc stat) { return stat == (split_stat ? infinity<Acc>() : -infinity<Acc>()); }

// What the flags of all groups of the head's rows say together.
__device__ __forceinline__ i32 row_flags(const Params& p, i64 flat) {
    i32 flags = 0;
    for (i32 group = threadIdx.x; group < stat_groups(p); group += threads) flags |= p.counters[flat * stat_groups(p) + group];
    return all_flags(flags & kEmptyRows, flags & kFarRows);
}

// Fills in what a block needs of one query head; thread 0 writes, the block must synchronise before it reads.
__device__ __forceinline__ void describe_head(Head& h, const Params& p, i32 ib, i32 head) {
    const i64 flat = i64(ib) * p.heads + head;
    const i32 flags = row_flags(p, flat);
    if (threadIdx.x != 0) return;
    static_cast<TracedHead&>(h) = TracedHead::of(p, ib, head);
    h.has_empty_rows = flags & kEmptyRows;
    h.has_far_rows = flags & kFarRows;
    h.row_flags = p.counters + flat * stat_groups(p);
    const BatchIndex index = batch_index(p, ib);
    h.q = static_cast<const Elem*>(p.q.data) + slice_offset(p.q, index, head);
    h.dout = static_cast<const Elem*>(p.dout.data) + slice_offset(p.dout, index, head);
    h.k = static_cast<const Elem*>(p.k.data) + slice_offset(p.k, index, head / p.group);
    h.v = static_cast<const Elem*>(p.v.data) + slice_offset(p.v, index, head / p.group);
    h.stat = static_cast<const Acc*>(p.stat) + stat_row(p, flat, 0);
    if constexpr (split_stat) h.inverse = h.stat + i64(p.batch) * p.heads * stat_groups(p) * kStatRows;
    h.delta = static_cast<const Acc*>(p.delta) + stat_row(p, flat, 0);
    if constexpr (!split_stat) h.m = static_cast<const Acc*>(p.m.data) + slice_offset(p.m, index, head);
    if constexpr (cfg::atomic_dq) {
        const i64 instance = slice_offset(p.dq, index, head) / (i64(p.n_queries) * p.head_dim);
        h.dq_acc = static_cast<Acc*>(p.dq_acc) + instance * p.row_tiles * cfg::block_m * cfg::head_dim;
    }
    if constexpr (cfg::bias) h.bias = slice_offset(p.bias, index, head);
    h.mask = MaskSlices::of(p, index, head);
    if constexpr (cfg::dropout) h.random = random_stream(p.dropout, ib, head);
}

// The same for its walk over the row tiles that see one key tile; called by thread 0.
__device__ __forceinline__ void describe_walk(Head& head, const Params& p, i32 key_tile) {
    describe_tables(head.walk, p, head.mask.instance, head.mask.blocks, key_tile);
}

// Where one row tile walks over key tiles; called by thread 0, which has described the head.
__device__ __forceinline__ void describe_rows(MaskPlace& place, const Params& p, const Head& head, i32 row_tile) {
    place.set_rows(p, row_tile);
    place.set(head.mask);
}

// What a load derives from its thread and strides is soon computed, and would otherwise be kept in registers from one row tile to the next.
__device__ __forceinline__ int thread() { return ptx::opaque(static_cast<i32>(threadIdx.x)); }

// float32 tiles are split (sm80/bwd_tiles.cuh) before anybody reads them, 16 rows by the warp that has loaded them, which so need not wait
// for others.  Tiles of other types are loaded by the whole block, or by the half of it that computes dP (sm80/bwd_layout.cuh).
constexpr int number_loaders = alternating ? 32 * query_warps : threads;
constexpr int loaders = is_split ? 32 : number_loaders;
template <int rows>
constexpr int loaded_rows = is_split ? 16 : rows;

// Calls work(first row) for the parts of a tile that this thread takes part in.  Of a tile in 16-row parts, warp `first` has the first.
template <int rows, class Work>
__device__ __forceinline__ void for_parts(int first, const Work& work) {
    if constexpr (is_split) {
#pragma unroll 1
        for (int part = (thread() / 32 + cfg::warps - first % cfg::warps) % cfg::warps; part < rows / 16; part += cfg::warps) work(16 * part);
    } else {
        work(0);
    }
}

// Rows first_row ... of an array; columns that do not exist, and rows for which `keep(row of the tile)` is false, become zeros without being
// read.
template <int rows, int columns, class Keep>
__device__ __forceinline__ void load_some_rows(u32 tile, const Columns& from, i64 first_row, Keep keep) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
#pragma unroll 1
    for (int index = thread() % loaders; index < rows * chunks; index += loaders) {
        const int row = index / chunks, column = index % chunks * chunk;
        const i32 valid = keep(row) ? max(0, min(16, (from.count - column) * int(sizeof(Elem)))) : 0;
        const Elem* source = valid ? from.data + (first_row + row) * from.row_stride + column : from.data;
        copy_chunk<cfg::load_bytes>(tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem)), reinterpret_cast<const u8*>(source), valid);
    }
}

// The same when all rows and columns are there, at a few instructions per copy: where every step is a whole number of rows on, an addition
// and the copy itself.
template <int rows, int columns>
__device__ __forceinline__ void load_all_rows(u32 tile, const Columns& from, i64 first_row) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
    constexpr int total = rows * chunks, steps = (total + loaders - 1) / loaders;
    const i64 stride = ptx::opaque(from.row_stride);
    const int first = thread() % loaders;
    const Elem* data = from.data + first_row * stride;
    if constexpr (loaders % chunks == 0 && total % loaders == 0) {
        constexpr int rows_per_step = loaders / chunks;
        const int row = first / chunks, column = first % chunks * chunk;
        const u32 to = tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem));
        data += row * stride + column;
#pragma unroll
        for (int step = 0; step < steps; ++step, data += rows_per_step * stride) ptx::cp_async<16>(to + slot(step * rows_per_step) * row_bytes<columns>, data, 16);
        return;
    }
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const int index = first + step * loaders;
        if (total % loaders && index >= total) break;
        const int row = index / chunks, column = index % chunks * chunk;
        ptx::cp_async<16>(tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem)), data + row * stride + column, 16);
    }
}

// Where the rows of one head's gradient go.
template <class Out>
struct GradientRows {
    Out* data;
    i64 stride;
    i32 columns;

    // A warp's part, from (first_row, first_column) on, times a factor; there are `rows` rows.
    template <int tiles_m, int tiles_n>
    __device__ __forceinline__ void store(const Acc (&acc)[tiles_m][tiles_n][4], i64 first_row, i32 rows, i32 first_column, Acc factor) const {
        const i32 lane = threadIdx.x % 32;
        unroll<tiles_m, tiles_n, 4>([&](int m, int n, int i) {
            const i64 row = first_row + 16 * m + i / 2 * 8 + lane / 4;
            const i32 column = first_column + 8 * n + lane % 4 * 2 + i % 2;
            if (row < rows && column < columns) data[row * stride + column] = round_to<Out>(acc[m][n][i] * factor);
        });
    }
};

// To the array or, where a sum over axes that the operand was broadcast along is still to come (`summed`), unrounded to the workspace, which is
// contiguous: from its row `workspace_row` on.
template <class Out>
__device__ __forceinline__ GradientRows<Out> gradient_rows(const Operand& gradient, const BatchIndex& index, i32 head, i32 columns, bool summed,
                                                           void* workspace, i64 workspace_row) {
    if (summed) return {static_cast<Out*>(workspace) + workspace_row * columns, columns, columns};
    return {static_cast<Out*>(gradient.data) + slice_offset(gradient, index, head), gradient.row, columns};
}

// A tile of results in shared memory to rows first_row ... row_end - 1.
template <int rows, int columns, class Out>
__device__ __forceinline__ void save_rows(const unsigned char* tile, const GradientRows<Out>& to, i64 first_row, i64 row_end) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
    const bool whole = to.columns % chunk == 0 && to.stride % chunk == 0;
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * chunks; index += threads) {
        const int row = index / chunks, column = index % chunks * chunk;
        if (first_row + row >= row_end) break;
        const unsigned char* from = tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem));
        Out* at = to.data + (first_row + row) * to.stride + column;
        if (whole && column < to.columns) {
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int i = 0; i < chunk && column + i < to.columns; ++i) at[i] = reinterpret_cast<const Out*>(from)[i];
        }
    }
}

// block_m consecutive accumulators, 16-byte aligned, by the threads that load.
__device__ __forceinline__ void load_vector(u32 to, const Acc* from) {
    constexpr int chunks = cfg::block_m * int(sizeof(Acc)) / 16;
    for (int i = thread() % number_loaders; i < chunks; i += number_loaders) ptx::cp_async<16>(to + i * 16, reinterpret_cast<const u8*>(from) + i * 16, 16);
}

// The keys of a tile: those that exist and whose v is asked for, and those among them that some row sees.  The k of the others is loaded as
// zeros: 0 * NaN in dS K would reach dQ.
struct TileKeys {
    const Params& p;
    const Head& head;
    i64 first;

    __device__ __forceinline__ bool inside(int row) const {
        return first + row < p.n_keys && bias_shows(p, head.bias, static_cast<i32>(first) + row);
    }
    __device__ __forceinline__ bool seen(int row) const {
        const i32 key = static_cast<i32>(first) + row;
        return inside(row) && band_sees(p, key) && key_alive(p, head.mask.instance, key);
    }
};

// The rows of a tile that exist and see some key.  Others are loaded as zeros: they would reach dK and dV by 0 * NaN.
struct TileRows {
    const Params& p;
    const Head& head;
    i64 first;

    __device__ __forceinline__ bool whole() const {
        return first + cfg::block_m <= p.n_queries && !(head.has_empty_rows && head.row_flags[first / kStatRows] & kEmptyRows);
    }
    __device__ __forceinline__ bool seeing(int row) const {
        return first + row < p.n_queries && !(head.has_empty_rows && is_empty_row(head.stat[first + row]));
    }
};

// The rows of a tile for which `keep(row of the tile)` is true or, if it is `whole`, all of them.
template <int rows, int columns, class Keep>
__device__ __forceinline__ void load_tile_rows(u32 tile, const Columns& from, i64 first_row, int first_warp, bool whole, const Keep& keep) {
    for_parts<rows>(first_warp, [&](int part) {
        const u32 to = tile + part * row_bytes<columns>;
        if (whole) load_all_rows<loaded_rows<rows>, columns>(to, from, first_row + part);
        else load_some_rows<loaded_rows<rows>, columns>(to, from, first_row + part, [&](int row) { return keep(part + row); });
    });
}

// The 16-row parts of a float32 tile that this warp has loaded.
template <int rows, int columns>
__device__ __forceinline__ void split_tile(TileAt tile, int first_warp) {
    for_parts<rows>(first_warp, [&](int row) { split_rows<columns>(tile.tile + row * row_bytes<columns>, tile.units + row / 16 * unit_bytes); });
}

// Waits for this thread's copies into two tiles loaded together, of `rows` rows each, and does what they still need.
template <int rows, int columns, int columns_v>
__device__ __forceinline__ void finish_tiles(TileAt first, TileAt second) {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if constexpr (is_split) {
        __syncwarp();
        split_tile<rows, columns>(first, 0);
        split_tile<rows, columns_v>(second, rows / 16);
    }
}

// k and v of one key tile.  `partial`: there may be keys that do not exist or that no row sees.
__device__ __forceinline__ void load_key_tile(TileAt k, TileAt v, const Params& p, const Head& head, i64 first_key, bool partial) {
    const TileKeys keys = {p, head, first_key};
    const auto load = [&](bool whole) {
        load_tile_rows<cfg::block_n, cfg::head_dim>(k.tile, {head.k, p.k.row, p.head_dim}, first_key, 0, whole, [&](int row) { return keys.seen(row); });
        load_tile_rows<cfg::block_n, cfg::head_dim_v>(v.tile, {head.v, p.v.row, p.head_dim_v}, first_key, cfg::block_n / 16, whole,
                                                      [&](int row) { return keys.inside(row); });
    };
    if (cfg::whole_columns && !partial && !bias_hides_keys(p)) load(true);
    else load(false);
}
__device__ __forceinline__ void finish_key_tile(TileAt k, TileAt v) { finish_tiles<cfg::block_n, cfg::head_dim, cfg::head_dim_v>(k, v); }

// The statistics of one row tile: stat, delta and 1 / l.
__device__ __forceinline__ void load_row_numbers(u32 numbers, const Head& head, i64 first) {
    load_vector(numbers, head.stat + first);
    load_vector(numbers + stat_bytes, head.delta + first);
    if constexpr (split_stat) load_vector(numbers + 2 * stat_bytes, head.inverse + first);
}

// q, do and the statistics of one row tile.
__device__ __forceinline__ void load_row_tile(TileAt q, TileAt dout, u32 numbers, const Params& p, const Head& head, i32 tile) {
    const TileRows rows = {p, head, i64(tile) * cfg::block_m};
    const auto load = [&](bool whole) {
        const auto seeing = [&](int row) { return rows.seeing(row); };
        load_tile_rows<cfg::block_m, cfg::head_dim>(q.tile, {head.q, p.q.row, p.head_dim}, rows.first, 0, whole, seeing);
        load_tile_rows<cfg::block_m, cfg::head_dim_v>(dout.tile, {head.dout, p.dout.row, p.head_dim_v}, rows.first, cfg::block_m / 16, whole, seeing);
    };
    load_row_numbers(numbers, head, rows.first);
    if (cfg::whole_columns && rows.whole()) load(true);
    else load(false);
}

// The same for one half of the warps by the copy engine, a row at a time; all of them arrive at `arrived`, which counts the bytes.  False: rows
// or columns are missing, cp.async is under way, and they have yet to arrive.
__device__ __forceinline__ bool send_row_tile(TileAt q, TileAt dout, u32 numbers, const Params& p, const Head& head, i32 tile, u32 arrived) {
    constexpr int q_bytes = cfg::head_dim * int(sizeof(Elem)), do_bytes = cfg::head_dim_v * int(sizeof(Elem));
    constexpr int copies = 2 * cfg::block_m / query_warps;  // of rows, for each warp; the first three have a vector of numbers as well
    const TileRows rows = {p, head, i64(tile) * cfg::block_m};
    const i32 warp = __shfl_sync(~0u, query_warp(), 0), row = warp * copies % cfg::block_m;
    const bool of_q = warp < query_warps / 2;
    const i64 stride = (of_q ? p.q.row : p.dout.row) * i64(sizeof(Elem));
    const u8* from = reinterpret_cast<const u8*>(of_q ? head.q : head.dout) + (rows.first + row) * stride;
    const Acc* vector = (warp == 0 ? head.stat : warp == 1 ? head.delta : head.inverse) + rows.first;
    if (!cfg::whole_columns || !rows.whole()) {
        load_row_tile(q, dout, numbers, p, head, tile);
        return false;
    }
    const u32 to = of_q ? q.tile + row * qk_stride : dout.tile + row * v_stride;
    if (thread() % number_loaders == 0) ptx::mbarrier_arrive_expect(arrived, cfg::block_m * (q_bytes + do_bytes) + 3 * stat_bytes);
    else ptx::mbarrier_arrive(arrived);
    if (ptx::elected()) {
        if (warp < 3) ptx::bulk_load(numbers + warp * stat_bytes, vector, stat_bytes, arrived);
#pragma unroll
        for (int i = 0; i < copies; ++i) ptx::bulk_load(to + slot(i) * (of_q ? qk_stride : v_stride), from + i * stride, of_q ? q_bytes : do_bytes, arrived);
    }
    return true;
}
__device__ __forceinline__ void finish_row_tile(TileAt q, TileAt dout) { finish_tiles<cfg::block_m, cfg::head_dim, cfg::head_dim_v>(q, dout); }
