// The one argument of every attention kernel, mirrored field by field by the NumPy dtype in cuattn/cuda/params.py.
//
// Strides are in elements and may be negative or 0 (a broadcast axis); offsets are 64 bits wide everywhere.
#pragma once
#include "attn/functions.cuh"
#include "ptx/types.cuh"

constexpr int kBatchAxes = 4;  // leading axes that remain after neighbours with matching strides were merged

// An array (batch axes..., heads, rows, columns).  Fields a kernel does not use hold a null pointer.
struct Operand {
    void* data;
    i64 batch[kBatchAxes];  // outermost axis first
    i64 head, row, col;
};

// A row tile in the order of work, and the first and the last key tile that column masks let it see.
struct alignas(16) OrderedTile {
    i32 tile, lowest, top;
};

// Tables made from all masks together.  "Instance" counts the distinct matrices: batch * head without the axes along which every mask is
// broadcast.
struct MaskTables {
    const int4* cols;           // column: [instance][mask][keys_padded] {lts, lte, uts, ute}, clamped; of keys that no row sees (0, n_queries, n_queries, 0)
    const int4* bounds;         // column: [instance][key_tiles][mask][2] {skip a, skip b, partial p, partial q} of each interval, in row tiles
    const OrderedTile* order;   // column: [instance][row tiles as they are worked on], most visible key tiles first
    const u32* alive;           // boolean, block, function: [instance][n_keys / 32] a bit per key, 1 = some row sees the key
    const u64* bits;            // boolean: [instance][n_queries / 64][key_tiles][block_n] which of 64 rows see a key
    const u32* states;          // boolean, function: [instance][row tiles / 4][key_tiles / 4] see attn/mask_format.cuh
    i64 batch[kBatchAxes];      // instance strides, 0 on a broadcast axis
    i64 head;
    i64 bits_instance, bits_row, bits_tile, states_instance;  // strides; 0 from 64 rows to the next, or from tile to tile, where all are the same
    i32 keys_padded;            // keys rounded up to the key tile
    i32 block_m, block_n;       // block: rows and keys per block
};

// A mask function's matrices: b and h of the first, and how many differ in h alone.
struct MatrixPlace {
    i32 first_b, first_h, heads;
};

// Philox4x32-7 dropout (the contract is in cuattn/rng.py).
struct Dropout {
    u32 keys[7][2];           // round keys: seed + r * Weyl constants
    u32 offset;               // used when offset_data is null
    u32 batch, head, heads;   // flat index b = (batch + ib) * heads + head + ih
    u32 row, key;             // global index of the first row and key, multiples of 16
    const u32* offset_data;   // the low word of an integer in device memory, or null
    const i32 *row_blocks, *key_blocks;  // cfg::runs: global index of the first of every 16 rows, of every 16 keys; null: from row or key on
};

struct CoreParams {
    Operand q, k, v, o, l, m;                  // o: cfg::out (forward), cfg::o_elem (backward); l, m: cfg::acc, col unused, null = not wanted
    Operand dout, dlse, dq, dk, dv;            // backward; dlse: cfg::acc, col unused, null = none; dq, dk, dv: cfg::grad
    Operand bias, dbias;                       // col, row: 0 where broadcast
    Operand mask, boolean;                     // u8: the blocks of a block mask; the elements of a boolean one
    Operand function;                          // i32: the indices of rows, and behind them of keys, that a mask function knows; strides count matrices
    MaskTables table;
    Dropout dropout;
    // Workspace, contiguous.  Forward with splits: [split][batch][head][row]([head_dim_v]), and a counter per row tile that is 0 between
    // launches where the last block merges.  Backward: see kernels/attn/bwd_workspace.cuh.
    void *o_part, *l_part, *m_part;
    void *delta, *stat, *dq_acc, *dk_acc, *dv_acc, *dbias_acc;
    i32 *counters, *ticket, *turns;
    double scale, softcap, cap_scale;          // s = softcap * tanh(cap_scale * q.k); cap_scale = scale / softcap
    double dropout_scale;                      // 65536 / (65536 - T)
    i32 batch_size[kBatchAxes];                // outermost first, unused axes 1
    i32 batch, heads, kv_heads, group;         // batch = product of batch_size; query head h reads k, v head h / group
    i32 n_queries, n_keys, head_dim, head_dim_v;
    i32 band_left, band_right;                 // key j is visible to row i when i - left <= j <= i + right; both from -2^30 to 2^30
    i32 row_tiles, key_tiles;                  // of cfg::block_m rows and cfg::block_n keys
    i32 section;                               // batch-heads that are worked on side by side (their k and v share the L2 cache)
    i32 splits, split_tiles;                   // forward: parts of the key axis and key tiles in each; backward: sm80/bwd.cu and sm90/bwd_layout.cuh
    i32 shared_tile, shared_key;               // backward: first key tile, and its first key, that several blocks share (counted through all heads); forward: first row tile in parts
    i32 bias_instances;                        // distinct biases: the product of its own leading axes
    MatrixPlace matrices;
};

// Without a score or mask function nothing follows.
struct Params : CoreParams, traced::Arguments, traced::mask::Arguments {};

// Indices along the batch axes of flat batch number ib.
struct BatchIndex {
    i32 at[kBatchAxes];
};

// a / b; most divisors are 1, and a division takes a hundred clocks, often before the first load.
__device__ __forceinline__ i32 quotient(i32 a, i32 b) { return b == 1 ? a : a / b; }

__device__ __forceinline__ BatchIndex batch_index(const Params& p, i32 ib) {
    BatchIndex index;
#pragma unroll
    for (int axis = kBatchAxes - 1; axis > 0; --axis) {
        const i32 outer = quotient(ib, p.batch_size[axis]);
        index.at[axis] = ib - outer * p.batch_size[axis];
        ib = outer;
    }
    index.at[0] = ib;
    return index;
}

// Element offset of (batch, head, 0, 0), from the strides of an Operand or the instance strides of MaskTables.
template <class Strides>
__device__ __forceinline__ i64 slice_offset(const Strides& strides, const BatchIndex& index, i32 head) {
    i64 offset = strides.head * head;
#pragma unroll
    for (int axis = 0; axis < kBatchAxes; ++axis) offset += strides.batch[axis] * index.at[axis];
    return offset;
}
