// The producer warp: walks the row tiles that see a key tile and keeps the copy engine busy.  All lanes walk, lane 0
// issues.  Also the cleaner warp, through which tiles pass that may hold NaN where it must not count.
#pragma once
#include "ptx/mbarrier.cuh"
#include "sm90/bwd_work.cuh"
#include "sm90/clean.cuh"

namespace sm90 {

struct Producer {
    const Params& p;
    const Maps& maps;
    const Shared shared;
    const bool leader;  // lane 0
    Slot<cfg::stages> slot;
    u32 keys_phase = 1, raw_phase = 1;

    // Key tiles are handed out in order by a ticket that starts at 0.
    __device__ __forceinline__ i32 draw() const {
        return __shfl_sync(~0u, leader ? gridDim.x + atomicAdd(p.ticket, 1) : 0, 0);
    }

    // Sends a message to the cleaner, at whom the bytes of raw tiles arrive.
    __device__ __forceinline__ void mail(i32 stage) {
        ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
        raw_phase ^= 1;
        if (leader) shared.mail() = {stage, shared.pending()};
    }

    __device__ __forceinline__ void load_step(StepCode step) {
        const u32 stage = slot.stage;
        u32 full = shared.barrier(q_full + stage), full_do = shared.barrier(do_full + stage);
        ptx::mbarrier_wait(shared.barrier(q_empty + stage), slot.phase ^ 1);
        ptx::mbarrier_wait(shared.barrier(do_empty + stage), slot.phase ^ 1);
        if (may_have_empty_rows && uniform(step.dirty())) {
            mail(stage);
            full = full_do = shared.barrier(raw_full);
            if (leader) ptx::mbarrier_arrive_expect(full, q_bytes + do_bytes + 2 * numbers_bytes);
        } else if (leader) {
            ptx::mbarrier_arrive_expect(full, q_bytes + numbers_bytes);
            ptx::mbarrier_arrive_expect(full_do, do_bytes + numbers_bytes);
        }
        if (leader) {
            const HeadPlace& place = shared.head(step.odd());
            const Work& work = shared.pending();
            shared.step(stage) = {step, place.head, place.first_dq_tile + step.m()};
            const i32 row = step.m() * cfg::block_m;
            const i64 at = stat_row(p, place.flat, row);
            load_tile<cfg::block_m, slabs>(maps.q, shared.q(stage), full, ptx::evict_last, row, {p.q, place.head, work.batch});
            ptx::bulk_load(shared.stat(stage), static_cast<const float*>(p.stat) + at, numbers_bytes, full);
            load_tile<cfg::block_m, slabs_v>(maps.dout, shared.dout(stage), full_do, ptx::evict_last, row, {p.dout, place.head, work.batch});
            ptx::bulk_load(shared.delta(stage), static_cast<const float*>(p.delta) + at, numbers_bytes, full_do);
        }
        slot.advance();
    }

    // v of the key tile before is done with first, then k.
    __device__ __forceinline__ void load_keys(bool dead) {
        u32 full = shared.barrier(k_full), full_v = shared.barrier(v_full);
        const Work& work = shared.pending();
        const i32 key = work.tile * cfg::block_n;
        ptx::mbarrier_wait(shared.barrier(v_empty), keys_phase);
        if (may_have_dead_keys && dead) {
            ptx::mbarrier_wait(shared.barrier(k_empty), keys_phase);
            mail(Mail::keys_stage);
            full = full_v = shared.barrier(raw_full);
            if (leader) ptx::mbarrier_arrive_expect(full, k_bytes + v_bytes);
        } else if (leader) {
            ptx::mbarrier_arrive_expect(full_v, v_bytes);
        }
        if (leader) load_tile<cfg::block_n, slabs_v>(maps.v, shared.v(), full_v, ptx::evict_first, key, {p.v, work.head, work.batch});
        ptx::mbarrier_wait(shared.barrier(k_empty), keys_phase);
        if (leader) {
            shared.work() = work;
            if (full == shared.barrier(k_full)) ptx::mbarrier_arrive_expect(full, k_bytes);
            load_tile<cfg::block_n, slabs>(maps.k, shared.k(), full, ptx::evict_first, key, {p.k, work.head, work.batch});
        }
        keys_phase ^= 1;
    }

    // One key tile: its first row tile is asked for before the buffers of k and v are free.
    __device__ __forceinline__ void feed(i32 number) {
        __syncwarp();  // the key tile before is no longer looked at
        if (leader) shared.pending() = key_tile(p, number);
        __syncwarp();  // the new one is known
        StepWalk walk(p, shared, shared.pending());
        StepCode step = walk.next();
        if (leader) shared.pending().steps = step.exists();
        for (bool first = true; first || step.exists(); first = false) {
            const StepCode after = step.exists() ? walk.next() : step;
            if (step.exists()) {
                if (!after.exists()) step.code |= StepCode::last_bit;
                load_step(step);
            }
            if (first) load_keys(cfg::mask == kMaskBlock || uniform(walk.dead) || band_hides(p, shared.pending().tile));
            step = after;
        }
    }

    __device__ __forceinline__ void run() {
        const i32 total = p.batch * p.kv_heads * p.key_tiles;
        for (i32 number = blockIdx.x; number < total; number = draw()) feed(number);
        ptx::mbarrier_wait(shared.barrier(v_empty), keys_phase);
        ptx::mbarrier_wait(shared.barrier(k_empty), keys_phase);  // now nobody looks at the last key tile
        if (leader) {
            shared.work() = {-1, 0, 0, 0};
            ptx::mbarrier_arrive(shared.barrier(k_full));
        }
        if (may_have_dead_keys) {
            mail(Mail::done_stage);
            if (leader) ptx::mbarrier_arrive(shared.barrier(raw_full));
        }
    }
};

// Is the key visible to some row of some head that shares it?
__device__ __forceinline__ bool key_lives(const Params& p, const Work& work, i32 key) {
    if (key >= p.n_keys || !band_sees(p, key)) return false;
    if constexpr (cfg::mask == kMaskNone) return true;
    bool alive = false;
    for (i32 member = 0; member < p.group && !alive; ++member)
        alive = key_alive(p, slice_of(p.table, work.batch, work.head * p.group + member), key);
    return alive;
}

// The cleaner: 0 * NaN must not reach a gradient, so that keys no row sees and rows that see nothing become zero.
__device__ __forceinline__ void clean(const Params& p, const Shared& shared) {
    const u32 lane = threadIdx.x % 32;
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(raw_full), phase);
        const Mail mail = shared.mail();
        if (mail.stage == Mail::done_stage) return;
        if (mail.stage == Mail::keys_stage) {
            for (u32 row = lane; row < cfg::block_n; row += 32) {
                if (key_lives(p, mail.work, mail.work.tile * cfg::block_n + row)) continue;
                clear_row<cfg::block_n, slabs>(shared.memory + k_at, row);
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
            const bool keys = mail.stage == Mail::keys_stage;
            ptx::mbarrier_arrive(shared.barrier(keys ? k_full : q_full + mail.stage));
            ptx::mbarrier_arrive(shared.barrier(keys ? v_full : do_full + mail.stage));
            ptx::mbarrier_arrive(shared.barrier(raw_empty));
        }
    }
}

}  // namespace sm90
