// The forward along tangents: o, l, m, and the tangents of o and of lse, in one pass over the keys.
//
//   s. = scale (q. k + q k.) through softcap, function and bias,   lse. = sum P s.,   o. = sum P (s. - lse.) v + sum P v.
//
// Tangents of scores are taken relative to a centre, the row's mean over the tiles so far: where it moves, what was weighed relative to the old
// one moves by as many times o.  Weights rounded to 16 bits then lose nothing where tangents are large and hardly differ along a row.
//
// Shared memory   q, q. [block_m][head_dim]   stages x { k, k. [block_n][head_dim]   v, v. [block_n][columns] }
// Grid            row tiles * heads * batch, tiles fastest; parts of v's columns
//
// With cfg::sharers = 2 two warps have the same rows: each computes the scores of half a tile's keys, tells the other one, and sums half of the
// columns.  With one stage the next tile's keys arrive during the products with values, and values during those with keys.
#include "ptx/barrier.cuh"
#include "sm80/tangent_tiles.cuh"

constexpr int n_tiles = cfg::block_n / 8, v_tiles = cfg::columns / 8 / sharers;
constexpr int q_bytes = Product::tile_bytes<cfg::block_m, cfg::head_dim>, k_bytes = Product::tile_bytes<cfg::block_n, cfg::head_dim>;
constexpr int v_bytes = Product::tile_bytes<cfg::block_n, cfg::columns>;
constexpr int k_at = 0, tk_at = k_bytes, v_at = tk_at + (cfg::tk ? k_bytes : 0), tv_at = v_at + v_bytes;
constexpr int stage_bytes = tv_at + (cfg::tv ? v_bytes : 0), own_columns = cfg::columns / sharers;
using Scores = Acc[1][n_tiles][4];
using OwnScores = Acc[1][n_tiles / sharers][4];
using Sums = Acc[1][v_tiles][4];

// What the block works on.
struct Work : TracedHead {
    MaskPlace mask;
    i64 bias, tbias;
    const Source *q, *tq, *k, *tk, *v, *tv;
    i32 flat, row0, column0;
    RandomStream stream;
};

__device__ __forceinline__ void locate(const TangentParams& p, Work& w) {
    const i32 tile = p.row_tiles - 1 - static_cast<i32>(blockIdx.x) % p.row_tiles;
    w.flat = blockIdx.x / p.row_tiles;
    const i32 ib = w.flat / p.heads, head = w.flat % p.heads, kv_head = head / p.group;
    const BatchIndex index = batch_index(p, ib);
    static_cast<TracedHead&>(w) = TracedHead::of(p, ib, head);
    const auto at = [&](const Operand& x, i32 h) { return static_cast<const Source*>(x.data) + slice_offset(x, index, h); };
    w.column0 = blockIdx.y * cfg::columns;
    w.q = at(p.q, head), w.k = at(p.k, kv_head), w.v = at(p.v, kv_head) + w.column0;
    if constexpr (cfg::tq) w.tq = at(p.tq, head);
    if constexpr (cfg::tk) w.tk = at(p.tk, kv_head);
    if constexpr (cfg::tv) w.tv = at(p.tv, kv_head) + w.column0;
    if constexpr (cfg::bias) w.bias = slice_offset(p.bias, index, head);
    if constexpr (cfg::tbias) w.tbias = slice_offset(p.tbias, index, head);
    w.mask.set(MaskSlices::of(p, index, head));
    w.mask.set_rows(p, tile);
    w.row0 = w.mask.rows.first;
    if constexpr (cfg::dropout != 0) w.stream = random_stream(p.dropout, ib, head);
}

__device__ __forceinline__ void load_keys(const TangentParams& p, const Work& w, Tile tile, u32 stage) {
    const i32 first = tile.n() * cfg::block_n;
    const auto live = [&](i32 row) { return is_live(p, w.bias, w.mask.instance, first + row); };
    load_rows<cfg::block_n, cfg::head_dim>(stage + k_at, w.k + first * p.k.row, p.k.row, p.head_dim, live);
    if constexpr (cfg::tk) load_rows<cfg::block_n, cfg::head_dim>(stage + tk_at, w.tk + first * p.tk.row, p.tk.row, p.head_dim, live);
}

