// The producer warp: walks the row tiles that see a key tile and keeps the copy engine busy.  All lanes walk, lane 0
// issues.  Also the cleaner warp, through which tiles pass that may hold NaN where it must not count.
#pragma once
#include "attn/philox.cuh"
#include "attn/score.cuh"
#include "ptx/barrier.cuh"
#include "ptx/global.cuh"
#include "sm90/bwd_kept.cuh"
#include "sm90/bwd_layout.cuh"
#include "sm90/hidden.cuh"

namespace sm90::bwd {

// Do key tiles add to dQ in a fixed order (sm90/bwd_reducer.cuh)?
constexpr bool in_order = cfg::deterministic && !by_function && !dq_whole;

// May a part be a slice of rows?  Turns (sm90/bwd_reducer.cuh) are told for whole heads.
constexpr bool in_slices = cfg::in_parts && !in_order;

// In a section the key tiles with most work come first; neighbours share q, do and dq.
__device__ __forceinline__ Work key_tile(const Params& p, i32 number) {
    i32 slice = 0, flags = 0;
    if constexpr (cfg::tail) {
        const i32 part = number - p.shared_tile;
        if (part >= 0) number = p.shared_tile + part / p.split_tiles, slice = part % p.split_tiles, flags = Work::sliced_bit;
    }
    const i32 tiles = cfg::keeps_ds ? kept_tiles(p) : p.key_tiles;
    TileRank place = rank_of(p, number, p.kv_heads, tiles);
    if constexpr (cfg::batches_first) {  // sequences that share a bias are worked on side by side
        const i32 pair = place.batch * p.kv_heads + place.head;
        place.head = pair / p.batch, place.batch = pair - place.head * p.batch;
    }
    // Under causality the first keys are seen by most rows, without it (but with a window) the last.  A fixed order
    // is from the first to the last.
    if constexpr (cfg::in_parts) {
        const i32 part = place.head;
        place.head = part / p.split_tiles, slice = part - place.head * p.split_tiles;
    }
    const bool ascending = dq_held || in_order || cfg::band_right || !cfg::band_left;
    const i32 tile = ascending ? place.rank : tiles - 1 - place.rank;
    return {cfg::keeps_ds ? first_kept(p) + tile : tile, place.head, place.batch, slice << Work::slice_at | flags};
}

// The visible row tiles of a key tile, over all query heads that share its keys.  All lanes of a warp take part; what is
// needed rarely lies in shared memory, a producer having few registers.
struct StepWalk {
    const Params& p;
    const Shared& shared;
    const Work& work;
    DirectedRowWalk<in_order> rows;
    i32 member = -1;

    __device__ __forceinline__ StepWalk(const Params& params, const Shared& memory, const Work& of)
        : p(params), shared(memory), work(of), rows(params, shared.walk()) {}

    __device__ __forceinline__ void enter_head() {
        const i32 head = work.head * p.group + member;
        const i64 offset = block_mask ? slice_of(p.mask, work.batch, head) : 0;
        const i64 instance = cfg::mask != kMaskNone ? slice_of(p.table, work.batch, head) : 0;
        __syncwarp();  // the tables of the head before are no longer looked at
        if (threadIdx.x % 32 == 0) {
            const bool dead = describe_tables(shared.walk(), p, instance, offset, work.tile);
            // A key that no head sees is none that the first one sees.
            if (dead && member == 0) shared.pending().flags |= Work::dead_bit;
            if (in_slices || work.sliced()) shared.walk().end = slice_edge(1);
        }
        if constexpr (cfg::bias_keys) note_hidden_keys(head);
        __syncwarp();  // the new ones are there
        rows.begin(p);
        if (in_slices || work.sliced()) rows.tile = slice_edge(0) - 1;
    }

    // Of the row tiles that the band lets see the keys, the first of the work's slice, or (after = 1) of the next.
    __device__ __forceinline__ i32 slice_edge(i32 after) const {
        const i32 first = rows.first_tile(p), count = max(walk_end(p, rows.first_key()) - first, 0);
        return first + count * (work.slice() + after) / p.split_tiles;
    }

