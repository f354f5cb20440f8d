// Gradients of attention for heads too wide for bwd.cu and bwd_rows.cu: like them, but a block owns cfg::part columns of dV, dK or dQ only,
// and all operands come in by chunks of columns (sm80/bwd_stream.cuh).  S and dP are computed again for every part; no atomics.
//
// Shared memory   two stages of the stream   stat, delta, 1 / l [block_m]   p or ds [block_m][block_n]   its units (float32)
// Grid            parts * tiles * heads * batch, parts fastest; backward_wide_keys has the parts of dV first, then those of dK
#include "sm80/bwd_stream.cuh"

constexpr int numbers_at = 2 * stage_bytes;
constexpr int weights_at = numbers_at + row_numbers;
constexpr int weight_units_at = weights_at + cfg::block_m * p_stride;

constexpr int part_chunks = cfg::part / cfg::chunk;
constexpr int v_parts = (cfg::head_dim_v + cfg::part - 1) / cfg::part, qk_parts = (cfg::head_dim + cfg::part - 1) / cfg::part;

__device__ __forceinline__ TileAt weights(u32 shared) { return {shared + weights_at, shared + weight_units_at}; }

// Splits the block's number: `parts` of each tile, tiles of each head.
struct Work {
    i32 part, tile, flat;

    __device__ __forceinline__ Work(int parts, i32 tiles) {
        const i32 block = ptx::opaque(static_cast<i32>(blockIdx.x));
        part = block % parts, tile = block / parts % tiles, flat = block / parts / tiles;
    }
};

// dK and dV: teams of warps own 32 keys, the warps of a team some columns of every chunk.
constexpr int key_columns = cfg::chunk / slices;
using KeyResults = Acc[part_chunks][team_keys / 16][key_columns / 8][4];
__device__ __forceinline__ i32 warp_key() { return threadIdx.x / 32 / slices * team_keys; }
__device__ __forceinline__ i32 warp_key_column() { return threadIdx.x / 32 % slices * key_columns; }

// dQ: warps share the rows, and the columns of every chunk.
using QueryResults = Acc[part_chunks][Queries::rows / 16][Queries::columns / 8][4];

// Adds one pair of tiles to dV or dK.
__device__ __forceinline__ void add_rows(KeyResults& acc, u32 shared, const Params& p, const Head& head, const RowWalk& walk, const Columns& own, bool is_k) {
    const TilePlace at = {shared + numbers_at, walk.tile * cfg::block_m, walk.first_key(), walk.partial(p)};
    Stream<false> stream(p, head, shared, at, is_k, own, part_chunks);
    Scores s, slope;
    find_p(s, slope, stream, at, p, head);
    if (is_k) {
        Scores ds;
        find_ds<false, false>(ds, s, slope, stream, at, {});
        store_ds(weights(shared), ds);
    } else {
        store_p(weights(shared), s);
    }
    __syncthreads();  // P or dS is complete
    unroll<part_chunks>([&](int chunk) {
        add_product<cfg::block_m, Along::rows, p_stride, Along::rows, chunk_stride>(  // line 16 or 22
            acc[chunk], part_of_weights(weights(shared), 0, warp_key()), part_of_rows<chunk_stride>(stream.own_tile(), 0, warp_key_column()));
        stream.advance();
    });
}

// Adds one pair of tiles to dQ.
__device__ __forceinline__ void add_keys(QueryResults& acc, u32 shared, const Params& p, const Head& head, const Rows& rows, const Tile& tile, const Columns& own) {
    const TilePlace at = {shared + numbers_at, rows.first, tile.n() * cfg::block_n, tile.partial()};
    Stream<true> stream(p, head, shared, at, true, own, part_chunks);
    scores_to_shared<false>(stream, at, p, head, {}, weights(shared));
    __syncthreads();  // dS is complete
    unroll<part_chunks>([&](int chunk) {
        add_product<cfg::block_n, Along::columns, p_stride, Along::rows, chunk_stride>(  // line 21
            acc[chunk], part_of_weights(weights(shared), Queries::row(), 0), part_of_rows<chunk_stride>(stream.own_tile(), 0, Queries::column()));
        stream.advance();
    });
}

// A part of a gradient to memory; `summed`: its operand was broadcast.
template <bool summed, class Results>
__device__ __forceinline__ void store(const Params& p, const Operand& gradient, void* workspace, Results& acc, i32 flat, i32 heads, i64 first_row,
                                      i32 rows, i32 first_column, i32 columns, Acc factor) {
    using Out = typename Either<summed, Acc, cfg::grad>::type;
    const auto to = gradient_rows<Out>(gradient, batch_index(p, flat / heads), flat % heads, columns, summed, workspace, i64(flat) * rows);
    unroll<part_chunks>([&](int chunk) { to.store(acc[chunk], first_row, rows, first_column + chunk * cfg::chunk, factor); });
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) backward_wide_keys(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    const u32 shared = ptx::shared_address(memory);
    const Work work(v_parts + qk_parts, p.key_tiles);
    const bool is_k = work.part >= v_parts;
    const i32 first_column = (work.part - (is_k ? v_parts : 0)) * cfg::part;
    KeyResults acc = {};
    for (i32 member = 0; member < p.group; ++member) {
        describe_head(head, p, work.flat / p.kv_heads, work.flat % p.kv_heads * p.group + member);
        if (threadIdx.x == 0) describe_walk(head, p, work.tile);
        __syncthreads();  // head is complete
        const Columns own = (is_k ? Columns{head.q, p.q.row, p.head_dim} : Columns{head.dout, p.dout.row, p.head_dim_v}).from(first_column);
        RowWalk walk(p, head.walk);
        while (walk.next(p)) add_rows(acc, shared, p, head, walk, own, is_k);
    }
    const i64 key = i64(work.tile) * cfg::block_n + warp_key();
    const i32 column = first_column + warp_key_column();
    if (is_k)
        store<cfg::sum_dk>(p, p.dk, p.dk_acc, acc, work.flat, p.kv_heads, key, p.n_keys, column, p.head_dim, Acc(p.scale * p.dropout_scale));
    else
        store<cfg::sum_dv>(p, p.dv, p.dv_acc, acc, work.flat, p.kv_heads, key, p.n_keys, column, p.head_dim_v, Acc(p.dropout_scale));
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) backward_wide_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    __shared__ MaskPlace place;
    const u32 shared = ptx::shared_address(memory);
    const Work work(qk_parts, p.row_tiles);
    describe_head(head, p, work.flat / p.heads, work.flat % p.heads);
    if (threadIdx.x == 0) describe_rows(place, p, head, work.tile);
    __syncthreads();  // head and place are complete
    const Columns own = Columns{head.k, p.k.row, p.head_dim}.from(work.part * cfg::part);
    QueryResults acc = {};
    TileWalk walk(p, place, p.key_tiles);
    for (Tile tile = walk.next(); tile.exists(); tile = walk.next()) add_keys(acc, shared, p, head, place.rows, tile, own);
    const i64 row = i64(work.tile) * cfg::block_m + Queries::row();
    const i32 column = work.part * cfg::part + Queries::column();
    store<cfg::sum_dq>(p, p.dq, p.dq_acc, acc, work.flat, p.heads, row, p.n_queries, column, p.head_dim, Acc(p.scale * p.dropout_scale));
}
