// A consumer warpgroup along tangents: 64 query rows against all their key tiles, row tile after row tile.
//
// Scores and their tangents take the registers of half a block, the sums of o and of its tangent those of the other half, and no tile's scores are
// issued before the sums of the tile before are done.  The two warpgroups take turns: one's softmax runs under the other's products, P V of a
// tile and the scores of the next.  So nothing is under way where sums are brought up to date, and the centre (sm80/jvp.cu) moves with every tile.
#pragma once
#include "attn/philox.cuh"
#include "attn/tangents.cuh"
#include "sm90/fwd_epilogue.cuh"
#include "sm90/fwd_mask.cuh"
#include "sm90/operands.cuh"

namespace sm90::fwd {

struct TangentConsumer {
    const TangentParams& p;
    const ptx::TensorMap &o_map, &to_map;
    const Shared shared;
    const u32 warpgroup;

    Slot<cfg::stages> k, v;
    Slot<cfg::q_stages> q;
    Work work;     // the row tile being worked on
    KeyTile tile;  // the key tile whose keys have arrived
    bool seen;     // this warpgroup's rows see something of it
    Softmax state;
    float mean[2];    // sum of exp2(score * scale + shift) times the score's raw tangent, this lane's share
    float centre[2];  // what tangents of scores are relative to
    Scores s, t;
    Weights weights, moved;  // P, and P times the tangents of scores relative to the centre
    Output o, to;

    // The first of the thread's two rows, and of its keys.
    __device__ __forceinline__ i32 row() const {
        const i32 thread = place_of_thread();
        return work.row + 64 * static_cast<i32>(warpgroup) + thread / 32 * 16 + thread % 32 / 4;
    }
    __device__ __forceinline__ i32 first_key() const { return tile.n() * cfg::block_n + place_of_thread() % 4 * 2; }
    __device__ __forceinline__ float tangent_scale() const { return cfg::prescaled ? 1.0f : fabsf(static_cast<float>(p.scale)); }

    // The row's first keys, or the next ones.
    __device__ __forceinline__ void await_keys(bool first) {
        ptx::mbarrier_wait(shared.barrier(k_full + k.stage), k.phase);
        if constexpr (later_tiles_vary) tile = shared.code(k.stage);
        else tile = counted_tile(p, first, top_tile(p, work), tile, lowest_tile(work));
        seen = !later_tiles_vary || !uniform(tile.hidden(warpgroup));
    }

    // True if the tile was the row's last one; else awaits the next keys.
    __device__ __forceinline__ bool advance() {
        const bool last = uniform(tile.last());
        if (!last) await_keys(false);
        return last;
    }

    // With keys come their tile's code, intervals and bits, which every lane reads.
    __device__ __forceinline__ void release_keys() {
        const u32 empty = shared.barrier(k_empty + k.stage);
        keys_are_read ? release_read(empty) : release(empty);
        k.advance();
    }

    __device__ __forceinline__ void release_values() {
        release(shared.barrier(v_empty + v.stage));
        v.advance();
    }

    // S = Q K^T, and its tangent Q K.^T + Q. K^T; asynchronous.
    __device__ __forceinline__ void issue_scores() {
        const u32 rows = shared.q(q.stage) + 64 * warpgroup * row_bytes, keys = shared.k(k.stage);
        ptx::wgmma_fence();
        multiply_rows<cfg::head_dim, cfg::block_m, cfg::block_n, sign>(s, rows, keys);
        if constexpr (cfg::tk) multiply_rows<cfg::head_dim, cfg::block_m, cfg::block_n, sign>(t, rows, keys + k_part);
        if constexpr (cfg::tq) multiply_rows<cfg::head_dim, cfg::block_m, cfg::block_n, sign>(t, rows + q_part, keys, cfg::tk);
        ptx::wgmma_commit();
    }

    // O += P V, and its tangent, P (S. - c) V + P V.; the buffer of the values goes back.
    __device__ __forceinline__ void add_values() {
        ptx::mbarrier_wait(shared.barrier(v_full + v.stage), v.phase);
        const u32 values = shared.v(v.stage);
        ptx::wgmma_fence();
        accumulate_rows<cfg::block_n>(o, weights, values);
        if constexpr (cfg::moves) accumulate_rows<cfg::block_n>(to, moved, values);
        if constexpr (cfg::tv) accumulate_rows<cfg::block_n>(to, weights, values + v_part);
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(o);
        ptx::wgmma_pin(to);
        release_values();
    }

