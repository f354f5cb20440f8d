// A consumer warpgroup of the gradients' kernel along tangents: the sums of its 64 rows of the owner's side over all tiles of the other side.
#pragma once
#include "ptx/global.cuh"
#include "sm90/bwd_jvp_producer.cuh"
#include "sm90/bwd_jvp_scores.cuh"
#include "sm90/gradients.cuh"

namespace sm90::moved {

template <int n>
__device__ __forceinline__ void clear(float (&x)[n]) {
    unroll<n>([&](int i) { x[i] = 0.0f; });
    ptx::wgmma_pin(x);  // before any product is under way
}

constexpr u32 turn_barrier = 1, slabs_barrier = 1 + warpgroups;  // of the first warpgroup: its turn at the tensor cores has come; its dX is in slabs

struct Consumer {
    const TangentParams& p;
    const Shared shared;
    const Work work;
    const u32 warpgroup;
    Slot<cfg::stages> slot;
    // Byte offset of this warpgroup's rows in the owner's slabs.  It grows by 0 with every step, which the compiler does not know: it would
    // otherwise compute all descriptors ahead, for which there are no registers.
    u32 row_offset;
    RowNumbers numbers;
    Scores s, t, g, tg;                     // products: of q and k, of do and v, each behind its tangent
    Fragments ds, tds, pu, pz;              // dX, dX., P Z u and P Z, rounded
    float sum[cfg::head_dim / 2];           // dQ. or dK.
    float dv[cfg::head_dim_v / 2];          // dV., where keys own
    float dq[32];                           // of a tile's queries, with one pass
    u32 buffer;                             // of slabs that its dX takes

    // d = A B^T of this warpgroup's rows of the owner and the tile in the slot; at: of the operands.
    template <int columns>
    __device__ __forceinline__ void multiply(Scores& d, int own_at, int stream_at, u32 begun) const {
        multiply_rows<columns, own_rows, streamed, 1>(d, shared.own() + own_at + row_offset, shared.stage(slot.stage) + stream_at, begun);
    }

