// What the gradients' kernels along tangents share: the owner's and the streamed side, P, dS and their tangents (kernels/sm80/bwd_jvp.cu).
#pragma once
#include "attn/row_walk.cuh"
#include "sm80/tangent_tiles.cuh"

enum Owner { kOwnQueries, kOwnKeys, kOwnValues, kOwnBias };  // what is summed: dQ, dK, dV, dBias
constexpr bool keys_own = cfg::owner == kOwnKeys || cfg::owner == kOwnValues, of_values = cfg::owner == kOwnValues;
constexpr int streamed_rows = keys_own ? cfg::block_m : cfg::block_n, n_tiles = streamed_rows / 8;
static_assert(owned_rows == (keys_own ? cfg::block_n : cfg::block_m), "a warp owns 16 rows");

// The places of q, q., do, do. (or k, k., v, v.) behind one another.  What gives dV alone needs no v and no dO. but as factors.
constexpr bool needs_dp = !of_values;
template <bool of_keys, int rows>
struct Side {
    static constexpr bool moved = of_keys ? cfg::tk : cfg::tq, moved_v = of_keys ? cfg::tv && needs_dp : cfg::tdo;
    static constexpr bool wide = !of_keys || needs_dp;
    static constexpr int x_bytes = rows * cfg::head_dim * int(sizeof(Elem)), v_bytes = rows * cfg::head_dim_v * int(sizeof(Elem));
    static constexpr int tx_at = x_bytes, v_at = tx_at + (moved ? x_bytes : 0), tv_at = v_at + (wide ? v_bytes : 0);
    static constexpr int bytes = tv_at + (moved_v ? v_bytes : 0);
};
using OwnSide = Side<keys_own, owned_rows>;
using StreamSide = Side<!keys_own, streamed_rows>;
constexpr int number_bytes = streamed_rows * int(sizeof(Acc));
constexpr int stage_bytes = StreamSide::bytes + (keys_own ? kRowNumbers * number_bytes : 0);
using Scores = Acc[1][n_tiles][4];

// One query head, and where its arrays lie.
struct Head : TracedHead {
    i64 bias, tbias;
    const Source *q, *tq, *k, *tk, *v, *tv, *dout, *tdo;
    const Acc* numbers;  // of its rows
    i32 ib, head;
    MaskSlices mask;
    RandomStream stream;
    WalkTables walk;
    MaskPlace place;
};

__device__ __forceinline__ void describe(const TangentParams& p, Head& h, i32 ib, i32 head, i32 tile) {
    const BatchIndex index = batch_index(p, ib);
    static_cast<TracedHead&>(h) = TracedHead::of(p, ib, head);
    const i32 kv_head = head / p.group;
    const auto at = [&](const Operand& x, i32 of) { return static_cast<const Source*>(x.data) + slice_offset(x, index, of); };
    h.q = at(p.q, head), h.dout = at(p.dout, head), h.k = at(p.k, kv_head), h.v = at(p.v, kv_head);
    if constexpr (cfg::tq) h.tq = at(p.tq, head);
    if constexpr (cfg::tk) h.tk = at(p.tk, kv_head);
    if constexpr (cfg::tv) h.tv = at(p.tv, kv_head);
    if constexpr (cfg::tdo) h.tdo = at(p.tdo, head);
    if constexpr (cfg::bias) h.bias = slice_offset(p.bias, index, head);
    if constexpr (cfg::tbias) h.tbias = slice_offset(p.tbias, index, head);
    h.ib = ib, h.head = head;
    h.numbers = static_cast<const Acc*>(p.rows) + (i64(ib) * p.heads + head) * p.n_queries;
    h.mask = MaskSlices::of(p, index, head);
    if constexpr (cfg::dropout != 0) h.stream = random_stream(p.dropout, ib, head);
    if constexpr (keys_own) {
        describe_tables(h.walk, p, h.mask.instance, h.mask.blocks, tile);
    } else {
        h.place.set(h.mask);
        h.place.set_rows(p, tile);
    }
}

__device__ __forceinline__ const Acc* numbers_of(const TangentParams& p, const Head& h, int which) {
    return h.numbers + which * (i64(p.batch) * p.heads * p.n_queries);
}