    // The same of keys that the bias hides.
    __device__ __forceinline__ void note_hidden_keys(i32 head) {
        if (member != 0 && !cfg::split_bias) return;
        bool hides = false, shows = false;
#pragma unroll 1  // of registers there are few
        for (i32 key = threadIdx.x % 32; key < cfg::block_n; key += 32) {
            const float x = bias_at(p, slice_of(p.bias, work.batch, head), 0, work.tile * cfg::block_n + key);
            hides |= uniform(x == -infinity<float>()), shows |= uniform(!(x <= sunk));
        }
        if (threadIdx.x % 32 != 0) return;
        i32& flags = shared.pending().flags;
        if (hides && member == 0) flags |= Work::dead_bit;
        if constexpr (cfg::split_bias) flags = (flags & ~(Work::sunk_bit | Work::hides_bit)) | (shows ? 0 : Work::sunk_bit) | (hides ? Work::hides_bit : 0);
    }

    // Moves to the next row tile that sees the keys.  Where all are sunk they count only for far rows, unless an order is kept.
    __device__ __forceinline__ bool advance() {
        bool some = rows.next(p);
        if constexpr (cfg::split_bias && !in_order) {
#pragma unroll 1
            while (some && work.sunk() && !(flags_of((work.batch * p.kv_heads + work.head) * p.group + member) & kFarRows)) some = rows.next(p);
        }
        return some;
    }

    // What is known of the rows of a row tile.
    __device__ __forceinline__ i32 flags_of(i32 flat) const { return p.counters[flat * stat_groups(p) + rows.tile * cfg::block_m / kStatRows]; }

    // Of a head that sees the key tile: the one before may still have a step to be loaded, whatever heads lie between them.
    __device__ __forceinline__ void note_head() {
        if (threadIdx.x % 32 == 0) {
            shared.pending().flags ^= Work::odd_bit;
            const i32 head = work.head * p.group + member;
            const i32 dq = static_cast<i32>(slice_of(p.dq, work.batch, head) / (static_cast<i64>(p.n_queries) * p.head_dim));
            shared.head(shared.pending().odd()) = {head, dq * p.row_tiles, work.batch * p.heads + head};
        }
        __syncwarp();  // all lanes may look
    }

    __device__ __forceinline__ StepCode next() {
        bool entered = false;
        while (member < 0 || !advance()) {
            if (++member == p.group) return StepCode::none();
            enter_head();
            entered = true;
        }
        if (entered) note_head();
        const bool odd = shared.pending().odd();
        StepCode step{rows.tile << 6 | (odd ? StepCode::odd_bit : 0) | (rows.partial(p) || (cfg::split_bias && shared.pending().hides()) ? StepCode::partial_bit : 0)};
        const i32 flags = flags_of(shared.head(odd).flat);
        if (may_hide_rows && flags & kEmptyRows) step.code |= StepCode::dirty_bit;
        if (flags & kFarRows) step.code |= StepCode::far_bit | StepCode::partial_bit;
        return step;
    }
};

struct Producer {
    const Params& p;
    const Maps& maps;
    const Shared shared;
    const bool leader;  // lane 0
    enum Ring { row_ring, key_ring, mail_ring };
    Positions positions;

    __device__ __forceinline__ Slot<cfg::stages> slot() const { return positions.slot<cfg::stages>(row_ring); }
    __device__ __forceinline__ Slot<k_stages> keys() const { return positions.slot<k_stages>(key_ring); }
    // Of v, which has one buffer, for the key tile that the next k is asked for, or (after = 1) the one before.
    __device__ __forceinline__ void await_values_empty(u32 after) const {
        ptx::mbarrier_wait(shared.barrier(v_empty), positions.slot<1>(key_ring).phase ^ after ^ 1);
    }

