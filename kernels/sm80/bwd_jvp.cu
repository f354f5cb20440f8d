// Gradients of attention and their tangents: FlashAttention's algorithm 4 with its derivative, in a fixed order.
//
//   u = s. - lse.,  dP = dO V^T,  dP. = dO V.^T + dO. V^T,  dS = P (dP - D),  dS. = u dS + P (dP. - D.),  dX = f' dS,  dX. = f' dS. + f'. dS
//   dQ = scale dX K,   dQ. = scale (dX. K + dX K.),   dK likewise,   dV = P^T dO,   dV. = (P u)^T dO + P^T dO.
//
// A block owns 16 rows a warp of one side, and streams the tiles of the other side past them: cfg::owner says what it sums.  Where it owns keys,
// scores are transposed, so that both ways are the same products.  Every gradient is summed in registers, in the order of the tiles.
//
// Shared memory   the owner's two matrices with their tangents; those of a tile of the other side, and five numbers for each of its rows
// Grid            tiles of the owner * heads * batch, tiles fastest; parts of the gradient's columns
#include "sm80/bwd_jvp.cuh"

constexpr int sums = cfg::columns / 8;
using Sums = Acc[1][sums][4];

// One tile of the other side: adds to the gradient and to its tangent.
__device__ __forceinline__ void attend(const TangentParams& p, const Head& h, i32 own0, i32 stream0, bool partial, u32 own, u32 stream, RowNumbers& numbers, Sums& sum,
                                       Sums& tsum) {
    constexpr int d = cfg::head_dim, dv = cfg::head_dim_v;
    const i32 column0 = blockIdx.y * cfg::columns;
    Scores s = {}, t = {}, slope, bend;
    make_weights(p, h, own0, stream0, partial, own, stream, numbers, s, t, slope, bend);
    if constexpr (of_values) {  // P Z and P Z u
        unroll<n_tiles, 4>([&](int n, int i) { t[0][n][i] *= s[0][n][i]; });
        if constexpr (cfg::dropout != 0) for_dropped<keys_own, n_tiles>(p, h.stream, own0, stream0, [&](int n, int i) { s[0][n][i] = t[0][n][i] = 0; });
        if constexpr (cfg::primal) add_values<dv>(sum, s, stream + StreamSide::v_at, column0);
        if constexpr (cfg::moves) add_values<dv>(tsum, t, stream + StreamSide::v_at, column0);
        if constexpr (cfg::tdo) add_values<dv>(tsum, s, stream + StreamSide::tv_at, column0);
    } else {
        make_ds(p, h, own0, stream0, own, stream, numbers, s, t);
        if constexpr (cfg::softcap || cfg::score) {
            unroll<n_tiles, 4>([&](int n, int i) {
                const Acc ds = s[0][n][i], tds = t[0][n][i], factor = slope[0][n][i];
                s[0][n][i] = ds == 0 ? Acc(0) : ds * factor;
                t[0][n][i] = (tds == 0 ? Acc(0) : tds * factor) + (ds == 0 ? Acc(0) : ds * bend[0][n][i]);
            });
        }
        if constexpr (cfg::primal) add_values<d>(sum, s, stream, column0);
        add_values<d>(tsum, t, stream, column0);
        if constexpr (StreamSide::moved) add_values<d>(tsum, s, stream + StreamSide::tx_at, column0);
    }
}

