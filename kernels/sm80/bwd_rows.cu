// dQ for one tile of query rows at a time, in a fixed order: the deterministic partner of kernels/sm80/bwd.cu.
//
//   dQ = scale dS K,   dS = P (dP - D),   P = exp(S - m) / l,   dP = dO V^T
//
// One block owns the rows of one tile of one query head and walks over the key tiles that they see, last one first.  dQ stays in
// registers; S and dP are computed a second time (Algorithm 4 lines 11-20), which costs less than ordering additions in memory.
//
// Shared memory   q [block_m][d]   do [block_m][dv]   k [stages][block_n][d]   v [stages][block_n][dv]   ds [block_m][block_n]
//                 stat, delta [block_m]   units (float32: sm80/bwd_split.cuh)
// Grid            row tiles * heads * batch, tiles fastest
#include "sm80/bwd_load.cuh"
#include "sm80/bwd_queries.cuh"
#include "sm80/bwd_scores.cuh"

namespace sm80 {
namespace rows {

constexpr int q_at = 0;
constexpr int do_at = q_at + cfg::block_m * qk_stride;
constexpr int k_at = do_at + cfg::block_m * v_stride;
constexpr int v_at = k_at + cfg::stages * cfg::block_n * qk_stride;
constexpr int ds_at = v_at + cfg::stages * cfg::block_n * v_stride;
constexpr int stat_at = ds_at + cfg::block_m * p_stride;
constexpr int q_units_at = stat_at + row_numbers;
constexpr int do_units_at = q_units_at + row_units;
constexpr int k_units_at = do_units_at + row_units;
constexpr int v_units_at = k_units_at + cfg::stages * key_units;
constexpr int ds_units_at = v_units_at + cfg::stages * key_units;
constexpr int exchange_at = ds_units_at + weight_units;
constexpr int shared_bytes = exchange_at + exchange_bytes;

constexpr int tiles_m = query_rows / 16, tiles_n = query_columns / 8;
using QueryGradients = Acc[tiles_m][tiles_n][4];

__device__ __forceinline__ void load_keys(u32 shared, const Params& p, const Head& head, const Tile& tile, int stage) {
    const int row = stage * cfg::block_n;
    load_key_tile(shared + k_at + row * qk_stride, shared + v_at + row * v_stride, p, head, i64(tile.n()) * cfg::block_n, tile.partial());
}

__device__ __forceinline__ TileAt tile_k(u32 shared, int stage) {
    return {shared + k_at + stage * cfg::block_n * qk_stride, shared + k_units_at + stage * key_units};
}
__device__ __forceinline__ TileAt tile_v(u32 shared, int stage) {
    return {shared + v_at + stage * cfg::block_n * v_stride, shared + v_units_at + stage * key_units};
}

// Waits for the keys of `tile` and starts loading those of `next`.
__device__ __forceinline__ void next_keys(u32 shared, const Params& p, const Head& head, const Tile& tile, const Tile& next, int stage) {
    if constexpr (cfg::stages == 2) {
        finish_key_tile(tile_k(shared, stage), tile_v(shared, stage));
        __syncthreads();  // this stage has arrived; the other one and dS are free
        if (next.exists()) load_keys(shared, p, head, next, stage ^ 1);
        ptx::cp_async_commit();
    } else {
        __syncthreads();  // k, v and dS are free
        load_keys(shared, p, head, tile, 0);
        ptx::cp_async_commit();
        finish_key_tile(tile_k(shared, 0), tile_v(shared, 0));
        __syncthreads();  // k and v have arrived
    }
}

__device__ __forceinline__ void store_queries(unsigned char* memory, u32 shared, const Params& p, i32 row_tile, i32 flat, QueryGradients& dq) {
    const Acc factor = Acc(p.scale * p.dropout_scale);
    const i64 first = i64(row_tile) * cfg::block_m;
    if constexpr (cfg::sum_dq) {
        Acc* out = static_cast<Acc*>(p.dq_acc) + i64(flat) * p.n_queries * p.head_dim;
        store_results(out, p.head_dim, dq, first + warp_query_row(), p.n_queries, warp_query_column(), p.head_dim, factor);
    } else if constexpr (!gradients_in_elements) {
        cfg::grad* out = static_cast<cfg::grad*>(p.dq.data) + slice_offset(p.dq, batch_index(p, flat / p.heads), flat % p.heads);
        store_results(out, p.dq.row, dq, first + warp_query_row(), p.n_queries, warp_query_column(), p.head_dim, factor);
    } else {
        scale_by(dq, factor);
        store_rounded<qk_stride, false>(shared + q_at + warp_query_row() * qk_stride + warp_query_column() * int(sizeof(Elem)), dq);
        __syncthreads();  // dQ is complete
        const BatchIndex index = batch_index(p, flat / p.heads);
        Elem* out = static_cast<Elem*>(p.dq.data) + slice_offset(p.dq, index, flat % p.heads);
        save_rows<cfg::block_m, cfg::head_dim>(memory + q_at, out, p.dq.row, first, p.n_queries, p.head_dim);
    }
}

}  // namespace rows
}  // namespace sm80

extern "C" __global__ void __launch_bounds__(sm80::threads, cfg::blocks_per_sm) backward_rows(const __grid_constant__ Params p) {
    using namespace sm80;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    __shared__ MaskPlace place;
    const u32 shared = ptx::shared_address(memory);
    const i32 row_tile = blockIdx.x % p.row_tiles, flat = blockIdx.x / p.row_tiles;
    describe_head(head, p, flat / p.heads, flat % p.heads);
    if (threadIdx.x == 0) describe_rows(place, p, head, row_tile);
    __syncthreads();  // head and place are complete

    rows::QueryGradients dq;
    clear(dq);
    TileWalk walk(p, place, p.key_tiles);
    Tile tile = walk.next();
    load_row_tile(shared + rows::q_at, shared + rows::do_at, shared + rows::stat_at, p, head, row_tile);
    const TileAt q = {shared + rows::q_at, shared + rows::q_units_at}, dout = {shared + rows::do_at, shared + rows::do_units_at};
    const TileAt ds = {shared + rows::ds_at, shared + rows::ds_units_at};
    if constexpr (is_split) finish_row_tile(q, dout);
    if (cfg::stages == 2 && tile.exists()) rows::load_keys(shared, p, head, tile, 0);
    ptx::cp_async_commit();
    for (int stage = 0; tile.exists(); stage = (stage + 1) % cfg::stages) {
        const Tile next = walk.next();
        rows::next_keys(shared, p, head, tile, next, stage);
        const TileAt k = rows::tile_k(shared, stage);
        const WholeTiles tiles = {q, k, dout, rows::tile_v(shared, stage), shared + rows::exchange_at};
        const TilePlace at = {shared + rows::stat_at, place.rows.first, tile.n() * cfg::block_n, tile.partial()};
        scores_to_shared<false>(tiles, at, p, head, ds, ds);
        __syncthreads();  // dS is complete
        add_product<cfg::block_n, Along::columns, p_stride, Along::rows, qk_stride>(
            dq, part_of_weights(ds, warp_query_row(), 0), part_of_rows<qk_stride>(k, 0, warp_query_column()));  // line 21
        tile = next;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // q is free
    rows::store_queries(memory, shared, p, row_tile, flat, dq);
}