__device__ __forceinline__ void load_values(const TangentParams& p, const Work& w, Tile tile, u32 stage) {
    const i32 first = tile.n() * cfg::block_n, columns = p.head_dim_v - w.column0;
    const auto live = [&](i32 row) { return is_live(p, w.bias, w.mask.instance, first + row); };
    load_rows<cfg::block_n, cfg::columns>(stage + v_at, w.v + first * p.v.row, p.v.row, columns, live);
    if constexpr (cfg::tv) load_rows<cfg::block_n, cfg::columns>(stage + tv_at, w.tv + first * p.tv.row, p.tv.row, columns, live);
}

// What has been copied into a tile becomes what products take, before others read it.
template <int rows, int columns, i32 shift>
__device__ __forceinline__ void prepare(u32 tile) {
#pragma unroll 2
    for (int i = 0; i < split::steps<rows, columns, threads>; ++i) split::split_step<rows, columns, threads, shift>(tile, threadIdx.x, i);
}

__device__ __forceinline__ void prepare_queries(u32 q) {
    if constexpr (sizeof(Elem) == 4) {
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        prepare<cfg::block_m, cfg::head_dim, 0>(q);
        if constexpr (cfg::tq) prepare<cfg::block_m, cfg::head_dim, 0>(q + q_bytes);
    }
}

__device__ __forceinline__ void prepare_keys(u32 stage) {
    if constexpr (sizeof(Elem) == 4) {
        prepare<cfg::block_n, cfg::head_dim, Mma<float>::key_shift>(stage + k_at);
        if constexpr (cfg::tk) prepare<cfg::block_n, cfg::head_dim, Mma<float>::key_shift>(stage + tk_at);
    }
}

__device__ __forceinline__ void prepare_values(u32 stage) {
    if constexpr (sizeof(Elem) == 4) {
        prepare<cfg::block_n, cfg::columns, 0>(stage + v_at);
        if constexpr (cfg::tv) prepare<cfg::block_n, cfg::columns, 0>(stage + tv_at);
    }
}

// Running statistics of the two rows of a lane, and sums relative to them.
struct RowSums {
    Acc m[2] = {-infinity<Acc>(), -infinity<Acc>()}, l[2] = {0, 0}, centre[2] = {0, 0};
    Sums o = {}, to = {};

    // Makes weights of scores, and of their tangents weights relative to the centre.
    __device__ __forceinline__ void update(Scores& s, Scores& t) {
        const Log2Factor<Acc> to_log2 = Log2Factor<Acc>::of_e();
        unroll<2>([&](int h) {
            Acc top = m[h];
            unroll<n_tiles, 2>([&](int n, int e) { top = max_of(top, s[0][n][2 * h + e]); });
            top = max_of(top, __shfl_xor_sync(~0u, top, 1));
            top = max_of(top, __shfl_xor_sync(~0u, top, 2));
            const Acc shift = top == -infinity<Acc>() ? Acc(0) : top, shrink = exp2_term(m[h] - shift, to_log2);
            Acc sum = 0, mean = 0;
            unroll<n_tiles, 2>([&](int n, int e) {
                Acc &x = s[0][n][2 * h + e], &y = t[0][n][2 * h + e];
                x = exp2_term(x - shift, to_log2);
                sum += x;
                if constexpr (cfg::moves) y -= centre[h], mean += x * y;
            });
            m[h] = top, l[h] = l[h] * shrink + quad_sum(sum);
            Acc delta = 0;
            if constexpr (cfg::moves) {
                mean = quad_sum(mean);  // by all lanes of the warp, also those whose rows see nothing
                delta = l[h] == 0 ? Acc(0) : mean / l[h];
                centre[h] += delta;
                unroll<n_tiles, 2>([&](int n, int e) { t[0][n][2 * h + e] = s[0][n][2 * h + e] * (t[0][n][2 * h + e] - delta); });
            }
            unroll<v_tiles, 2>([&](int n, int e) {
                Acc &x = o[0][n][2 * h + e], &y = to[0][n][2 * h + e];
                x *= shrink;
                y = cfg::moves ? fma_of(-delta, x, y * shrink) : y * shrink;
            });
        });
    }
};