    __device__ __forceinline__ void find_visible(Visible& visible) const {
        if constexpr (by_table) {
            unroll<5>([&](int phase) {
                find_in_table(visible, phase, p, {shared.cols(k.stage), shared.bits(k.stage, warpgroup)}, work, work.row + 64 * static_cast<i32>(warpgroup), tile.n());
            });
        } else {
            find_in_band(visible, p, row(), tile.n());
        }
        if constexpr (function_mask) ask_function(visible, p, work, row(), tile.n());
    }

    // Softcap, function and bias; and scales that no maximum survives.
    __device__ __forceinline__ void move_scores() {
        const TracedHead head = TracedHead::of(p, work.batch, work.head);
        const i64 bias = cfg::bias ? slice_of(p.bias, work.batch, work.head) : 0, tbias = cfg::tbias ? slice_of(p.tbias, work.batch, work.head) : 0;
        unroll<2>([&](int r) {
            const i32 at = max(row() + 8 * r, 0);
            const TracedRow own = TracedRow::of(p, head, at);
            unroll<cfg::block_n / 8, 2>([&](int n, int e) {
                float &x = s[4 * n + 2 * r + e], &y = t[4 * n + 2 * r + e];
                const i32 key = first_key() + 8 * n + e;
                const MovedScore made = move_score(p, x, cfg::tq || cfg::tk ? y : 0.0f, bias, tbias, at, key, head, own, TracedKey::of(p, head, key));
                x = made.score, y = made.score == minus_infinity() ? 0.0f : made.tangent;
            });
        });
    }

    // Brings the softmax, the centre and the sums up to date with the tile's scores.
    __device__ __forceinline__ void follow_scores(bool settled) {
        float factor[2], delta[2];
        const bool grown = follow(state, factor, s, settled, [] {});
        float chain[4] = {};
        exponentiate(state, s, [&](int block, const float (&)[4]) {
            if constexpr (cfg::moves)
                unroll<8>([&](int e) { chain[e & 3] = fmaf(s[8 * block + e], t[8 * block + e], chain[e & 3]); });
        });
        if (grown) rescale(o, factor), rescale(to, factor);
        if constexpr (!cfg::moves) return;
        unroll<2>([&](int r) {
            mean[r] = (grown ? mean[r] * factor[r] : mean[r]) + (chain[2 * r] + chain[2 * r + 1]);
            const float sum = quad_sum(state.sum[r]), moved_sum = quad_sum(mean[r]);  // by all lanes, whichever rows are empty
            const float next = sum == 0.0f ? 0.0f : __fdividef(moved_sum * tangent_scale(), sum);
            delta[r] = centre[r] - next;
            centre[r] = next;
        });
        unroll<cfg::head_dim_v / 2>([&](int i) { to[i] = fmaf(delta[half_of(i)], o[i], to[i]); });
    }

    // Weights as they enter products: rounded, and with dropout thinned out.
    __device__ __forceinline__ void weigh() {
        const float scale = tangent_scale();
        const RandomStream stream = cfg::dropout ? random_stream(p.dropout, work.batch, work.head) : RandomStream{};
        const auto moved_weight = [&](int i) { return s[i] * fmaf(t[i], scale, -centre[half_of(i)]); };
        unroll<value_steps>([&](int block) {
            u32 words[4];
            if constexpr (cfg::dropout > 0) random_words(words, p, stream, row(), first_key() + 16 * block);
            unroll<4>([&](int w) {
                const int i = 8 * block + 2 * w;
                const u32 kept = cfg::dropout ? drop_pair<cfg::dropout>(~0u, words[w]) : ~0u;
                weights[block][w] = pack(s[i], s[i + 1]) & kept;
                if constexpr (cfg::moves) moved[block][w] = pack(moved_weight(i), moved_weight(i + 1)) & kept;
            });
        });
    }

