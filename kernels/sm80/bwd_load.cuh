// Global to shared memory, asynchronously, into rows with padding (sm80/bwd_fragments.cuh).
#pragma once
#include "sm80/tile.cuh"
#include "attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "ptx/tma.cuh"
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_layout.cuh"
#include "sm80/bwd_split.cuh"

namespace sm80 {

// What a load derives from its thread and strides is soon computed, and would otherwise be kept in registers from one row tile to the next.
__device__ __forceinline__ int thread() { return ptx::opaque(static_cast<i32>(threadIdx.x)); }

// float32 tiles are split (sm80/bwd_split.cuh) before anybody reads them, 16 rows by the warp that has loaded them, which so need not wait
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

// Rows first_row ... of an array (rows, true_columns); columns beyond true_columns, and rows for which `keep(row of the tile)` is false,
// become zeros without being read.
template <int rows, int columns, class Keep>
__device__ __forceinline__ void load_some_rows(u32 tile, const Elem* data, i64 row_stride, i64 first_row, i32 true_columns, Keep keep) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
#pragma unroll 1
    for (int index = thread() % loaders; index < rows * chunks; index += loaders) {
        const int row = index / chunks, column = index % chunks * chunk;
        const i32 valid = keep(row) ? max(0, min(16, (true_columns - column) * int(sizeof(Elem)))) : 0;
        const Elem* source = valid ? data + (first_row + row) * row_stride + column : data;
        copy_chunk<cfg::load_bytes>(tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem)), reinterpret_cast<const u8*>(source), valid);
    }
}

// The same when all rows and columns are there, at a few instructions per copy: where every step is a whole number of rows on, an addition
// and the copy itself.
template <int rows, int columns>
__device__ __forceinline__ void load_all_rows(u32 tile, const Elem* data, i64 row_stride, i64 first_row) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
    constexpr int total = rows * chunks, steps = (total + loaders - 1) / loaders;
    const i64 stride = ptx::opaque(row_stride);
    const int first = thread() % loaders;
    data += first_row * stride;
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

// The way back: the tile's rows first_row ... row_end - 1, true_columns of each.
template <int rows, int columns>
__device__ __forceinline__ void save_rows(const unsigned char* tile, Elem* data, i64 row_stride, i64 first_row, i64 row_end, i32 true_columns) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
    const bool whole = true_columns % chunk == 0 && row_stride % chunk == 0;
#pragma unroll 1
    for (int index = threadIdx.x; index < rows * chunks; index += threads) {
        const int row = index / chunks, column = index % chunks * chunk;
        if (first_row + row >= row_end) break;
        const unsigned char* from = tile + slot(row) * row_bytes<columns> + column * int(sizeof(Elem));
        Elem* to = data + (first_row + row) * row_stride + column;
        if (whole && column < true_columns) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int i = 0; i < chunk && column + i < true_columns; ++i) to[i] = reinterpret_cast<const Elem*>(from)[i];
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

    __device__ __forceinline__ bool some_empty() const { return head.has_empty_rows && head.row_flags[first / kStatRows] & kEmptyRows; }
    __device__ __forceinline__ bool whole() const { return first + cfg::block_m <= p.n_queries && !some_empty(); }
    __device__ __forceinline__ bool seeing(int row) const {
        return first + row < p.n_queries && !(head.has_empty_rows && is_empty_row(head.stat[first + row]));
    }
};

// A tile of which all rows and columns exist, or the rows for which `keep(row of the tile)` is true.
template <int rows, int columns>
__device__ __forceinline__ void load_whole_tile(u32 tile, const Elem* data, i64 row_stride, i64 first_row, int first_warp) {
    for_parts<rows>(first_warp, [&](int row) {
        load_all_rows<loaded_rows<rows>, columns>(tile + row * row_bytes<columns>, data, row_stride, first_row + row);
    });
}
template <int rows, int columns, class Keep>
__device__ __forceinline__ void load_some_tile(u32 tile, const Elem* data, i64 row_stride, i64 first_row, i32 true_columns, int first_warp, Keep keep) {
    for_parts<rows>(first_warp, [&](int part) {
        load_some_rows<loaded_rows<rows>, columns>(tile + part * row_bytes<columns>, data, row_stride, first_row + part, true_columns,
                                                   [&](int row) { return keep(part + row); });
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
__device__ __forceinline__ void load_key_tile(u32 k, u32 v, const Params& p, const Head& head, i64 first_key, bool partial) {
    if (cfg::whole_columns && !partial && !bias_hides_keys(p)) {
        load_whole_tile<cfg::block_n, cfg::head_dim>(k, head.k, p.k.row, first_key, 0);
        load_whole_tile<cfg::block_n, cfg::head_dim_v>(v, head.v, p.v.row, first_key, cfg::block_n / 16);
    } else {
        const TileKeys keys = {p, head, first_key};
        load_some_tile<cfg::block_n, cfg::head_dim>(k, head.k, p.k.row, first_key, p.head_dim, 0, [&](int row) { return keys.seen(row); });
        load_some_tile<cfg::block_n, cfg::head_dim_v>(v, head.v, p.v.row, first_key, p.head_dim_v, cfg::block_n / 16,
                                                      [&](int row) { return keys.inside(row); });
    }
}
__device__ __forceinline__ void finish_key_tile(TileAt k, TileAt v) { finish_tiles<cfg::block_n, cfg::head_dim, cfg::head_dim_v>(k, v); }

// The statistics of one row tile: stat, delta and 1 / l.
__device__ __forceinline__ void load_row_numbers(u32 numbers, const Head& head, i64 first) {
    load_vector(numbers, head.stat + first);
    load_vector(numbers + stat_bytes, head.delta + first);
    if constexpr (split_stat) load_vector(numbers + 2 * stat_bytes, head.inverse + first);
}

// q, do and the statistics of one row tile.
__device__ __forceinline__ void load_row_tile(u32 q, u32 dout, u32 numbers, const Params& p, const Head& head, i32 tile) {
    const TileRows rows = {p, head, i64(tile) * cfg::block_m};
    load_row_numbers(numbers, head, rows.first);
    if (cfg::whole_columns && rows.whole()) {
        load_whole_tile<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, rows.first, 0);
        load_whole_tile<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, rows.first, cfg::block_m / 16);
    } else {
        const auto seeing = [&](int row) { return rows.seeing(row); };
        load_some_tile<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, rows.first, p.head_dim, 0, seeing);
        load_some_tile<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, rows.first, p.head_dim_v, cfg::block_m / 16, seeing);
    }
}

// The same for one half of the warps by the copy engine, a row at a time; all of them arrive at `arrived`, which counts the bytes.  False: rows
// or columns are missing, cp.async is under way, and they have yet to arrive.
__device__ __forceinline__ bool send_row_tile(u32 q, u32 dout, u32 numbers, const Params& p, const Head& head, i32 tile, u32 arrived) {
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
    const u32 to = of_q ? q + row * qk_stride : dout + row * v_stride;
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

}  // namespace sm80