// Goes through the tiles of the other side, next(first, partial) after next.
template <class Next>
__device__ __forceinline__ void walk_tiles(const TangentParams& p, const Head& h, i32 own0, u32 own, u32 stages, RowNumbers& numbers, Sums& sum, Sums& tsum,
                                           const Next& next) {
    i32 first, after;
    bool partial, after_partial;
    bool more = next(first, partial);
    if (cfg::stages == 2 && more) load_stream(p, h, first, stages);
    ptx::cp_async_commit();
    for (u32 at = 0; more; at = (at + 1) % cfg::stages) {
        const bool another = next(after, after_partial);
        const u32 stage = stages + at * stage_bytes;
        if constexpr (cfg::stages == 2) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has arrived, and everybody is done with the one before
            if (another) load_stream(p, h, after, stages + (at ^ 1) * stage_bytes);
            ptx::cp_async_commit();
        } else {
            __syncthreads();  // everybody is done with the tile before
            load_stream(p, h, first, stage);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has arrived
        }
        numbers.shared = stage + StreamSide::bytes;
        attend(p, h, own0, first, partial, own, stage, numbers, sum, tsum);
        first = after, partial = after_partial, more = another;
    }
    __syncthreads();  // everybody is done with the last tile
}

template <bool flag>
struct Flag {
    static constexpr bool value = flag;
};

template <bool summed>
__device__ __forceinline__ void store(const TangentParams& p, const Operand& to, const BatchIndex& index, i32 head, i32 rows, i32 own0, i32 width, Sums& sum) {
    using Out = typename Either<summed, Stat, cfg::grad>::type;
    const Acc factor = of_values ? Acc(p.dropout_scale) : Acc(p.scale);
    store_sums(static_cast<Out*>(to.data) + slice_offset(to, index, head), to.row, rows, own0, blockIdx.y * cfg::columns, width, sum, factor, factor);
}

extern "C" __global__ __launch_bounds__(threads) void backward_jvp(const __grid_constant__ TangentParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 own = ptx::shared_address(memory), stages = own + OwnSide::bytes;
    __shared__ Head h;
    const i32 tiles = keys_own ? p.key_tiles : p.row_tiles, tile = static_cast<i32>(blockIdx.x) % tiles, flat = blockIdx.x / tiles;
    const i32 heads = keys_own ? p.kv_heads : p.heads, ib = flat / heads, head = flat % heads, own0 = tile * owned_rows;
    Sums sum = {}, tsum = {};
    RowNumbers numbers;
    if constexpr (keys_own) {
        for (i32 member = 0; member < p.group; ++member) {
            if (threadIdx.x == 0) describe(p, h, ib, head * p.group + member, tile);
            __syncthreads();  // h is complete
            load_keys<OwnSide>(p, h, own0, own);
            ptx::cp_async_commit();
            RowWalk walk(p, h.walk);
            walk_tiles(p, h, own0, own, stages, numbers, sum, tsum, [&](i32& first, bool& partial) {
                if (!walk.next(p)) return false;
                first = walk.tile * cfg::block_m, partial = walk.partial(p) || first + cfg::block_m > p.n_queries;
                return true;
            });
        }
    } else {
        if (threadIdx.x == 0) describe(p, h, ib, head, tile);
        __syncthreads();  // h is complete
        load_queries<OwnSide>(p, h, own0, own);
        numbers.load_own(p, h, own0);
        TileWalk walk(p, h.place, p.key_tiles);
        walk_tiles(p, h, own0, own, stages, numbers, sum, tsum, [&](i32& first, bool& partial) {
            const Tile next = walk.next();
            first = next.n() * cfg::block_n, partial = next.partial();
            return next.exists();
        });
    }
    const BatchIndex index = batch_index(p, ib);
    const auto save = [&](const auto summed, const Operand& gradient, const Operand& tangent, i32 rows, i32 width) {
        if constexpr (cfg::primal) store<decltype(summed)::value>(p, gradient, index, head, rows, own0, width, sum);
        store<decltype(summed)::value>(p, tangent, index, head, rows, own0, width, tsum);
    };
    if constexpr (cfg::owner == kOwnQueries) save(Flag<cfg::sum_dq>{}, p.dq, p.tdq, p.n_queries, p.head_dim);
    if constexpr (cfg::owner == kOwnKeys) save(Flag<cfg::sum_dk>{}, p.dk, p.tdk, p.n_keys, p.head_dim);
    if constexpr (cfg::owner == kOwnValues) save(Flag<cfg::sum_dv>{}, p.dv, p.tdv, p.n_keys, p.head_dim_v);
}