    // Key tiles are handed out in order by a ticket that starts at 0.  Where their order is fixed no block holds one before it runs: others would
    // wait for it, who keep it from running.
    __device__ __forceinline__ i32 draw() const {
        return first_number() + __shfl_sync(~0u, leader ? (in_order ? 0 : gridDim.x) + atomicAdd(p.ticket, 1) : 0, 0);
    }

    __device__ __forceinline__ i32 first_number() const { return cfg::keeps_ds && !cfg::in_parts ? p.shared_key / p.group * kept_tiles(p) : 0; }

    // Sends a message to the cleaner, at whom the bytes of raw tiles arrive.
    __device__ __forceinline__ void mail(i32 stage) {
        ptx::mbarrier_wait(shared.barrier(raw_empty), positions.slot<1>(mail_ring).phase ^ 1);
        positions.advance(mail_ring);
        if (leader) shared.mail() = {stage, shared.pending()};
    }

    // Sends the drawers a place; what they drew for the one before it in this stage is in registers.
    __device__ __forceinline__ void tell(const DrawPlace& place) {
        ptx::mbarrier_wait(shared.barrier(draws_empty + slot().stage), slot().phase ^ 1);
        if (!leader) return;
        shared.draw_place(slot().stage) = place;
        ptx::mbarrier_arrive(shared.barrier(draws_told + slot().stage));
    }

    // Brings what a boolean mask says of a row tile closer, for consumers who will wait for it.
    __device__ __forceinline__ void prefetch_bits(StepCode step) const {
        const i64 instance = slice_of(p.table, shared.pending().batch, shared.head(step.odd()).head);
        const i32 own = (threadIdx.x % 32) * (cfg::block_n / 32);
        for (int part = 0; part < cfg::block_m / 64; ++part)
            ptx::prefetch(boolean_bits(p, instance, step.m() * (cfg::block_m / 64) + part, shared.pending().tile) + own);
    }

    __device__ __forceinline__ void load_step(StepCode step) {
        const u32 stage = slot().stage;
        if (boolean_mask && uniform(step.partial())) prefetch_bits(step);
        if constexpr (drawers)
            tell({shared.pending().tile, step.m(), random_batch(p.dropout, shared.pending().batch, shared.head(step.odd()).head)});
        u32 full = shared.barrier(q_full + stage), full_do = shared.barrier(do_full + stage);
        const bool raw = may_hide_rows && uniform(step.dirty());
        const auto await_do = [&] { ptx::mbarrier_wait(shared.barrier(do_empty + stage), slot().phase ^ 1); };
        ptx::mbarrier_wait(shared.barrier(q_empty + stage), slot().phase ^ 1);
        if (!by_function || raw) await_do();
        const HeadPlace& place = shared.head(step.odd());
        if (leader) shared.step(stage) = {step, place.head, place.first_dq_tile + step.m()};  // told by the arrival that follows
        if (raw) {
            mail(stage);
            full = full_do = shared.barrier(raw_full);
            if (leader) ptx::mbarrier_arrive_expect(full, q_bytes + do_bytes + numbers_bytes + delta_bytes + bias_bytes);
        } else if (leader) {
            ptx::mbarrier_arrive_expect(full, q_bytes + numbers_bytes + bias_bytes);
            if (!by_function) ptx::mbarrier_arrive_expect(full_do, do_bytes + delta_bytes);
        }
        const Work& work = shared.pending();
        const i32 row = step.m() * cfg::block_m;
        const i64 at = stat_row(p, place.flat, row);
        if (leader) {
            load_tile<cfg::block_m, slabs>(maps.q, shared.q(stage), full, ptx::evict_last, row, {p.q, place.head, work.batch});
            ptx::bulk_load(shared.stat(stage), static_cast<const float*>(p.stat) + at, numbers_bytes, full);
            if constexpr (cfg::bias_tiles) load_bias(shared.ds(stage), full, row, {p.bias, place.head, work.batch});
        }
        if (by_function && !raw) {  // which needs its do later
            await_do();
            if (leader) ptx::mbarrier_arrive_expect(full_do, do_bytes + delta_bytes);
        }
        if (leader) {
            load_tile<cfg::block_m, slabs_v>(maps.dout, shared.dout(stage), full_do, ptx::evict_last, row, {p.dout, place.head, work.batch});
            ptx::bulk_load(shared.delta(stage), static_cast<const u8*>(p.delta) + at / cfg::block_m * delta_bytes, delta_bytes, full_do);
        }
        positions.advance(row_ring);
    }