// k, k., v, v. of keys first ...; keys that no row sees become zeros, as they could hold NaN.
template <class At>
__device__ __forceinline__ void load_keys(const TangentParams& p, const Head& h, i32 first, u32 to) {
    constexpr int rows = keys_own ? owned_rows : streamed_rows;
    const auto live = [&](i32 row) { return is_live(p, h.bias, h.mask.instance, first + row); };
    load_rows<rows, cfg::head_dim>(to, h.k + first * p.k.row, p.k.row, p.head_dim, live);
    if constexpr (cfg::tk) load_rows<rows, cfg::head_dim>(to + At::tx_at, h.tk + first * p.tk.row, p.tk.row, p.head_dim, live);
    if constexpr (needs_dp) load_rows<rows, cfg::head_dim_v>(to + At::v_at, h.v + first * p.v.row, p.v.row, p.head_dim_v, live);
    if constexpr (At::moved_v) load_rows<rows, cfg::head_dim_v>(to + At::tv_at, h.tv + first * p.tv.row, p.tv.row, p.head_dim_v, live);
}

// q, q., do, do. of rows first ...; those of empty rows become zeros.
template <class At>
__device__ __forceinline__ void load_queries(const TangentParams& p, const Head& h, i32 first, u32 to) {
    constexpr int rows = keys_own ? streamed_rows : owned_rows;
    const Acc* inverse = numbers_of(p, h, kRowInverse);
    const auto live = [&](i32 row) { return first + row < p.n_queries && inverse[first + row] != 0; };
    load_rows<rows, cfg::head_dim>(to, h.q + first * p.q.row, p.q.row, p.head_dim, live);
    if constexpr (cfg::tq) load_rows<rows, cfg::head_dim>(to + At::tx_at, h.tq + first * p.tq.row, p.tq.row, p.head_dim, live);
    load_rows<rows, cfg::head_dim_v>(to + At::v_at, h.dout + first * p.dout.row, p.dout.row, p.head_dim_v, live);
    if constexpr (cfg::tdo) load_rows<rows, cfg::head_dim_v>(to + At::tv_at, h.tdo + first * p.tdo.row, p.tdo.row, p.head_dim_v, live);
}

__device__ __forceinline__ void load_stream(const TangentParams& p, const Head& h, i32 first, u32 to) {
    if constexpr (keys_own) {
        load_queries<StreamSide>(p, h, first, to);
        for (int i = threadIdx.x; i < kRowNumbers * streamed_rows; i += threads) {
            const int which = i / streamed_rows, row = i % streamed_rows;
            const bool exists = first + row < p.n_queries;
            ptx::store_shared(to + StreamSide::bytes + i * int(sizeof(Acc)), exists ? numbers_of(p, h, which)[first + row] : Acc(0));
        }
    } else {
        load_keys<StreamSide>(p, h, first, to);
    }
}

// The same, waited for; for kernels with one place for tiles, which the tile before has been in.
__device__ __forceinline__ void fetch_stream(const TangentParams& p, const Head& h, i32 first, u32 to) {
    __syncthreads();  // everybody is done with the tile before
    load_stream(p, h, first, to);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();  // it has arrived
}

// The numbers of the row of a lane's element i in tile n of scores.
struct RowNumbers {
    Acc own[2][kRowNumbers];
    u32 shared;

    __device__ __forceinline__ Acc operator()(int which, int n, int i) const {
        if constexpr (!keys_own) return own[i / 2][which];
        Acc x;
        ptx::load_shared(x, shared + which * number_bytes + (8 * n + threadIdx.x % 4 * 2 + i % 2) * int(sizeof(Acc)));
        return x;
    }
    __device__ __forceinline__ void load_own(const TangentParams& p, const Head& h, i32 first) {
        unroll<2, kRowNumbers>([&](int half, int which) {
            const i32 row = first + static_cast<i32>(threadIdx.x) / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
            own[half][which] = row < p.n_queries ? numbers_of(p, h, which)[row] : Acc(0);
        });
    }
};

