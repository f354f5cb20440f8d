// dK and dV of one block on their way to memory: over very many rows in parts, from blocks that share their keys, and at the end.
#pragma once
#include "ptx/global.cuh"
#include "sm80/bwd_keys.cuh"

namespace sm80 {

// Over very many rows sums lose digits: after every cfg::flush_every row tiles (0: never) a warp adds its part of dV or dK to the result in
// memory, where nobody else adds, and starts anew.  This calls use(memory, sum) for all sums of a lane.
template <class Use>
__device__ __forceinline__ void visit_memory(KeyGradients& acc, const Params& p, const Slice& slice, const Use& use) {
    const i32 own = ptx::opaque(static_cast<i32>(threadIdx.x)) % 32, flat_head = flat_kv_head(p);
    const Operand& gradient = slice.is_k ? p.dk : p.dv;
    const bool summed = slice.is_k ? cfg::sum_dk : cfg::sum_dv;
    const i32 columns = slice.is_k ? p.head_dim : p.head_dim_v, first_column = slice.column + own % 4 * 2;
    const i64 stride = summed ? columns : gradient.row;
    Acc* const data = summed ? static_cast<Acc*>(slice.is_k ? p.dk_acc : p.dv_acc) + i64(flat_head) * p.n_keys * columns
                             : static_cast<Acc*>(gradient.data) + slice_offset(gradient, batch_index(p, flat_head / p.kv_heads), flat_head % p.kv_heads);
#pragma unroll
    for (int m = 0; m < team_keys / 16; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const i32 key = key_tile(p) * cfg::block_n + slice.team * team_keys + 16 * m + 8 * half + own / 4;
            __syncwarp();  // loads are not moved ahead of this, and their registers with them
            if (key >= p.n_keys) continue;  // its sums are never looked at
            Acc* const row = data + key * stride + first_column;
#pragma unroll
            for (int i = 0; i < 2 * slice_tiles; ++i) {
                const i32 column = i / 2 * 8 + i % 2;
                if (whole_slices || first_column + column < columns) use(row + column, acc[m][i / 2][2 * half + i % 2]);
            }
        }
}

__device__ __forceinline__ void start_flushes(KeyGradients& acc, const Params& p, const Slice& slice) {
    if (cfg::flush_every > 0 && !shares(p)) visit_memory(acc, p, slice, [](Acc* at, Acc) { *at = 0; });
}

// Before row tile number `tile` of the block is added; group: of cfg::flush_every tiles, the one added to last, or -1.  Groups are the same for
// all masks.
__device__ __forceinline__ void flush(KeyGradients& acc, const Params& p, const Slice& slice, i32& group, i32 tile) {
    if constexpr (cfg::flush_every > 0) {
        const i32 next = tile / cfg::flush_every;
        if (group >= 0 && group != next) {
            visit_memory(acc, p, slice, [](Acc* at, Acc& sum) {
                ptx::red_add(at, sum);
                ptx::set_zero(sum);
            });
        }
        group = shares(p) ? -1 : next;  // a block that shares its keys has few rows
    }
}

__device__ __forceinline__ void add_flushed(KeyGradients& acc, const Params& p, const Slice& slice) {
    if constexpr (cfg::flush_every > 0) visit_memory(acc, p, slice, [](const Acc* at, Acc& sum) { sum += __ldcg(at); });
}

// The scale of dropout, and of dK.
__device__ __forceinline__ Acc last_factor(const Params& p, const Slice& slice) {
    return Acc(slice.is_k ? p.scale * p.dropout_scale : p.dropout_scale);
}

// Line 24 by a block that shares its keys.
__device__ __forceinline__ void add_shared(KeyGradients& acc, const Params& p, const Slice& slice) {
    scale_by(acc, last_factor(p, slice));
    visit_memory(acc, p, slice, [](Acc* at, Acc sum) { ptx::red_add(at, sum); });
}

// This warp's columns of dV or dK, over the tile of v or k.
__device__ __forceinline__ void keys_to_shared(u32 shared, KeyGradients& acc, const Slice& slice, Acc factor) {
    scale_by(acc, factor);
    const u32 column = slice.column * int(sizeof(Elem)), key = slice.team * team_keys;
    if (slice.is_k)
        store_rounded<qk_stride, false>(shared + k_at + key * qk_stride + column, acc, cfg::head_dim - slice.column);
    else
        store_rounded<v_stride, false>(shared + v_at + key * v_stride + column, acc, cfg::head_dim_v - slice.column);
}

// Algorithm 4 line 24.  A sum over axes that k or v was broadcast along is still to come: then unrounded, to the workspace.
__device__ __forceinline__ void store_keys(const unsigned char* memory, u32 shared, const Params& p, const Slice& slice,
                                            KeyGradients& acc) {
    const i32 flat_head = flat_kv_head(p), kv_head = flat_head % p.kv_heads;
    const BatchIndex index = batch_index(p, flat_head / p.kv_heads);
    const Acc factor = last_factor(p, slice);
    const i32 first_key = key_tile(p) * cfg::block_n;
    const i64 flat = i64(flat_head) * p.n_keys;
    if (slice.is_k ? cfg::sum_dk : cfg::sum_dv) {
        const i32 columns = slice.is_k ? p.head_dim : p.head_dim_v;
        Acc* out = static_cast<Acc*>(slice.is_k ? p.dk_acc : p.dv_acc) + flat * columns;
        store_results(out, columns, acc, first_key + slice.team * team_keys, p.n_keys, slice.column, columns, factor);
    }
    if constexpr (!gradients_in_elements) {
        const Operand& gradient = slice.is_k ? p.dk : p.dv;
        if (!(slice.is_k ? cfg::sum_dk : cfg::sum_dv))
            store_results(static_cast<cfg::grad*>(gradient.data) + slice_offset(gradient, index, kv_head), gradient.row, acc,
                          first_key + slice.team * team_keys, p.n_keys, slice.column, slice.is_k ? p.head_dim : p.head_dim_v, factor);
        return;
    }
    if (cfg::sum_dk && cfg::sum_dv) return;
    keys_to_shared(shared, acc, slice, factor);
    __syncthreads();  // dK and dV are complete
    if (!cfg::sum_dk) {
        Elem* dk = static_cast<Elem*>(p.dk.data) + slice_offset(p.dk, index, kv_head);
        save_rows<cfg::block_n, cfg::head_dim>(memory + k_at, dk, p.dk.row, first_key, p.n_keys, p.head_dim);
    }
    if (!cfg::sum_dv) {
        Elem* dv = static_cast<Elem*>(p.dv.data) + slice_offset(p.dv, index, kv_head);
        save_rows<cfg::block_n, cfg::head_dim_v>(memory + v_at, dv, p.dv.row, first_key, p.n_keys, p.head_dim_v);
    }
}
}  // namespace sm80