    __device__ __forceinline__ void issue_scores() {
        ptx::wgmma_fence();
        multiply<cfg::head_dim>(s, 0, 0, 0);
        if constexpr (OwnSide::moved) multiply<cfg::head_dim>(t, OwnSide::tx_at, 0, 0);
        if constexpr (StreamSide::moved) multiply<cfg::head_dim>(t, 0, StreamSide::tx_at, OwnSide::moved);
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void issue_dp() {
        ptx::wgmma_fence();
        multiply<cfg::head_dim_v>(g, OwnSide::v_at, StreamSide::v_at, 0);
        if constexpr (OwnSide::moved_v) multiply<cfg::head_dim_v>(tg, OwnSide::tv_at, StreamSide::v_at, 0);
        if constexpr (StreamSide::moved_v) multiply<cfg::head_dim_v>(tg, OwnSide::v_at, StreamSide::tv_at, OwnSide::moved_v);
        ptx::wgmma_commit();
    }

    // Sums over the tile in a stage.
    __device__ __forceinline__ void accumulate(u32 stage) {
        const u32 tile = shared.stage(stage);
        ptx::wgmma_fence();
        if constexpr (keys_own) accumulate_rows<streamed>(dv, pu, tile + StreamSide::v_at);
        if constexpr (keys_own && cfg::tdo) accumulate_rows<streamed>(dv, pz, tile + StreamSide::tv_at);
        accumulate_rows<streamed>(sum, tds, tile);
        if constexpr (StreamSide::moved) accumulate_rows<streamed>(sum, ds, tile + StreamSide::tx_at);
        ptx::wgmma_commit();
    }

    // A fragment's 64 keys as a slab [queries][keys].
    __device__ __forceinline__ void store_transposed(const Fragments& a, u32 slab) const {
        const u32 lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, query = lane % 8 + 8 * (lane / 16);
        const u32 at = slab + query * row_bytes + 16 * ((2 * warp + lane / 8 % 2) ^ (query % 8));
        unroll<streamed / 16>([&](int j) { ptx::stmatrix_x4_trans(at + j * 2 * eight_rows, a[j][0], a[j][1], a[j][2], a[j][3]); });
    }

    // dQ. of a tile by this warpgroup's keys.  at: of their dX; factors: of the owner's.
    __device__ __forceinline__ void multiply_queries(u32 at, int factors, u32 begun) {
        unroll<4>([&](int step) {
            const u64 a = ptx::wgmma_descriptor(at, 16, eight_rows) + ((32 * step) >> 4);
            const u64 b = ptx::wgmma_descriptor(shared.own() + factors + row_offset, own_rows * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
            ptx::Product<64>::template ss<is_bfloat16, 1, 1>(dq, a, b, step > 0 || begun);
        });
    }

    // One warpgroup's products run while the other one weighs and differentiates.
    __device__ __forceinline__ void await_turn() const { ptx::barrier_sync(turn_barrier + warpgroup, 128 * warpgroups); }
    __device__ __forceinline__ void pass_turn() const { ptx::barrier_arrive(turn_barrier + (warpgroup ^ 1), 128 * warpgroups); }

    // dX as queries' products take it.  By the time that all warps' part is there, all have done with the buffer of the last tile.
    __device__ __forceinline__ void store_slabs() const {
        const u32 at = shared.own_slabs(warpgroup, buffer);
        store_transposed(tds, at);
        if constexpr (OwnSide::moved) store_transposed(ds, at + slab_bytes);
        ptx::async_proxy_fence();
        ptx::barrier_sync(slabs_barrier + warpgroup, 128);
    }

    __device__ __forceinline__ void issue_dq() {
        const u32 at = shared.own_slabs(warpgroup, buffer);
        ptx::wgmma_fence();
        multiply_queries(at, 0, 0);
        if constexpr (OwnSide::moved) multiply_queries(at + slab_bytes, OwnSide::tx_at, 1);
        ptx::wgmma_commit();
        buffer ^= 1;
    }

    // Adds what a tile gave, in the order of registers (sm90/bwd_jvp_convert.cu).
    __device__ __forceinline__ void add_dq(i32 first_row, i32 head) const {
        const i64 padded = (p.n_queries + 127) / 128 * 128, row = (work.batch * p.heads + head) * padded + first_row;
        float* sums = static_cast<float*>(p.dq_acc) + row * 64 + threadIdx.x % 128 * 4;
        unroll<8>([&](int i) { ptx::red_add_x4(sums + 512 * i, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]); });
    }

    __device__ __forceinline__ TilePlace place(const Step& step) const {
        return {work.tile * own_rows + 64 * static_cast<i32>(warpgroup) + fragment_row(), step.number * streamed + 2 * static_cast<i32>(threadIdx.x % 4), work.batch,
                step.head};
    }

    // P and P u (with slopes, what they become) in place of the products.
    __device__ __forceinline__ void weigh(const TilePlace& at, bool partial, u32& seen, u32 kept) {
        if constexpr (!OwnSide::moved && !StreamSide::moved) unroll<elements>([&](int i) { t[i] = 0.0f; });
        float low = 0.0f, low_weight = 0.0f;
        Weights{p, at, numbers, s, t}.find([&](int i, float weight, float moved) {
            if constexpr (!keys_own) return;
            const bool taken = seen & kept & 1u << i;
            weight = taken ? weight : 0.0f, moved = taken ? moved : 0.0f;
            if (i % 2) pair_of(pu, i) = pack(low, moved), pair_of(pz, i) = pack(low_weight, weight);
            low = moved, low_weight = weight;
        });
        if constexpr (told_by_scores) unroll<elements>([&](int i) { seen &= ~(static_cast<u32>(s[i] == 0.0f && t[i] == 0.0f) << i); });
        else if (partial) clear_unseen(s, seen), clear_unseen(t, seen);
    }

    // dX and its tangent, rounded, from that and from dP and its tangent; and what sums of dV. take.
    __device__ __forceinline__ void differentiate(u32 kept) {
        unroll<elements / 2>([&](int pair) {
            float dx[2], tdx[2], moved[2], weight[2];
            unroll<2>([&](int e) {
                const int i = 2 * pair + e;
                const bool keeps = !cfg::dropout || kept >> i & 1;
                const float d = (keeps ? g[i] : 0.0f) - numbers(delta, i), td = (keeps && moved_dp ? tg[i] : 0.0f) - numbers(moved_delta, i);
                moved[e] = keeps ? t[i] : 0.0f, weight[e] = keeps ? s[i] : 0.0f;
                dx[e] = s[i] * d, tdx[e] = fmaf(t[i], d, s[i] * td);
            });
            pair_of(ds, 2 * pair) = pack(dx[0], dx[1]), pair_of(tds, 2 * pair) = pack(tdx[0], tdx[1]);
            if constexpr (!cfg::sloped) pair_of(pu, 2 * pair) = pack(moved[0], moved[1]), pair_of(pz, 2 * pair) = pack(weight[0], weight[1]);
        });
    }

    __device__ __forceinline__ void accumulate_tiles() {
        if (warpgroup + 1 == warpgroups) pass_turn();  // the first warpgroup begins
        await_turn();
        for (i32 before = -1;;) {
            ptx::mbarrier_wait(shared.full(slot.stage), slot.phase);
            const Step step = shared.step(slot.stage);
            if (uniform(step.number < 0)) break;
            const u32 stage = slot.stage;
            const TilePlace at = place(step);
            issue_scores();
            ptx::wgmma_wait<1>();  // the last tile's sums no longer need their factors' registers
            if (before >= 0) release_read(shared.empty(before));
            issue_dp();
            const u32 kept = cfg::dropout ? find_kept(p, at) : ~0u;
            // Without masks only the keys' end is hidden; of a launch that owns keys nobody takes the sums there, unless they are dQ's, too.
            const bool partial = (may_hide || !keys_own || one_pass) && uniform(step.partial());
            u32 seen = partial ? find_seen(p, at) : ~0u;
            numbers.shared = shared.row_numbers(stage) + threadIdx.x % 4;
            ptx::wgmma_wait<1>();
            pass_turn();
            ptx::wgmma_pin(s);
            ptx::wgmma_pin(t);
            weigh(at, partial, seen, kept);
            ptx::wgmma_wait<0>();
            ptx::wgmma_pin(g);
            ptx::wgmma_pin(tg);
            if (told_by_scores || partial) clear_unseen(g, seen), clear_unseen(tg, seen);
            differentiate(kept);
            if constexpr (one_pass) store_slabs();
            await_turn();
            if constexpr (one_pass) issue_dq();
            accumulate(stage);
            if constexpr (one_pass) {
                ptx::wgmma_wait<1>();
                ptx::wgmma_pin(dq);
                add_dq(step.number * streamed, step.head);
            }
            before = stage;
            slot.advance();
            row_offset += p.splits;
        }
        pass_turn();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(sum);
        if constexpr (keys_own) ptx::wgmma_pin(dv);
    }

    // Leaves a part's sums in memory, in the order of registers.  The last of the tile's parts to come here adds all of them up, in their order: true.
    __device__ __forceinline__ bool add_parts() {
        constexpr int pieces = (cfg::head_dim + (keys_own ? cfg::head_dim_v : 0)) / 8;
        const u32 thread = threadIdx.x % 128, barrier = slabs_barrier + warpgroup;
        const i32 slot = (work.batch * (keys_own ? p.kv_heads : p.heads) + work.head) * warpgroups + static_cast<i32>(warpgroup);
        float4* const parts = static_cast<float4*>(p.dk_acc) + static_cast<i64>(slot) * cfg::first_parts * pieces * 128 + thread;
        const auto of_each = [&](const auto& change) {
            unroll<cfg::head_dim / 8>([&](int i) { change(i, sum + 4 * i); });
            if constexpr (keys_own) unroll<cfg::head_dim_v / 8>([&](int i) { change(cfg::head_dim / 8 + i, dv + 4 * i); });
        };
        of_each([&](int i, const float* x) { __stcg(parts + (work.part * pieces + i) * 128, make_float4(x[0], x[1], x[2], x[3])); });
        __threadfence();  // what this thread stored comes before the count
        ptx::barrier_sync(barrier, 128);
        u32& last = *reinterpret_cast<u32*>(shared.memory + 64 * warpgroup * row_bytes);  // the warpgroup's rows are done with
        if (thread == 0) last = atomicInc(reinterpret_cast<u32*>(p.counters) + slot, cfg::first_parts - 1) == cfg::first_parts - 1;
        ptx::barrier_sync(barrier, 128);
        if (!uniform(last)) return false;
        __threadfence();  // and the count before what is read
        of_each([&](int, float* x) { x[0] = x[1] = x[2] = x[3] = 0.0f; });
        const float4* from = parts;
#pragma unroll 1  // registers are few
        for (i32 part = 0; part < cfg::first_parts; ++part, from += pieces * 128)
            of_each([&](int i, float* x) {
                const float4 y = __ldcg(from + i * 128);
                x[0] += y.x, x[1] += y.y, x[2] += y.z, x[3] += y.w;
            });
        return true;
    }

    __device__ __forceinline__ void write() const {
        const float outer = static_cast<float>(p.dropout_scale), factor = static_cast<float>(p.scale * p.dropout_scale);
        const i32 row = work.tile * own_rows + 64 * warpgroup + fragment_row();
        if constexpr (keys_own) {
            const i32 slice = work.batch * p.kv_heads + work.head;
            write_gradient(sum, factor, p.tdk.data, slice, p.n_keys, p.head_dim, row);
            write_gradient(dv, outer, p.tdv.data, slice, p.n_keys, p.head_dim_v, row);
        } else {
            write_gradient(sum, factor, p.tdq.data, work.batch * p.heads + work.head, p.n_queries, p.head_dim, row);
        }
    }

    __device__ __forceinline__ void run() {
        row_offset = 64 * warpgroup * row_bytes, buffer = 0;
        if constexpr (!keys_own) numbers.load_own(p, work.batch * p.heads + work.head, work.tile * own_rows + 64 * warpgroup + fragment_row());
        clear(sum);
        if constexpr (keys_own) clear(dv);
        ptx::mbarrier_wait(shared.own_full(), 0);
        accumulate_tiles();
        if (work.in_parts() && !add_parts()) return;
        write();
    }
};

}  // namespace sm90::moved
