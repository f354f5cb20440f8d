// Attention forward on mma.sync: o = softmax(q k^T) v with l and m, any GPU from sm_80 on.  FlashAttention's algorithm 2 (5 with a block mask)
// with queries outside, and FlashMask's algorithm 1; lines are algorithm 2's where no other is named.
//
// One block works on block_m query rows of one head and streams the key tiles in descending order; each warp owns
// block_m / warps rows.  Grid: x = row tiles x heads x batch, y = splits of the key axis, z = column chunks of v.
//
// With cfg::teams > 1 (of a warp each) every team takes every cfg::teams-th key tile, so that the block reads neighbours at a time; their
// results are combined at the end.
// With cfg::split a block has a part of the key axis, too: the parts meet in memory, where the last block of a row tile merges them
// (cfg::merges) or another kernel does.
// With cfg::pack > 1 the rows of a tile are (query row, head of the group) pairs, so that the heads that share k and v read them once.
//
//   shared memory        bytes (float32 has 4 more per row and 128 columns: sm80/split_f32.cuh)
//   q                    block_m * head_dim * sizeof(elem)
//   teams x stages x { k, v }   block_n * (head_dim + head_dim_v) * sizeof(elem), and block_n * 16 with a column mask
//   maxima               block_m * sizeof(acc), if cfg::flush_every
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "sm80/fwd_results.cuh"

// Line 9.
__device__ __forceinline__ void load_q(const Params& p, const Work& w, u32 shared) {
    const i32 cols = cfg::exact ? cfg::head_dim : p.head_dim;
    if constexpr (cfg::pack == 1) {
        load_tile<Elem, cfg::block_m, cfg::head_dim, threads, cfg::load_bytes>(shared, w.q + w.row0 * p.q.row, p.q.row, cols,
                                                                            [&](i32 r) { return w.row0 + r < p.n_queries; }, thread());
    } else {
        gather_tile<Elem, cfg::block_m, cfg::head_dim, threads, cfg::load_bytes>(shared, w.q, cols, [&](i32 r) {
            const i32 row = (w.row0 + r) / cfg::pack, head = (w.row0 + r) % cfg::pack;
            return row < p.n_queries ? w.q + row * p.q.row + head * p.q.head : nullptr;
        }, thread());
    }
}

// Line 7: issues the copies of one key tile.  Keys that no row sees must not reach the second product: their v could hold NaN.
__device__ __forceinline__ void load_kv(const Params& p, const Work& w, Tile tile, u32 shared) {
    const i32 first = tile.n() * cfg::block_n;
    load_tile<Elem, cfg::block_n, cfg::head_dim, threads, cfg::load_bytes>(shared, w.k + first * p.k.row, p.k.row, cfg::exact ? cfg::head_dim : p.head_dim,
                                                                        [&](i32 r) { return first + r < p.n_keys; }, thread());
    const i32 v_cols = cfg::exact ? cfg::head_dim_v : p.head_dim_v - static_cast<i32>(blockIdx.z) * cfg::head_dim_v;
    load_tile<Elem, cfg::block_n, cfg::head_dim_v, threads, cfg::load_bytes>(shared + k_bytes, w.v + first * p.v.row, p.v.row, v_cols, [&](i32 r) {
        const i32 key = first + r;
        bool live = key < p.n_keys && bias_shows(p, w.bias_offset, key);
        if constexpr (cfg::band_left || cfg::band_right) live = live && band_sees(p, key);
        if constexpr (cfg::mask != kMaskNone) {
            if (tile.dead()) live = live && key_alive(p, w.mask.instance, key);
        }
        return live;
    }, thread());
    if constexpr (column_masks > 0) {
        const int4* cols = p.table.cols + static_cast<i64>(w.mask.instance) * column_masks * p.table.keys_padded + first;
        for (int r = thread(); tile.partial() && r < cfg::block_n; r += threads) ptx::cp_async<16>(shared + k_bytes + v_bytes + r * 16, cols + r, 16);
    }
}

// This lane's (packed) row in half h of row tile mt.
__device__ __forceinline__ i32 packed_row(const Work& w, int mt, int h) {
    return w.row0 + static_cast<i32>(warp()) * warp_rows + mt * 16 + h * 8 + (threadIdx.x % 32) / 4;
}

// Its query row; past the last row, the last.
__device__ __forceinline__ i32 row_of(const Params& p, const Work& w, int mt, int h) { return min(packed_row(w, mt, h) / cfg::pack, p.n_queries - 1); }

