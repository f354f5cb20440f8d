// A consumer warpgroup that keeps dK and dV of its own 64 keys where registers hold nothing else but one tile of scores: dP takes their place,
// dS is made of the rounded P, and dQ is left to sm90/bwd_rows.cu.
//
// The exponentials run beside dK of the row tile before, dS beside dV.
#pragma once
#include "sm90/bwd_split.cuh"

namespace sm90::bwd {

struct KeyOwner : Worker {
    const u32 warpgroup;
    Scores s;  // scores, then dP
    Fragments fragments;  // P, then dS
    KeyGradient dk;
    ValueGradient dv;

    __device__ __forceinline__ u32 own_rows(u32 tile) const { return tile + 64 * warpgroup * row_bytes; }

    __device__ __forceinline__ void issue_s() {
        await_queries();
        compute_s(s, own_rows(shared.k(keys.stage)), shared.q(slot.stage));
        ptx::wgmma_commit();
    }

    // What is left in the place of the scores, once no product reads the fragments any more.
    __device__ __forceinline__ void round() {
        ptx::wgmma_wait<0>();
        unroll<cfg::block_m / 4>([&](int pair) { fragments[pair / 4][pair % 4] = pack(s[2 * pair], s[2 * pair + 1]); });
    }

    // Lines 11 to 13.
    __device__ __forceinline__ void probabilities() {
        const Hidden hidden(*this, 64 * warpgroup, uniform(step().partial()));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(s);
        find_weights<cfg::sloped>(s, fragments, hidden, Numbers<0>(numbers(stat_at)), Draws{}, 64 * warpgroup, 0, [&] { return shared.handed_on(warpgroup); });
        round();
    }

    // Lines 18 and 20.
    __device__ __forceinline__ void gradients() {
        const Numbers<0> delta(numbers(delta_at));
        ptx::wgmma_wait<1>();
        ptx::wgmma_pin(s);
        unroll<cfg::block_m / 4>([&](int pair) {
            const int i = 2 * pair;
            const float2 d = delta[i / 4], p = unpack<cfg::elem>(fragments[pair / 4][pair % 4]);
            s[i] = p.x * (s[i] - d.x), s[i + 1] = p.y * (s[i + 1] - d.y);
        });
        round();
    }

    __device__ __forceinline__ void accumulate_steps() {
        issue_s();
        ptx::wgmma_commit();  // in place of dK
        for (bool first = true;; first = false) {
            const u32 stage = slot.stage;
            const bool last = uniform(step().last());
            probabilities();
            if (!first) release_read(shared.barrier(q_empty + (stage ^ 1)));
            await_douts();
            compute_dp(s, own_rows(shared.v()), shared.dout(stage));
            accumulate(dv, fragments, shared.dout(stage));  // line 16
            gradients();
            release_read(shared.barrier(do_empty + stage));
            slot.advance();
            if (last) break;
            issue_s();
            accumulate(dk, fragments, shared.q(stage));  // line 22
        }
        accumulate(dk, fragments, shared.q(slot.stage ^ 1));
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dk);
        ptx::wgmma_pin(dv);
        release_read(shared.barrier(q_empty + (slot.stage ^ 1)));
    }

    __device__ __forceinline__ void run(const Maps& maps) {
        for (; await_keys(); keys.advance()) {
            await_values();
            clear(dk);
            clear(dv);
            ptx::wgmma_pin(dk);  // before any product is under way
            ptx::wgmma_pin(dv);
            const Work work = this->work();
            if (uniform(work.seen())) accumulate_steps();
            write_keys<slabs_v>(*this, work, dv, static_cast<float>(p.dropout_scale), maps.dv, key_gradient(p.dv, p.dv_acc), p.head_dim_v,
                                own_rows(shared.v()), v_empty, warpgroup);
            write_keys<slabs>(*this, work, dk, static_cast<float>(p.scale * p.dropout_scale), maps.dk, key_gradient(p.dk, p.dk_acc), p.head_dim,
                              own_rows(shared.k(keys.stage)), k_empty + keys.stage, warpgroup);
        }
    }
};

}  // namespace sm90::bwd