    // To where dS will be, of which nobody reads the last one any more.
    __device__ __forceinline__ void load_bias(u32 tile, u32 full, i32 row, const Place& place) const {
        const u64 policy = p.bias.head && p.bias.batch[kBatchAxes - 1] ? ptx::evict_first : ptx::evict_last;
        unroll<warpgroups>([&](int slab) {
            ptx::tensor_load(tile + slab * cfg::block_m * row_bytes, maps.bias, full, policy,
                             shared.pending().tile * cfg::block_n + 64 * slab, row, place.head, place.batch);
        });
    }

    // May some key of the tile be seen by no row?
    __device__ __forceinline__ bool is_dead() const {
        const Work& work = shared.pending();
        return may_hide_keys && (uniform(work.dead()) || band_hides(p, work.tile));
    }

    __device__ __forceinline__ void load_keys(u32 full) {
        const Work& work = shared.pending();
        if (leader)
            load_tile<cfg::block_n, slabs>(maps.k, shared.k(keys().stage), full, ptx::evict_first, work.tile * cfg::block_n,
                                           {p.k, key_head(p, work), work.batch});
        positions.advance(key_ring);
    }

    __device__ __forceinline__ void load_values(u32 full) {
        const Work& work = shared.pending();
        if (leader)
            load_tile<cfg::block_n, slabs_v>(maps.v, shared.v(), full, ptx::evict_first, work.tile * cfg::block_n,
                                             {p.v, key_head(p, work), work.batch});
    }

    // Tiles with keys that no row sees go through the cleaner, k and v together.
    __device__ __forceinline__ void load_raw() {
        const u32 full = shared.barrier(raw_full);
        await_values_empty(0);
        mail(Mail::keys_stage - static_cast<i32>(keys().stage));
        if (leader) ptx::mbarrier_arrive_expect(full, k_bytes + v_bytes);
        load_keys(full);
        load_values(full);
    }

    // k, and v too where both must be cleaned.  seen: by some row.
    __device__ __forceinline__ void begin_keys(bool seen) {
        if (leader && seen) shared.pending().flags |= Work::seen_bit;
        __syncwarp();  // the flags are complete
        ptx::mbarrier_wait(shared.barrier(k_empty + keys().stage), keys().phase ^ 1);
        if (leader) shared.work(keys().stage) = shared.pending();  // told by the arrival that follows
        if (is_dead()) {
            load_raw();
        } else {
            const u32 full = shared.barrier(k_full + keys().stage);
            if (leader) ptx::mbarrier_arrive_expect(full, k_bytes);
            load_keys(full);
        }
    }

    __device__ __forceinline__ void end_keys() {
        if (is_dead()) return;
        const u32 full = shared.barrier(v_full);
        await_values_empty(1);
        if (leader) ptx::mbarrier_arrive_expect(full, v_bytes);
        load_values(full);
    }

    // One key tile: k and the first row tile are asked for while the consumers are at the key tile before.
    __device__ __forceinline__ void feed(i32 number) {
        __syncwarp();  // the key tile before is no longer looked at
        if (leader) shared.pending() = key_tile(p, number);
        __syncwarp();  // the new one is known
        StepWalk walk(p, shared, shared.pending());
        for (StepCode step = StepCode::none();;) {
            const StepCode after = walk.next();
            const bool begun = step.exists();
            if (!begun) {
                begin_keys(after.exists());
            } else {
                if (!after.exists()) step.code |= StepCode::last_bit;
                load_step(step);
            }
            if (begun ? step.first() : !after.exists()) end_keys();
            if (!after.exists()) return;
            step = after;
            if (!begun) step.code |= StepCode::first_bit;
        }
    }