    // A key tile's scores and weights, behind the sums of the tile before, where some are pending.
    template <bool pending>
    __device__ __forceinline__ void attend() {
        await_turn(warpgroup);
        if constexpr (pending) add_values();
        issue_scores();
        pass_turn(warpgroup);
        const bool cut = uniform(tile.partial(warpgroup));
        Visible visible;
        if (cut) find_visible(visible);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(s);
        if constexpr (cfg::tq || cfg::tk) ptx::wgmma_pin(t);
        release_keys();
        if constexpr (cfg::prescaled) move_scores();
        if (cut) {
            mask_scores(s, visible);
            if constexpr (cfg::moves) mask_scores(t, visible, 0.0f);
        }
        follow_scores(pending && !cut);
        weigh();
    }

    // Passes over a tile that is hidden from the warpgroup's rows; a row's last one never is.
    __device__ __forceinline__ void pass(bool pending) {
        await_turn(warpgroup);
        if (pending) add_values();
        pass_turn(warpgroup);
        release_keys();
        ptx::mbarrier_wait(shared.barrier(v_full + v.stage), v.phase);
        release_values();
    }

    __device__ __forceinline__ void begin_row() {
        state.reset();
        unroll<2>([&](int r) { mean[r] = centre[r] = 0.0f; });
        unroll<cfg::head_dim_v / 2>([&](int i) { o[i] = to[i] = 0.0f; });
    }

    // Normalises a result and hands it on.
    __device__ __forceinline__ void write(Output& x, const float (&normal)[2], const ptx::TensorMap& map, const Operand& array, u32 staged) const {
        unroll<cfg::head_dim_v / 2>([&](int i) { x[i] = normal[half_of(i)] == 0.0f ? 0.0f : x[i] * normal[half_of(i)]; });
        if constexpr (stage_output) {
            unroll<cfg::head_dim_v / 16>([&](int block) { stage_columns(x, staged, warpgroup, block); });
            store_output(map, staged, warpgroup, work);
        } else {
            write_float(x, p, array, work, row());
        }
    }

    // What a part counts in a row whose maximum is `top`.
    __device__ __forceinline__ float weight_of(float l, float own, float top) const {
        return own == minus_infinity() ? 0.0f : l * ptx::ex2((own - top) * state.scale);
    }

    // Leaves a part's results and statistics in memory.  The last of a row tile's parts to come here adds all of them up, in their order, which is no
    // other from run to run (kernels/util/merge.cu): true, and what is left of the row tile's end is as if it had no parts.
    __device__ __forceinline__ bool merge_parts(const Part& part, float (&sum)[2], float (&normal)[2]) {
        constexpr int pieces = cfg::head_dim_v / 8, parts = cfg::first_parts;
        const u32 thread = place_of_thread();
        const i64 slot = part.tile * warpgroups + static_cast<i32>(warpgroup), first = slot * parts;
        float4* const outputs = static_cast<float4*>(p.o_part) + first * 2 * pieces * 128 + thread;
        float4* const rows = static_cast<float4*>(p.l_part) + first * 2 * 128 + thread;
        float l[2], top[2];
        unroll<2>([&](int r) { top[r] = quad_max(state.top[r]), l[r] = sum_at_maximum(state, r, top[r], sum[r]); });
        __stcg(rows + 2 * part.number * 128, make_float4(l[0], l[1], top[0], top[1]));
        __stcg(rows + (2 * part.number + 1) * 128, make_float4(centre[0], centre[1], 0.0f, 0.0f));
        const auto leave = [&](const Output& x, float4* at) {
            unroll<pieces>([&](int n) {
                float y[4];
                unroll<4>([&](int e) { y[e] = normal[e / 2] == 0.0f ? 0.0f : x[4 * n + e] * normal[e / 2]; });
                __stcg(at + 128 * n, make_float4(y[0], y[1], y[2], y[3]));
            });
        };
        leave(o, outputs + 2 * part.number * pieces * 128), leave(to, outputs + (2 * part.number + 1) * pieces * 128);
        __threadfence();  // what this thread stored comes before the count
        ptx::barrier_sync(store_barrier + warpgroup, 128);
        u32& last = shared.last(warpgroup);
        if (thread == 0) last = atomicInc(reinterpret_cast<u32*>(p.counters) + 1 + slot, parts - 1) == parts - 1;
        ptx::barrier_sync(store_barrier + warpgroup, 128);
        if (!uniform(last)) return false;
        __threadfence();  // and the count before what is read
        const auto each = [&](const auto& add) {
#pragma unroll 1  // registers are few
            for (i32 i = 0; i < parts; ++i) {
                const float4 x = __ldcg(rows + 2 * i * 128), y = __ldcg(rows + (2 * i + 1) * 128);
                const float weight[2] = {weight_of(x.x, x.z, top[0]), weight_of(x.y, x.w, top[1])}, mid[2] = {y.x, y.y};
                add(i, weight, mid);
            }
        };
        unroll<2>([&](int r) { top[r] = minus_infinity(), l[r] = centre[r] = 0.0f; });
        for (i32 i = 0; i < parts; ++i) {
            const float4 x = __ldcg(rows + 2 * i * 128);
            top[0] = fmaxf(top[0], x.z), top[1] = fmaxf(top[1], x.w);
        }
        each([&](int, const float (&weight)[2], const float (&mid)[2]) {
            unroll<2>([&](int r) { l[r] += weight[r], centre[r] = fmaf(weight[r], mid[r], centre[r]); });
        });
        unroll<2>([&](int r) {
            state.top[r] = top[r], state.shift[r] = -top[r] * state.scale, sum[r] = l[r];
            normal[r] = l[r] == 0.0f ? 0.0f : __fdividef(1.0f, l[r]);
            centre[r] *= normal[r];
        });
        unroll<cfg::head_dim_v / 2>([&](int i) { o[i] = to[i] = 0.0f; });
        each([&](int i, const float (&weight)[2], const float (&mid)[2]) {
            const float4 *own = outputs + 2 * i * pieces * 128, *along = own + pieces * 128;
            const float moved[2] = {weight[0] * (mid[0] - centre[0]), weight[1] * (mid[1] - centre[1])};
            unroll<pieces>([&](int n) {
                const float4 x = __ldcg(own + n * 128), y = __ldcg(along + n * 128);
                const float a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
                unroll<4>([&](int e) {
                    const int r = e / 2;
                    o[4 * n + e] = fmaf(weight[r], a[e], o[4 * n + e]);
                    to[4 * n + e] = fmaf(moved[r], a[e], fmaf(weight[r], b[e], to[4 * n + e]));
                });
            });
        });
        return true;
    }

