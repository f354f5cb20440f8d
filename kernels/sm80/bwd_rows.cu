// dQ for one tile of query rows at a time, in a fixed order: the deterministic partner of kernels/sm80/bwd.cu.
//
//   dQ = scale dS K,   dS = P (dP - D),   P = exp(S - m) / l,   dP = dO V^T
//
// One block owns the rows of one tile of one query head and walks over the key tiles that they see, last one first.  dQ stays in
// registers; S and dP are computed a second time (Algorithm 4 lines 11-20), which costs less than ordering additions in memory.
//
// Shared memory   k [stages][block_n][d]   v [stages][block_n][dv]   q [block_m][d]   do [block_m][dv]   ds [block_m][block_n]
//                 stat, delta [block_m]   units (float32: sm80/bwd_tiles.cuh)
// Grid            row tiles * heads * batch, tiles fastest
#include "sm80/bwd_scores.cuh"

using RowSpace = Space<1, cfg::stages, false, 1>;
using QueryGradients = Acc[Queries::rows / 16][Queries::columns / 8][4];

__device__ __forceinline__ void load_keys(RowSpace space, const Params& p, const Head& head, const Tile& tile, int stage) {
    load_key_tile(space.k(stage), space.v(stage), p, head, i64(tile.n()) * cfg::block_n, tile.partial());
}

// Waits for the keys of `tile` and starts loading those of `next`.
__device__ __forceinline__ void next_keys(RowSpace space, const Params& p, const Head& head, const Tile& tile, const Tile& next, int stage) {
    constexpr bool two = cfg::stages == 2;
    if constexpr (two) finish_key_tile(space.k(stage), space.v(stage));
    __syncthreads();  // of two stages, this one has arrived; the other one, or the only one, and dS are free
    if (!two || next.exists()) load_keys(space, p, head, two ? next : tile, two ? stage ^ 1 : 0);
    ptx::cp_async_commit();
    if constexpr (!two) {
        finish_key_tile(space.k(), space.v());
        __syncthreads();  // k and v have arrived
    }
}

__device__ __forceinline__ void store_queries(unsigned char* memory, RowSpace space, const Params& p, i32 row_tile, i32 flat, QueryGradients& dq) {
    const Acc factor = Acc(p.scale * p.dropout_scale);
    const i64 first = i64(row_tile) * cfg::block_m;
    const auto to = gradient_rows<Either<cfg::sum_dq, Acc, cfg::grad>::type>(p.dq, batch_index(p, flat / p.heads), flat % p.heads, p.head_dim, cfg::sum_dq,
                                                                                   p.dq_acc, i64(flat) * p.n_queries);
    if constexpr (cfg::sum_dq || !gradients_in_elements) {
        to.store(dq, first + Queries::row(), p.n_queries, Queries::column(), factor);
    } else {
        scale_by(dq, factor);
        store_rounded<qk_stride, false>(part_of_rows<qk_stride>(space.q(), Queries::row(), Queries::column()).tile, dq);
        __syncthreads();  // dQ is complete
        save_rows<cfg::block_m, cfg::head_dim>(memory + RowSpace::q_at, to, first, p.n_queries);
    }
}

extern "C" __global__ void __launch_bounds__(threads, cfg::blocks_per_sm) backward_rows(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Head head;
    __shared__ MaskPlace place;
    const RowSpace space = {ptx::shared_address(memory)};
    const i32 row_tile = blockIdx.x % p.row_tiles, flat = blockIdx.x / p.row_tiles;
    describe_head(head, p, flat / p.heads, flat % p.heads);
    if (threadIdx.x == 0) describe_rows(place, p, head, row_tile);
    __syncthreads();  // head and place are complete

    QueryGradients dq = {};
    TileWalk walk(p, place, p.key_tiles);
    Tile tile = walk.next();
    load_row_tile(space.q(), space.dout(), space.numbers(), p, head, row_tile);
    if constexpr (is_split) finish_row_tile(space.q(), space.dout());
    if (cfg::stages == 2 && tile.exists()) load_keys(space, p, head, tile, 0);
    ptx::cp_async_commit();
    for (int stage = 0; tile.exists(); stage = (stage + 1) % cfg::stages) {
        const Tile next = walk.next();
        next_keys(space, p, head, tile, next, stage);
        const WholeTiles tiles = {space.q(), space.k(stage), space.dout(), space.v(stage), space.exchange()};
        scores_to_shared<false>(tiles, {space.numbers(), place.rows.first, tile.n() * cfg::block_n, tile.partial()}, p, head, {}, space.ds());
        __syncthreads();  // dS is complete
        add_product<cfg::block_n, Along::columns, p_stride, Along::rows, qk_stride>(
            dq, part_of_weights(space.ds(), Queries::row(), 0), part_of_rows<qk_stride>(space.k(stage), 0, Queries::column()));  // line 21
        tile = next;
    }
    ptx::cp_async_wait<0>();
    __syncthreads();  // q is free
    store_queries(memory, space, p, row_tile, flat, dq);
}