    __device__ __forceinline__ void run() {
        const i32 heads = p.batch * p.kv_heads, tiles = dq_held ? p.key_tiles : 1;
        i32 total = dq_held ? heads : heads * p.key_tiles;
        if constexpr (cfg::tail) total += (total - p.shared_tile) * (p.split_tiles - 1);
        if constexpr (cfg::keeps_ds) {
            if constexpr (!cfg::in_parts) total = p.shared_tile / p.group * kept_tiles(p);
            if (blockIdx.x == 0 && leader) p.ticket[1] = 0;  // of the launch that follows
        }
        for (i32 number = in_order ? draw() : first_number() + blockIdx.x; number < total; number = draw())
            for (i32 tile = 0; tile < tiles; ++tile) feed(number * tiles + tile);
        if constexpr (drawers) tell({-1, 0, 0});
        ptx::mbarrier_wait(shared.barrier(k_empty + keys().stage), keys().phase ^ 1);  // now nobody looks at that key tile
        if (leader) {
            shared.work(keys().stage) = {-1, 0, 0, 0};
            ptx::mbarrier_arrive(shared.barrier(k_full + keys().stage));
        }
        if (may_hide_rows) {
            mail(Mail::done_stage);
            if (leader) ptx::mbarrier_arrive(shared.barrier(raw_full));
        }
    }
};

// Is the key visible to some row of some head that shares it?
__device__ __forceinline__ bool key_lives(const Params& p, const Work& work, i32 key) {
    if (key >= p.n_keys || !band_sees(p, key)) return false;
    if constexpr (cfg::mask == kMaskNone && !cfg::bias_keys) return true;
    bool alive = false;
    for (i32 member = 0; member < p.group && !alive; ++member) {
        const i32 head = work.head * p.group + member;
        alive = key_alive(p, slice_of(p.table, work.batch, head), key);
        if constexpr (cfg::bias_keys) alive = alive && bias_shows(p, slice_of(p.bias, work.batch, head), key);
    }
    return alive;
}

// The cleaner: 0 * NaN must not reach a gradient, so that keys no row sees and rows that see nothing become zero.
__device__ __forceinline__ void clean(const Params& p, const Shared& shared) {
    const u32 lane = threadIdx.x % 32;
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(raw_full), phase);
        const Mail mail = shared.mail();
        if (mail.stage == Mail::done_stage) return;
        const i32 k_stage = Mail::keys_stage - mail.stage;  // not negative: a tile of k and v
        if (k_stage >= 0) {
#pragma unroll 1  // of registers there are few
            for (u32 row = lane; row < cfg::block_n; row += 32) {
                if (key_lives(p, mail.work, mail.work.tile * cfg::block_n + row)) continue;
                clear_row<cfg::block_n, slabs>(shared.memory + k_at + k_stage * k_bytes, row);
                clear_row<cfg::block_n, slabs_v>(shared.memory + v_at, row);
            }
        } else {
            const float* stat = &shared.at<float>(stat_at, mail.stage * cfg::block_m);
            for (u32 row = lane; row < cfg::block_m; row += 32) {
                if (stat[row] != -infinity<float>()) continue;
                clear_row<cfg::block_m, slabs>(shared.memory + q_at + mail.stage * q_bytes, row);
                clear_row<cfg::block_m, slabs_v>(shared.memory + do_at + mail.stage * do_bytes, row);
            }
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) {
            ptx::mbarrier_arrive(shared.barrier(k_stage >= 0 ? k_full + k_stage : q_full + mail.stage));
            ptx::mbarrier_arrive(shared.barrier(k_stage >= 0 ? v_full : do_full + mail.stage));
        }
        ptx::mbarrier_arrive(shared.barrier(raw_empty));  // each lane for itself
    }
}

}  // namespace sm90::bwd
