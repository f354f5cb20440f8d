// Tiles too wide for shared memory: a pair of tiles comes in by cfg::chunk columns at a time.
//
// A block goes through the chunks of q and k (Algorithm 4 line 11), then, if it needs dP, of do and v (line 17), then through those of the
// array that its own results are sums of (lines 16, 21, 22).  Of two stages one is on its way while the other is worked on.
//
// Shared memory of a stage   rows [block_m][chunk]   keys [block_n][chunk]   units of both (float32)
#pragma once
#include "sm80/bwd_scores.cuh"

constexpr bool streams = cfg::chunk > 0;
constexpr int stream_columns = streams ? cfg::chunk : 16;  // of a chunk
constexpr int chunk_stride = row_bytes<stream_columns>;
constexpr int stage_units_at = (cfg::block_m + cfg::block_n) * chunk_stride;
constexpr int stage_bytes = stage_units_at + row_units + key_units;
constexpr int qk_chunks = cfg::head_dim / stream_columns, v_chunks = cfg::head_dim_v / stream_columns;
static_assert(!streams || scores_warps == cfg::warps, "every warp takes part in loading and splitting");
static_assert(!streams || (cfg::head_dim % cfg::chunk == 0 && cfg::head_dim_v % cfg::chunk == 0), "rows are whole chunks");

// The products behind one pair of tiles (see WholeTiles).  own_keys: the block's own array is k, else q or do.
template <bool own_keys>
struct Stream {
    const Params& p;
    const Head& head;
    u32 shared;       // of the two stages
    i64 row, key;     // first of the tile
    bool partial;     // are there keys that do not exist or that no row sees?
    Columns own;
    int pairs, steps; // chunks of pairs of arrays; and of all
    int step = -1;    // the chunk that has arrived

    // Starts with the statistics of the rows and the first chunk, and waits for them.
    __device__ __forceinline__ Stream(const Params& p, const Head& head, u32 shared, const TilePlace& at, bool gradients, Columns own, int own_chunks)
        : p(p), head(head), shared(shared), row(at.first_row), key(at.first_key), partial(at.partial || bias_hides_keys(p)), own(own),
          pairs(qk_chunks + (gradients ? v_chunks : 0)), steps(pairs + own_chunks) {
        __syncthreads();  // nobody reads what the last pair of tiles has left
        load_row_numbers(at.numbers, head, row);
        load(0);
        ptx::cp_async_commit();
        advance();
    }

    __device__ __forceinline__ u32 stage(int step) const { return shared + step % 2 * stage_bytes; }
    __device__ __forceinline__ TileAt rows(int step) const { return {stage(step), stage(step) + stage_units_at}; }
    __device__ __forceinline__ TileAt keys(int step) const { return {stage(step) + cfg::block_m * chunk_stride, stage(step) + stage_units_at + row_units}; }
    __device__ __forceinline__ TileAt own_tile() const { return own_keys ? keys(step) : rows(step); }

    // Waits for the next chunk and starts loading the one after it.
    __device__ __forceinline__ void advance() {
        if (++step == steps) return;
        ptx::cp_async_wait<0>();
        if constexpr (is_split) {  // what this warp's lanes have loaded
            __syncwarp();
            if (step < pairs || !own_keys) split_tile<cfg::block_m, stream_columns>(rows(step), 0);
            if (step < pairs || own_keys) split_tile<cfg::block_n, stream_columns>(keys(step), cfg::block_m / 16);
        }
        __syncthreads();  // this chunk is ready, and the one before is done with
        if (step + 1 == steps) return;
        load(step + 1);
        ptx::cp_async_commit();
    }

    __device__ __forceinline__ void scores(Scores& s) { multiply(s, qk_chunks); }
    __device__ __forceinline__ void gradients(Scores& dp) { multiply(dp, v_chunks); }
    __device__ __forceinline__ void help() const {}

private:
    __device__ __forceinline__ void multiply(Scores& acc, int chunks) {
#pragma unroll 1
        for (int i = 0; i < chunks; ++i) {
            product<stream_columns, Along::columns, chunk_stride, Along::columns, chunk_stride>(
                acc, part_of_rows<chunk_stride>(rows(step), warp_score_row(), 0), part_of_rows<chunk_stride>(keys(step), warp_score_key(), 0));
            advance();
        }
    }

    __device__ __forceinline__ void load(int step) const {
        const bool of_qk = step < qk_chunks, of_pair = step < pairs;
        const i32 first = (step - (of_qk ? 0 : of_pair ? qk_chunks : pairs)) * stream_columns;
        if (of_pair || !own_keys) {
            const Columns from = (!of_pair ? own : of_qk ? Columns{head.q, p.q.row, p.head_dim} : Columns{head.dout, p.dout.row, p.head_dim_v}).from(first);
            const TileRows tile = {p, head, row};
            load_tile_rows<cfg::block_m, stream_columns>(rows(step).tile, from, row, 0, cfg::whole_columns && from.count >= stream_columns && tile.whole(),
                                                         [&](int r) { return tile.seeing(r); });
        }
        if (of_pair || own_keys) {
            const Columns from = (!of_pair ? own : of_qk ? Columns{head.k, p.k.row, p.head_dim} : Columns{head.v, p.v.row, p.head_dim_v}).from(first);
            const TileKeys tile = {p, head, key};
            const bool all = of_pair && !of_qk;
            load_tile_rows<cfg::block_n, stream_columns>(keys(step).tile, from, key, cfg::block_m / 16,
                                                         cfg::whole_columns && from.count >= stream_columns && !partial,
                                                         [&](int r) { return all ? tile.inside(r) : tile.seen(r); });
        }
    }
};