__device__ __forceinline__ i32 key_of(Tile tile, int n, int e) { return tile.n() * cfg::block_n + n * 8 + 2 * (threadIdx.x % 4) + e; }

// Raw products to scores in natural units: scale, softcap, function, bias.
__device__ __forceinline__ void finish_scores(const Params& p, const Work& w, Tile tile, Acc (&s)[m_tiles][n_tiles][4]) {
    const auto finish = [&](int mt, int n, int r, const auto&... place) {
        s[mt][n][r] = finish_score(p, s[mt][n][r], w.bias_offset, row_of(p, w, mt, r / 2), key_of(tile, n, r % 2), place...).score;
    };
    if constexpr (cfg::score) {
        TracedHead heads[m_tiles][2];  // of packed rows
        TracedRow rows[m_tiles][2];
        unroll<m_tiles, 2>([&](int mt, int h) {
            heads[mt][h] = cfg::pack == 1 ? static_cast<const TracedHead&>(w) : TracedHead::of(p, w.ib, w.head + packed_row(w, mt, h) % cfg::pack);
            rows[mt][h] = TracedRow::of(p, heads[mt][h], row_of(p, w, mt, h));
        });
        constexpr bool own_keys = cfg::pack > 1 && traced::Use::head_of_key;
        unroll<n_tiles, 2>([&](int n, int e) {
            const TracedKey first = TracedKey::of(p, heads[0][0], key_of(tile, n, e));
            unroll<m_tiles, 2>([&](int mt, int h) {
                const TracedKey key = own_keys ? TracedKey::of(p, heads[mt][h], key_of(tile, n, e)) : first;
                finish(mt, n, 2 * h + e, heads[mt][h], rows[mt][h], key);
            });
        });
    } else {
        unroll<m_tiles, n_tiles, 4>(finish);
    }
}

__device__ __forceinline__ void mask_scores(const Params& p, const Work& w, Tile tile, u32 cols, Acc (&s)[m_tiles][n_tiles][4]) {
    unroll<n_tiles, 2>([&](int n, int e) {
        const i32 j = key_of(tile, n, e);
        int4 intervals{};
        if constexpr (column_masks > 0) ptx::load_shared(intervals, cols + (n * 8 + 2 * (threadIdx.x % 4) + e) * 16);
        const KeyMask key(p, w.mask.slices(), j, intervals);
        unroll<m_tiles, 2>([&](int mt, int h) {
            if (!key.visible(p, row_of(p, w, mt, h), j)) s[mt][n][2 * h + e] = -infinity<Acc>();
        });
    });
}

__device__ __forceinline__ void prepare_kv(u32 shared, i32 thread, int part = 0, int parts = 1) {
    Product::prepare_kv<cfg::block_n, cfg::head_dim, cfg::head_dim_v, threads>(shared, thread, part, parts);
}

// One key tile: s = q k^T, softmax, o += p v.  Meanwhile the next tile is prepared, where the products need that.
__device__ __forceinline__ void attend(const Params& p, const Work& w, Tile tile, u32 shared, u32 next, const Q& q,
                                       Softmax& rows, Acc (&o)[m_tiles][v_tiles][4]) {
    const u32 lane = threadIdx.x % 32;
    const i32 own = Product::prepares ? ptx::opaque(static_cast<i32>(thread())) : 0;  // its addresses are not kept in registers
    Acc s[m_tiles][n_tiles][4] = {};
    Product::scores(s, q, shared, lane);  // line 10
    if constexpr (cfg::prescaled) finish_scores(p, w, tile, s);
    if (tile.partial()) mask_scores(p, w, tile, shared + k_bytes + v_bytes, s);  // line 11; FlashMask's 18-25
    const Log2Factor<Acc> to_log2 = w.to_log2;
    rows.update(s, o, to_log2);  // lines 12 and 13
    Product::values(  // line 15, o divided by l at last
        o, s, shared + k_bytes, lane, [&](int c) { rows.exponentiate(s, c, to_log2); },
        [&](int mt, int c, auto&... fragments) {
            if constexpr (cfg::dropout != 0) {  // line 14
                u32 words[4];
                const i32 row = w.row0 + static_cast<i32>(warp()) * warp_rows + mt * 16 + lane / 4;
                random_words(words, p, w.stream, row, tile.n() * cfg::block_n + c * 16 + 2 * (lane % 4));
                (drop_fragment<cfg::dropout>(fragments, words), ...);
            }
        },
        [&](int part, int parts) {
            if constexpr (cfg::stages > 1) {
                if (part == 0) ptx::cp_async_wait<older_tiles>();  // this thread's part of the next tile has arrived
                prepare_kv(next, own, part, parts);
            }
        });
}