// P and u; of scores that are not seen P is 0 and u is 0, whatever there was.  The slope and its tangent take the place of what led there.
__device__ __forceinline__ void make_p(const TangentParams& p, const Head& h, i32 own0, i32 stream0, bool partial, const RowNumbers& numbers, Scores& s, Scores& t,
                                       Scores& slope, Scores& bend) {
    for_elements<keys_own, n_tiles>(p, h, own0, stream0, [&](int n, int i, i32 row, i32 key, const auto&... place) {
        const MovedScore x = move_score(p, s[0][n][i], t[0][n][i], h.bias, h.tbias, row, key, static_cast<const TracedHead&>(h), place...);
        s[0][n][i] = x.score, t[0][n][i] = x.tangent, slope[0][n][i] = x.slope, bend[0][n][i] = x.bend;
    });
    if (partial) for_hidden<keys_own, n_tiles>(p, h.mask, own0, stream0, [&](int n, int i) { s[0][n][i] = -infinity<Acc>(); });
    unroll<n_tiles, 4>([&](int n, int i) {
        const Acc inverse = numbers(kRowInverse, n, i);
        const bool seen = s[0][n][i] != -infinity<Acc>() && inverse != 0;
        s[0][n][i] = seen ? exp_times(s[0][n][i] - numbers(kRowMaximum, n, i), inverse) : Acc(0);
        t[0][n][i] = seen ? t[0][n][i] - numbers(kRowMean, n, i) : Acc(0);
    });
}

// dS and dS. in place of P and u, given the derivatives by P without D: sums of products that dropout has not yet been applied to.
__device__ __forceinline__ void make_ds(const TangentParams& p, const Head& h, i32 own0, i32 stream0, u32 own, u32 stream, const RowNumbers& numbers, Scores& s, Scores& t) {
    constexpr int dv = cfg::head_dim_v;
    const Acc scale = static_cast<Acc>(p.dropout_scale);
    Scores g = {}, tg = {};
    add_scores<dv>(g, own + OwnSide::v_at, stream + StreamSide::v_at);
    if constexpr (OwnSide::moved_v) add_scores<dv>(tg, own + OwnSide::tv_at, stream + StreamSide::v_at);
    if constexpr (StreamSide::moved_v) add_scores<dv>(tg, own + OwnSide::v_at, stream + StreamSide::tv_at);
    if constexpr (cfg::dropout != 0) for_dropped<keys_own, n_tiles>(p, h.stream, own0, stream0, [&](int n, int i) { g[0][n][i] = tg[0][n][i] = 0; });
    unroll<n_tiles, 4>([&](int n, int i) {
        const Acc weight = s[0][n][i];
        s[0][n][i] = weight == 0 ? Acc(0) : weight * (g[0][n][i] * scale - numbers(kRowDelta, n, i));
        t[0][n][i] = weight == 0 ? Acc(0) : fma_of(t[0][n][i], s[0][n][i], weight * (tg[0][n][i] * scale - numbers(kRowMovedDelta, n, i)));
    });
}

// The products that scores and their tangents are made of.
__device__ __forceinline__ void add_products(Scores& s, Scores& t, u32 own, u32 stream) {
    add_scores<cfg::head_dim>(s, own, stream);
    if constexpr (OwnSide::moved) add_scores<cfg::head_dim>(t, own + OwnSide::tx_at, stream);
    if constexpr (StreamSide::moved) add_scores<cfg::head_dim>(t, own, stream + StreamSide::tx_at);
}

// These, and P and u.
__device__ __forceinline__ void make_weights(const TangentParams& p, const Head& h, i32 own0, i32 stream0, bool partial, u32 own, u32 stream, const RowNumbers& numbers,
                                             Scores& s, Scores& t, Scores& slope, Scores& bend) {
    add_products(s, t, own, stream);
    make_p(p, h, own0, stream0, partial, numbers, s, t, slope, bend);
}

// Loads the rows of a row tile, whose head and place are described, and calls work(numbers, first key, partial) for each key tile before the
// `end` that they see; for kernels with one place for tiles.
template <class Work>
__device__ __forceinline__ void for_key_tiles(const TangentParams& p, const Head& h, i32 own0, i32 end, u32 own, u32 stage, const Work& work) {
    load_queries<OwnSide>(p, h, own0, own);
    RowNumbers numbers;
    numbers.load_own(p, h, own0);
    TileWalk walk(p, h.place, end);
    for (Tile next = walk.next(); next.exists(); next = walk.next()) {
        const i32 first = next.n() * cfg::block_n;
        fetch_stream(p, h, first, stage);
        work(numbers, first, next.partial());
    }
}