// What a warp has found, and what the other one of its rows has; at: of what all share.
__device__ __forceinline__ void share(Scores& s, Scores& t, const OwnScores& own_s, const OwnScores& own_t, u32 at) {
    const u32 pair = threadIdx.x / 32 % (owned_rows / 16), share = own_share();
    constexpr int pieces = n_tiles / sharers * 4;  // of two numbers
    const auto place = [&](u32 share, int piece) { return at + (((pair * sharers + share) * pieces + piece) * 32 + threadIdx.x % 32) * 16; };
    unroll<pieces / 2>([&](int i) {
        ptx::store_shared_v2(place(share, i), own_s[0][i / 2][i % 2 * 2], own_s[0][i / 2][i % 2 * 2 + 1]);
        ptx::store_shared_v2(place(share, i + pieces / 2), own_t[0][i / 2][i % 2 * 2], own_t[0][i / 2][i % 2 * 2 + 1]);
    });
    ptx::barrier_sync(1 + pair, 32 * sharers);
    unroll<sharers, pieces / 2>([&](int from, int i) {
        double2 x, y;
        ptx::load_shared(x, place(from, i));
        ptx::load_shared(y, place(from, i + pieces / 2));
        const int n = from * (n_tiles / sharers) + i / 2, e = i % 2 * 2;
        s[0][n][e] = x.x, s[0][n][e + 1] = x.y, t[0][n][e] = y.x, t[0][n][e + 1] = y.y;
    });
}

// The scores of a key tile and their tangents, as weights; its keys have arrived.
__device__ __forceinline__ void weigh(const TangentParams& p, const Work& w, Tile tile, u32 q, u32 stage, RowSums& rows, Scores& s, Scores& t) {
    const i32 first = tile.n() * cfg::block_n;
    if constexpr (sharers == 1) {
        add_moved_scores<cfg::head_dim>(s, t, q, q + q_bytes, stage + k_at, stage + tk_at);
    } else {
        OwnScores own_s = {}, own_t = {};
        const u32 below = own_share() * (cfg::block_n / sharers * cfg::head_dim * int(sizeof(Elem)));
        add_moved_scores<cfg::head_dim>(own_s, own_t, q, q + q_bytes, stage + k_at + below, stage + tk_at + below);
        share(s, t, own_s, own_t, q + (cfg::tq ? 2 : 1) * q_bytes + cfg::stages * stage_bytes);
    }
    for_elements<false, n_tiles>(p, w, w.row0, first, [&](int n, int i, i32 row, i32 key, const auto&... place) {
        const MovedScore x = move_score(p, s[0][n][i], t[0][n][i], w.bias, w.tbias, row, key, static_cast<const TracedHead&>(w), place...);
        s[0][n][i] = x.score;
        t[0][n][i] = x.score == -infinity<Acc>() ? Acc(0) : x.tangent;
    });
    if (tile.partial()) for_hidden<false, n_tiles>(p, w.mask.slices(), w.row0, first, [&](int n, int i) { s[0][n][i] = -infinity<Acc>(), t[0][n][i] = 0; });
    rows.update(s, t);
    if constexpr (cfg::dropout != 0) for_dropped<false, n_tiles>(p, w.stream, w.row0, first, [&](int n, int i) { s[0][n][i] = t[0][n][i] = 0; });
}

// The sums over the tile; its values have arrived.
__device__ __forceinline__ void sum_values(RowSums& rows, const Scores& s, Scores& t, u32 stage) {
    const u32 below = own_share() * (own_columns * int(sizeof(Elem)));
    add_moved_values<cfg::columns>(rows.o, rows.to, s, t, stage + v_at + below, stage + tv_at + below);
}