extern "C" __global__ __launch_bounds__(threads * cfg::teams, cfg::min_blocks) void attention_forward(const __grid_constant__ Params p) {
    extern __shared__ __align__(128) u8 memory[];
    const u32 q_shared = ptx::shared_address(memory), rings = q_shared + q_bytes, kv_shared = rings + team() * ring_bytes;
    __shared__ Work works[cfg::teams];
    Work& w = works[team()];
    if constexpr (cfg::split && !cfg::merges) ptx::launch_dependents();  // util/merge.cu, which waits for all of this
    if (thread() == 0) locate(p, w);
    __syncthreads();  // works are written
    // Line 6 and algorithm 5's 8; FlashMask's 10-15: tiles that hide everything are passed over.
    TileWalk<cfg::teams> walk(p, w.mask, w.tile_end, w.tile_begin + static_cast<i32>(team()));
    Tile tiles[cfg::stages];  // the tile at work and those under way
    if (team() == 0) load_q(p, w, q_shared);
#pragma unroll
    for (int s = 0; s + 1 < cfg::stages; ++s) {
        tiles[s] = walk.next();
        if (tiles[s].exists()) load_kv(p, w, tiles[s], kv_shared + s * stage_bytes);
        ptx::cp_async_commit();
    }
    if constexpr (cfg::stages == 1) ptx::cp_async_commit();
    ptx::cp_async_wait<older_tiles>();
    if (team() == 0) Product::prepare_q<cfg::block_m, cfg::head_dim, threads>(q_shared, threadIdx.x);
    if constexpr (Product::prepares && cfg::stages > 1) prepare_kv(kv_shared, thread());
    __syncthreads();  // q is ready
    Q q(q_shared, cfg::block_m, warp() * warp_rows, threadIdx.x % 32);
    q.load();

    Softmax rows;
    Acc o[m_tiles][v_tiles][4] = {};
    const u32 maxima = rings + cfg::teams * ring_bytes;
    if constexpr (cfg::flush_every > 0) start_flushes(maxima);
    u32 stage = kv_shared;
    if constexpr (cfg::stages == 1) tiles[0] = walk.next();
    while (tiles[0].exists()) {
        if constexpr (cfg::stages == 1) {
            sync_team();  // every warp is done with the tile before
            load_kv(p, w, tiles[0], stage);
            ptx::cp_async_commit();
        }
        if constexpr (cfg::stages == 1 || !Product::prepares) ptx::cp_async_wait<older_tiles>();
        if constexpr (cfg::stages == 1 && Product::prepares) prepare_kv(stage, thread());
        sync_team();  // this tile is ready, and every warp is done with the stage that is loaded next
        if constexpr (cfg::stages > 1) {
            const u32 free = stage == kv_shared ? stage + ring_bytes - stage_bytes : stage - stage_bytes;
            tiles[cfg::stages - 1] = walk.next();
            if (tiles[cfg::stages - 1].exists()) load_kv(p, w, tiles[cfg::stages - 1], free);
            ptx::cp_async_commit();
        }
        const auto next = [&] { return stage + stage_bytes == kv_shared + ring_bytes ? kv_shared : stage + stage_bytes; };
        attend(p, w, tiles[0], stage, Product::prepares ? next() : 0, q, rows, o);
        const i32 group = flush_group(tiles[0]);
#pragma unroll
        for (int s = 0; s + 1 < cfg::stages; ++s) tiles[s] = tiles[s + 1];
        if constexpr (cfg::stages == 1) tiles[0] = walk.next();
        if constexpr (cfg::flush_every > 0) {
            if (tiles[0].exists() && flush_group(tiles[0]) != group) flush<false>(p, w, maxima, rows, o);
        }
        stage = next();
    }
    if constexpr (cfg::flush_every > 0) flush<true>(p, w, maxima, rows, o);
    if constexpr (cfg::teams > 1) combine_teams(w, rings, rows, o);
    else rows.finish();
    store(p, w, rows, o);
    if constexpr (cfg::merges) merge(p, w);
}
