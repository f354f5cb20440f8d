// Global to shared memory, asynchronously, into rows with padding (sm80/bwd_fragments.cuh).
#pragma once
#include "attn/tile.cuh"
#include "ptx/opaque.cuh"
#include "sm80/bwd_head.cuh"
#include "sm80/bwd_layout.cuh"

namespace sm80 {

// What a load derives from its thread and strides is soon computed, and would otherwise be kept in registers from one row tile to the next.
__device__ __forceinline__ int thread() { return ptx::opaque(static_cast<i32>(threadIdx.x)); }

// Rows first_row ... of an array (rows, true_columns); columns beyond true_columns, and rows for which `keep(row of the tile)` is false,
// become zeros without being read.
template <int rows, int columns, class Keep>
__device__ __forceinline__ void load_some_rows(u32 tile, const Elem* data, i64 row_stride, i64 first_row, i32 true_columns, Keep keep) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
#pragma unroll 1
    for (int index = thread(); index < rows * chunks; index += threads) {
        const int row = index / chunks, column = index % chunks * chunk;
        const i32 valid = keep(row) ? max(0, min(16, (true_columns - column) * int(sizeof(Elem)))) : 0;
        const Elem* source = valid ? data + (first_row + row) * row_stride + column : data;
        copy_chunk<cfg::load_bytes>(tile + row * row_bytes<columns> + column * int(sizeof(Elem)), reinterpret_cast<const u8*>(source), valid);
    }
}

// The same when all rows and columns are there, at a few instructions per copy.
template <int rows, int columns>
__device__ __forceinline__ void load_all_rows(u32 tile, const Elem* data, i64 row_stride, i64 first_row) {
    constexpr int chunk = 16 / int(sizeof(Elem)), chunks = columns / chunk;
    constexpr int total = rows * chunks, steps = (total + threads - 1) / threads;
    const i64 stride = ptx::opaque(row_stride);
    const int first = thread();
    data += first_row * stride;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const int index = first + step * threads;
        if (total % threads && index >= total) break;
        const int row = index / chunks, column = index % chunks * chunk;
        ptx::cp_async<16>(tile + row * row_bytes<columns> + column * int(sizeof(Elem)), data + row * stride + column, 16);
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
        const unsigned char* from = tile + row * row_bytes<columns> + column * int(sizeof(Elem));
        Elem* to = data + (first_row + row) * row_stride + column;
        if (whole && column < true_columns) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int i = 0; i < chunk && column + i < true_columns; ++i) to[i] = reinterpret_cast<const Elem*>(from)[i];
        }
    }
}

// block_m consecutive accumulators, 16-byte aligned.
__device__ __forceinline__ void load_vector(u32 to, const Acc* from) {
    constexpr int chunks = cfg::block_m * int(sizeof(Acc)) / 16;
    for (int i = thread(); i < chunks; i += threads) ptx::cp_async<16>(to + i * 16, reinterpret_cast<const u8*>(from) + i * 16, 16);
}

// k and v of one key tile.  Keys that no row sees are loaded as zeros: 0 * NaN in dS K would reach dQ.  `partial`: there may be such keys.
__device__ __forceinline__ void load_key_tile(u32 k, u32 v, const Params& p, const Head& head, i64 first_key, bool partial) {
    if (cfg::whole_columns && !partial) {
        load_all_rows<cfg::block_n, cfg::head_dim>(k, head.k, p.k.row, first_key);
        load_all_rows<cfg::block_n, cfg::head_dim_v>(v, head.v, p.v.row, first_key);
    } else {
        auto inside = [&](int row) { return first_key + row < p.n_keys; };
        auto alive = [&](int row) {
            const i32 key = static_cast<i32>(first_key) + row;
            return inside(row) && band_sees(p, key) && key_alive(p, head.instance, key);
        };
        load_some_rows<cfg::block_n, cfg::head_dim>(k, head.k, p.k.row, first_key, p.head_dim, alive);
        load_some_rows<cfg::block_n, cfg::head_dim_v>(v, head.v, p.v.row, first_key, p.head_dim_v, inside);
    }
}

// q, do and the statistics of one row tile.  Rows that see nothing are loaded as zeros: they would reach dK and dV by 0 * NaN.
__device__ __forceinline__ void load_row_tile(u32 q, u32 dout, u32 numbers, const Params& p, const Head& head, i32 tile) {
    const i64 first = i64(tile) * cfg::block_m;
    const Acc* stats = head.stat + first;
    load_vector(numbers, stats);
    load_vector(numbers + stat_bytes, head.delta + first);
    if constexpr (split_stat) load_vector(numbers + 2 * stat_bytes, head.inverse + first);
    const bool some_empty = head.has_empty_rows && head.empty_groups[first / kStatRows];
    if (cfg::whole_columns && first + cfg::block_m <= p.n_queries && !some_empty) {
        load_all_rows<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, first);
        load_all_rows<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, first);
    } else {
        auto seen = [&](int row) { return first + row < p.n_queries && !(some_empty && is_empty_row(stats[row])); };
        load_some_rows<cfg::block_m, cfg::head_dim>(q, head.q, p.q.row, first, p.head_dim, seen);
        load_some_rows<cfg::block_m, cfg::head_dim_v>(dout, head.dout, p.dout.row, first, p.head_dim_v, seen);
    }
}

}  // namespace sm80