__device__ __forceinline__ void store(const TangentParams& p, const Work& w, RowSums& rows) {
    const i64 first = i64(w.flat) * p.n_queries;
    Acc inverse[2];
    unroll<2>([&](int h) {
        inverse[h] = rows.l[h] == 0 ? Acc(0) : Acc(cfg::dropout != 0 ? p.dropout_scale : 1.0) / rows.l[h];
        const i32 row = w.row0 + static_cast<i32>(own_row()) + threadIdx.x % 32 / 4 + 8 * h;
        if (threadIdx.x % 4 || blockIdx.y || own_share() || row >= p.n_queries) return;
        const Stat m = static_cast<Stat>(rows.m[h]);
        Acc l = rows.l[h];
        if (!same_type<Stat, Acc> && l != 0) l *= exp2_term(rows.m[h] - Acc(m), Log2Factor<Acc>::of_e());  // as if m had been so all the time
        static_cast<Stat*>(p.l.data)[first + row] = l;
        static_cast<Stat*>(p.m.data)[first + row] = m;
        static_cast<Stat*>(p.tlse.data)[first + row] = rows.l[h] == 0 ? Acc(0) : rows.centre[h];
    });
    const auto out = [&](const Operand& x) { return static_cast<cfg::out*>(x.data) + first * p.head_dim_v; };
    const i32 column0 = w.column0 + static_cast<i32>(own_share()) * own_columns;
    store_sums(out(p.o), p.head_dim_v, p.n_queries, w.row0, column0, p.head_dim_v, rows.o, inverse[0], inverse[1]);
    store_sums(out(p.to), p.head_dim_v, p.n_queries, w.row0, column0, p.head_dim_v, rows.to, inverse[0], inverse[1]);
}

extern "C" __global__ __launch_bounds__(threads, cfg::min_blocks) void attention_jvp(const __grid_constant__ TangentParams p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 q = ptx::shared_address(memory), stages = q + (cfg::tq ? 2 : 1) * q_bytes;
    __shared__ Work w;
    if (threadIdx.x == 0) locate(p, w);
    __syncthreads();  // w is written
    const auto live = [&](i32 row) { return w.row0 + row < p.n_queries; };
    load_rows<cfg::block_m, cfg::head_dim>(q, w.q + w.row0 * p.q.row, p.q.row, p.head_dim, live);
    if constexpr (cfg::tq) load_rows<cfg::block_m, cfg::head_dim>(q + q_bytes, w.tq + w.row0 * p.tq.row, p.tq.row, p.head_dim, live);
    prepare_queries(q);
    TileWalk walk(p, w.mask, p.key_tiles);
    Tile tile = walk.next();
    if (tile.exists()) {
        load_keys(p, w, tile, stages);
        if constexpr (cfg::stages == 2) load_values(p, w, tile, stages);
    }
    ptx::cp_async_commit();
    RowSums rows;
    for (u32 at = 0; tile.exists(); at = (at + 1) % cfg::stages) {
        const Tile next = walk.next();
        const u32 stage = stages + at * stage_bytes;
        Scores s = {}, t = {};
        ptx::cp_async_wait<0>();
        prepare_keys(stage);
        if constexpr (cfg::stages == 2) {
            prepare_values(stage);
            __syncthreads();  // this tile has arrived, and everybody is done with the one before
            if (next.exists()) load_keys(p, w, next, stages + (at ^ 1) * stage_bytes), load_values(p, w, next, stages + (at ^ 1) * stage_bytes);
            ptx::cp_async_commit();
            weigh(p, w, tile, q, stage, rows, s, t);
        } else {
            __syncthreads();  // this tile's keys have arrived, and everybody is done with the values before
            load_values(p, w, tile, stage);
            ptx::cp_async_commit();
            weigh(p, w, tile, q, stage, rows, s, t);
            ptx::cp_async_wait<0>();
            prepare_values(stage);
            __syncthreads();  // its values have arrived, and everybody is done with the keys
            if (next.exists()) load_keys(p, w, next, stage);
            ptx::cp_async_commit();
        }
        sum_values(rows, s, t, stage);
        tile = next;
    }
    store(p, w, rows);
}