    __device__ __forceinline__ void end_row() {
        float sum[2], normal[2];
        unroll<2>([&](int r) {
            sum[r] = quad_sum(state.sum[r]);
            normal[r] = sum[r] == 0.0f ? 0.0f : __fdividef(cfg::dropout > 0 ? static_cast<float>(p.dropout_scale) : 1.0f, sum[r]);
        });
        bool whole = true;
        if constexpr (cfg::split) {
            const Part part = shared.part(q.stage);
            if (uniform(part.count > 1)) whole = merge_parts(part, sum, normal);
        }
        if (whole) write_row(sum, normal);
        ptx::mbarrier_arrive(shared.barrier(q_empty + q.stage));
        q.advance();
    }

    __device__ __forceinline__ void write_row(const float (&sum)[2], const float (&normal)[2]) {
        write(o, normal, o_map, p.o, shared.q(q.stage));
        write(to, normal, to_map, p.to, shared.q(q.stage) + o_part);
        write_statistics(p, work, row(), state, sum);
        float* tlse = static_cast<float*>(p.tlse.data) + slice_of(p.tlse, work.batch, work.head);
        unroll<2>([&](int r) {
            const i32 i = row() + 8 * r;
            if (threadIdx.x % 4 == 0 && is_query(p, i)) tlse[i * p.tlse.row] = sum[r] == 0.0f ? 0.0f : centre[r];
        });
        if (stage_output && threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
    }

    __device__ __forceinline__ void run() {
        state.scale = score_scale(p);
        if (warpgroup + 1 == warpgroups) pass_turn(warpgroup);  // the first warpgroup begins
        for (;;) {
            ptx::mbarrier_wait(shared.barrier(q_full + q.stage), q.phase);
            work = shared.work(q.stage);
            if (uniform(work.head < 0)) return;
            begin_row();
            await_keys(true);
            bool pending = false;
#pragma unroll 1
            for (bool last = false; !last;) {
                if (!seen || !pending) {
                    seen ? attend<false>() : pass(pending);
                    pending = seen, last = advance();
                } else {
                    do {
                        attend<true>();
                        last = advance();
                    } while (!last && seen);
                }
            }
            add_values();
            end_row();
        }
    }
};

}  // namespace sm90::fwd
