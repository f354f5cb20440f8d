// A consumer warpgroup: 64 query rows against all their key tiles, row tile after row tile.
//
// The scores of a tile are issued together with P V of the tile before it, whose exponentials are done, so that a
// warpgroup comes to the tensor cores once per step and with both products.  While it is in its softmax, the products
// of the others run; a ping-pong of barriers keeps that order.  With cfg::overlap the softmax begins under the warpgroup's own P V, which
// pays where rows are long.  With two buffers for queries all this goes on across row tiles.
#pragma once
#include "attn/philox.cuh"
#include "sm90/fwd_bias.cuh"
#include "sm90/fwd_epilogue.cuh"
#include "sm90/fwd_mask.cuh"

namespace sm90::fwd {

// The next keys, and the warpgroup's own P V, are awaited halfway through the exponentials: both have long been there, and
// rounding P then runs beside the other half.  Three warpgroups fill each other's gaps, and do better with one long stretch.
constexpr bool proceeds_early = cfg::overlap && warpgroups == 2;
constexpr int middle = value_steps / 2 - 1;  // the block of 16 keys behind which that is
constexpr bool completes = adds_bias || (cfg::score && !cfg::split_score);  // what comes between products and scores is more than a scale or softcap
constexpr bool hides_late = cfg::split_bias && !told_bias;  // where tiles are counted
constexpr bool looks_for_values = cfg::dropout > 0;  // behind the exponentials; else it costs more than it saves
constexpr int output_blocks = cfg::head_dim_v / 16;
constexpr bool search_beside = cfg::head_dim <= 128 && !block_mask && cfg::dropout == 0;
// Under column masks whole key tiles have steps of their own where rows are long and registers allow it: a warp waits for its instructions behind
// those that it jumps over.
constexpr bool steps_apart = cfg::overlap && column_masks > 0 && search_beside && !cfg::bias && !cfg::score;

// cfg::whole_rows: not all row tiles are in parts.  Beside parts three warpgroups have no registers to go from one row tile to the next without a pause, or
// to pass over one of which (cfg::some_absent) they have no rows.
constexpr bool roomy = !cfg::split || (cfg::whole_rows && warpgroups < 3);
constexpr bool crosses = cfg::q_stages > 1 && roomy, passes_rows = cfg::some_absent && !later_tiles_vary && roomy;

// What all lanes agree on once of a tile whose bias tensor cores add, which spares most tiles all other votes.
struct Agreed {
    bool is_ordinary;
    __device__ __forceinline__ void agree_on(const KeyTile& tile) { is_ordinary = uniform(tile.ordinary()); }
    __device__ __forceinline__ bool ordinary() const { return is_ordinary; }
};
struct NotAgreed {
    __device__ __forceinline__ void agree_on(const KeyTile&) {}
    __device__ __forceinline__ bool ordinary() const { return false; }
};

// What is known of a key tile: that some of its elements are tested, that none is, or neither.
enum class Cut { yes, no, asked };

struct Consumer : Either<told_bias, Agreed, NotAgreed>::type {
    const Params& p;
    const ptx::TensorMap& o_map;
    const Shared shared;
    const u32 warpgroup;

    Slot<cfg::stages> k, v;
    Slot<cfg::q_stages> q;
    u32 leaving = 0;   // barrier of the buffer that an output is leaving through, or 0
    Work work;        // the row tile being worked on
    KeyTile tile;     // the key tile whose keys have arrived
    bool arrived = false;  // had the next keys when they were looked for, and what
    KeyTile next;          // came with them
    bool values_arrived;   // had the tile's values when they were looked for
    bool seen;        // this warpgroup's rows see something of it
    Visible visible;  // what of it, if that is only a part
    Softmax state;
    float factor[2];
    Scores s;
    Weights weights, kept;
    Output o;

    // With keys come their tile's code, intervals and bias, which every lane reads.
    __device__ __forceinline__ void release_keys() {
        const u32 empty = shared.barrier(k_empty + k.stage);
        keys_are_read ? release_read(empty) : release(empty);
        k.advance();
    }

    // Looks for the next keys during the exponentials, so that nobody waits for the answer behind them.
    __device__ __forceinline__ void look_for_keys(int block) {
        constexpr int when = proceeds_early ? middle / 2 : value_steps / 2;
        if (block == when) arrived = ptx::mbarrier_passed(shared.barrier(k_full + k.stage), k.phase);
        if (later_tiles_vary && block == when + 1 && arrived) next = told();
    }

    // What came with the next keys.
    __device__ __forceinline__ KeyTile told() const {
        if constexpr (told_bias) return {shared.code(k.stage).code | shared.hiding(k)};
        return shared.code(k.stage);
    }

    template <bool first = false>
    __device__ __forceinline__ void await_keys() {
        if constexpr (later_tiles_vary) tile = next;
        if (!__all_sync(~0u, arrived)) {
            ptx::mbarrier_wait(shared.barrier(k_full + k.stage), k.phase);
            if constexpr (later_tiles_vary) tile = told();
        }
        if constexpr (!later_tiles_vary) tile = counted_tile(p, first, top_tile(p, work), tile, lowest_tile(work));
        arrived = false;
        agree_on(tile);
        seen = !later_tiles_vary || ordinary() || !uniform(tile.hidden(warpgroup));
    }

    template <Cut cut = Cut::asked>
    __device__ __forceinline__ bool is_cut() const {
        if constexpr (cut != Cut::asked) return cut == Cut::yes;
        return !ordinary() && uniform(tile.partial(warpgroup) || (told_bias && tile.hides()));
    }

    // Waits for the next row tile's queries and first keys; false when there is no further row tile.
    __device__ __forceinline__ bool await_row() {
        ptx::mbarrier_wait(shared.barrier(q_full + q.stage), q.phase);
        work = shared.work(q.stage);
        if (uniform(work.head < 0)) return false;
        await_keys<true>();
        if constexpr (passes_rows) seen = uniform(work.row + 64 * static_cast<i32>(warpgroup) < p.n_queries);
        return true;
    }

    __device__ __forceinline__ i32 row() const { return work.row + 64 * warpgroup + fragment_row(); }

    template <class Beside>
    __device__ __forceinline__ void issue_scores(const Beside& beside) {
        compute_s(s, shared.q(q.stage) + 64 * warpgroup * row_bytes, shared.k(k.stage), beside);
        if constexpr (cfg::split_score) add_parts(s, shared.halves(), shared.parts(k));
        ptx::wgmma_commit();
        if constexpr (cfg::split_bias) {
            if (!uniform(shared.adds(k))) return;
            ptx::wgmma_fence();  // for the assembler, which else waits for products where ways meet
            add_parts(s, shared.halves(), shared.parts(k));
            ptx::wgmma_commit();
        }
    }

    // Line 15; the sum is divided by l at the row's end.
    template <class Beside>
    __device__ __forceinline__ void issue_values(const Beside& beside) {
        if (!looks_for_values || !__all_sync(~0u, values_arrived))
            ptx::mbarrier_wait(shared.barrier(v_full + v.stage), v.phase);
        compute_o(o, weights, shared.v(v.stage), beside);
    }

    // The phases of finding the tile's visible elements that belong to one of `steps` steps.
    __device__ __forceinline__ void search(int step, int steps) {
#pragma unroll
        for (int phase = 0; phase < search_phases; ++phase) {
            if (phase * steps / search_phases != step) continue;
            if (told_bias && !uniform(tile.partial(warpgroup)))
                visible[0] = visible[1] = ~0u;
            else if (function_mask && phase + 1 == search_phases)
                ask_function(visible, p, work, row(), tile.n());
            else if constexpr (!by_table)
                find_in_band(visible, p, row(), tile.n());
            else
                find_in_table(visible, phase, p, {shared.cols(k.stage), shared.bits(k.stage, warpgroup)}, work, work.row + 64 * warpgroup,
                              tile.n());
        }
        if (told_bias && step + 1 == steps && uniform(tile.hides())) hide_keys(visible, shared.parts(k));
    }

    // What a score function asks about the thread's rows, and what the bias adds to the tile's scores: read while products are issued.
    struct Completion {
        AskedRows asked;
        Bias<bias_form> bias;
    };
    __device__ __forceinline__ void prepare(Completion& with, int step) {
        if constexpr (cfg::split_score) {
            if (cfg::row_offsets && step == 0) find_offsets();
        } else if constexpr (cfg::score) with.asked.ask(step, score_steps, p, work, row(), first_key());
        if constexpr (bias_ahead) read_bias(with, step, score_steps);
    }
    __device__ __forceinline__ void find_offsets() {
        const Work& at = shared.work(q.stage);  // of registers there are few
        const SplitScore score(p, at.batch, at.head, tile.n() * cfg::block_n);
        unroll<2>([&](int r) { state.set_offset(r, ptx::opaque(score.of_row(max(row(), 0) + 8 * r))); });
    }
    __device__ __forceinline__ void read_bias(Completion& with, int step, int steps) const {
        with.bias.load(step, steps, p, shared, k.stage, work, row(), tile.n());
    }

    // The first of the thread's keys.
    __device__ __forceinline__ i32 first_key() const { return tile.n() * cfg::block_n + 2 * (threadIdx.x % 4); }

    // Algorithm 2, line 10 (FlashMask algorithm 1, line 17): issues the scores; where registers allow it, what is visible of a partial tile is found meanwhile.
    template <Cut cut = Cut::asked>
    __device__ __forceinline__ void begin_scores(Completion& with) {
        if (search_beside && is_cut<cut>())
            issue_scores([&](int step) { search(step, score_steps), prepare(with, step); });
        else
            issue_scores([&](int step) { prepare(with, step); });
    }

    // While the products run: the same where registers are fewer.
    template <Cut cut = Cut::asked>
    __device__ __forceinline__ void search_behind() {
        if (!search_beside && is_cut<cut>()) search(0, 1);
    }

    // The scores are there: their keys' buffer goes back at once, since only a few are under way.
    __device__ __forceinline__ void finish_scores(Completion& with) {
        ptx::wgmma_pin(s);
        if constexpr (bias_late) {
            read_bias(with, 0, 1);
            complete(with);
        }
        release_keys();
        if constexpr (completes && !bias_late) complete(with);
    }

    // Keys that the bias hides, whose scores are -inf, or NaN, whatever they hold.
    __device__ __forceinline__ void hide_keys_late() {
        if constexpr (hides_late)
            if (uniform(shared.hiding(k.before()) != 0)) hide_scores(s, shared.parts(k.before()));
    }

    __device__ __forceinline__ void complete(const Completion& with) {
        complete_scores(s, p, with.bias, with.asked, first_key());
    }

    // Line 11 (FlashMask algorithm 1, lines 18-25): prescales and masks the scores.
    template <Cut cut>
    __device__ __forceinline__ void refine_scores() {
        if constexpr (cfg::prescaled && !completes) prescale(s, p);
        if (is_cut<cut>()) mask_scores(s, visible);
    }

    // Lines 11 to 13: the scores, and the running softmax.  What dropout keeps is drawn between the exponentials, block by block: the two wait for
    // different units.  True when earlier outputs must be multiplied by factor.
    template <bool early, Cut cut = Cut::asked>
    __device__ __forceinline__ bool update_softmax(bool last, bool settled) {
        const RandomStream stream = cfg::dropout ? random_stream(p.dropout, work.batch, work.head) : RandomStream{};
        const i32 key = first_key();
        refine_scores<cut>();
        const bool grown = follow(state, factor, s, settled, [&] { hide_keys_late(); });
        exponentiate(state, s, [&](int block, const float (&sums)[4]) {
            look_for_keys(block);
            if (early && block == middle) proceed<true>(last, fminf(fminf(sums[0], sums[1]), fminf(sums[2], sums[3])));
            if constexpr (cfg::dropout > 0) {
                u32 words[4];
                random_words(words, p, stream, row(), key + 16 * block);
                unroll<4>([&](int w) { kept[block][w] = drop_pair<cfg::dropout>(~0u, words[w]); });
            }
        });
        return grown;
    }

    // Awaits the next keys, if there are any, and lets out the values before where they are `pending`.
    template <bool pending>
    __device__ __forceinline__ void proceed(bool last, float sum) {
        // No sum is negative.  The question keeps exponentials and sums above the wait for P V, which the assembler would
        // otherwise do first.
        if constexpr (pending) last = uniform(last || sum < 0.0f);
        if (!last) await_keys();
        if constexpr (pending) {
            ptx::wgmma_wait<0>();
            finish_values();
        }
        if constexpr (looks_for_values) values_arrived = ptx::mbarrier_passed(shared.barrier(v_full + v.stage), v.phase);
    }

    // Line 14: P as it enters P V: rounded, and with dropout thinned out (l and m are those of the whole P).
    __device__ __forceinline__ void weigh() {
        round_weights(weights, s);
        if constexpr (cfg::dropout > 0) {
            unroll<cfg::block_n / 4>([&](int i) { weights[i / 4][i % 4] &= kept[i / 4][i % 4]; });
        }
    }

    __device__ __forceinline__ float output_scale() const {
        return cfg::dropout > 0 ? static_cast<float>(p.dropout_scale) : 1.0f;
    }

    __device__ __forceinline__ void finish_values() {
        ptx::wgmma_pin(o);
        release(shared.barrier(v_empty + v.stage));
        v.advance();
    }

    __device__ __forceinline__ void clear() {
        unroll<cfg::head_dim_v / 2>([&](int i) { o[i] = 0.0f; });
    }

    // A key tile with nothing to overlap with.  True when the row has no further one.
    __device__ __forceinline__ bool single() {
        await_turn(warpgroup);
        Completion with;
        begin_scores(with);
        pass_turn(warpgroup);
        with.bias.unpack(0, 1);
        search_behind();
        ptx::wgmma_wait<0>();
        const bool last = uniform(tile.last());
        finish_scores(with);
        if (update_softmax<false>(last, false)) rescale(o, factor);
        weigh();
        proceed<false>(last, 0.0f);
        return last;
    }

    // Passes over a hidden key tile.  It takes part in the ping-pong all the same, which counts tiles, and lets the
    // values before it out, if any are pending.  A row's last tile is never hidden.
    __device__ __forceinline__ void pass(bool pending) {
        await_turn(warpgroup);
        if (pending) drain();
        pass_turn(warpgroup);
        release_keys();
        ptx::mbarrier_wait(shared.barrier(v_full + v.stage), v.phase);
        release(shared.barrier(v_empty + v.stage));
        v.advance();
    }

    // Passes over a row tile of which the warpgroup has no rows, where tiles are counted.
    __device__ __forceinline__ void pass_row() {
        free_output();
        for (bool last = false; !last;) {
            last = uniform(tile.last());
            pass(false);
            if (!last) await_keys();
        }
        ptx::mbarrier_arrive(shared.barrier(q_empty + q.stage));
        q.advance();
    }

    // Do all lanes see so much of a cut tile that each of their rows' shares is likely to have a positive score?  Three warpgroups do not gain by it.
    __device__ __forceinline__ bool shows_many() const { return proceeds_early && __all_sync(~0u, __popc(visible[0]) >= 8 && __popc(visible[1]) >= 8); }

    // Scores of a tile beside P V of the tile before.  True when this was the last tile of the row.
    template <Cut cut>
    __device__ __forceinline__ bool step() {
        await_turn(warpgroup);
        Completion with;
        begin_scores<cut>(with);
        issue_values([&](int step) { with.bias.unpack(step, value_steps); });
        pass_turn(warpgroup);
        free_output();
        search_behind<cut>();
        ptx::wgmma_wait<1>();
        finish_scores(with);
        const bool last = uniform(tile.last()), settled = !plain && (!is_cut<cut>() || (cut == Cut::yes && shows_many()));
        if constexpr (!cfg::overlap) {
            ptx::wgmma_wait<0>();
            finish_values();
        }
        const bool grown = update_softmax<proceeds_early, cut>(last, settled);
        if constexpr (cfg::overlap && !proceeds_early) proceed<true>(last, fminf(state.sum[0], state.sum[1]));
        weigh();
        if constexpr (!cfg::overlap) proceed<false>(last, 0.0f);
        if (grown) rescale(o, factor);
        return last;
    }

    // Key tiles one after the other, until the row's last one or one that is hidden.
    __device__ __forceinline__ bool steps() {
        bool last;
        do {
            if constexpr (!later_tiles_vary) last = step<Cut::no>();
            else if constexpr (!steps_apart) last = step<Cut::asked>();
            else if (is_cut()) last = step<Cut::yes>();
            else
                do last = step<Cut::no>();
                while (!last && seen && !is_cut());
        } while (!last && seen);
        return last;
    }

    // From one row tile to the next: the last P V of the row tile `before`, whose output leaves under the first scores.
    // True when the new row has one key tile only.
    __device__ __forceinline__ bool cross(const Work& before, Slot<cfg::q_stages> buffer) {
        await_turn(warpgroup);
        // The new row's first tile is its diagonal one, as a rule: what is visible of it is found here.
        if (search_beside && is_cut())
            issue_values([&](int step) { search(step, value_steps); });
        else
            issue_values([](int) {});
        search_behind();
        const Ending ending = begin_ending(before, state, buffer);
        ptx::wgmma_wait<0>();
        finish_values();
        clear_empty_rows(ending);
        Completion with;
        issue_scores([&](int step) {
            unroll<output_blocks>([&](int block) { if (block * score_steps / output_blocks == step) write_columns(ending, block); });
            prepare(with, step);
        });
        pass_turn(warpgroup);
        with.bias.unpack(0, 1);
        finish_ending(ending);
        state.reset();
        clear();
        ptx::wgmma_wait<0>();
        const bool last = uniform(tile.last());
        finish_scores(with);
        update_softmax<false>(last, false);
        weigh();
        proceed<false>(last, 0.0f);
        return last;
    }

    // The last P V of a row tile, without company.
    __device__ __forceinline__ void drain() {
        issue_values([](int) {});
        ptx::wgmma_wait<0>();
        finish_values();
    }

    // Gives a stored output's buffer back to the producer, long after the store began.
    __device__ __forceinline__ void free_output() {
        if (!stage_output || leaving == 0) return;
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
        ptx::mbarrier_arrive(leaving);
        leaving = 0;
    }

    // How a row tile ends: its place, the buffer that its output leaves through, l relative to the reference.
    struct Ending {
        Work of;
        u32 stage;
        float sum[2], normal[2];
    };

    // Ends the row tile `before`, whose queries lay in `buffer`; all but the last product of its output is there.
    __device__ __forceinline__ Ending begin_ending(const Work& before, const Softmax& rows,
                                                   Slot<cfg::q_stages> buffer) {
        free_output();
        // Its announcement lies there until its output has left, and registers are few.
        Ending ending{stage_output ? shared.work(buffer.stage) : before, buffer.stage, {}, {}};
        unroll<2>([&](int r) {
            ending.sum[r] = quad_sum(rows.sum[r]);
            ending.normal[r] = ending.sum[r] == 0.0f ? 0.0f : __fdividef(output_scale(), ending.sum[r]);
        });
        return ending;
    }

    // A row that saw nothing met only zero weights; a NaN among the values must not survive that.
    __device__ __forceinline__ void clear_empty_rows(const Ending& ending) {
        if (!may_hide_rows || !uniform(ending.sum[0] == 0.0f || ending.sum[1] == 0.0f)) return;
        unroll<cfg::head_dim_v / 2>([&](int i) { o[i] = ending.sum[half_of(i)] == 0.0f ? 0.0f : o[i]; });
    }

    // Normalises 16 columns of the output, and stages them.
    __device__ __forceinline__ void write_columns(const Ending& ending, int block) {
#pragma unroll
        for (int i = 8 * block; i < 8 * block + 8; ++i) o[i] *= ending.normal[half_of(i)];
        if constexpr (stage_output) stage_columns(o, shared.q(ending.stage), warpgroup, block);
    }

    // Leaves a part's output and statistics in memory.  The last of a row tile's parts to come here adds all of them up, in their order, which is no
    // other from run to run: true, and what is left of the row tile's end is as if it had no parts.
    __device__ __forceinline__ bool merge_parts(const Part& part, Ending& ending) {
        constexpr int pieces = cfg::head_dim_v / 8;
        const u32 thread = place_of_thread();
        const i64 slot = part.tile * warpgroups + static_cast<i32>(warpgroup), first = slot * p.splits;
        float4* const outputs = static_cast<float4*>(p.o_part) + first * pieces * 128 + thread;
        float4* const rows = static_cast<float4*>(p.l_part) + first * 128 + thread;
        float l[2], top[2];
        unroll<2>([&](int r) { top[r] = quad_max(state.top[r]), l[r] = sum_at_maximum(state, r, top[r], ending.sum[r]); });
        // The warp's rows: of those that are not there nothing is stored or read.
        const i32 warp_row = ending.of.row + 64 * static_cast<i32>(warpgroup) + 16 * static_cast<i32>(thread / 32);
        const bool some = uniform(warp_row > -16 && warp_row < p.n_queries);
        if (some) {
            __stcg(rows + part.number * 128, make_float4(l[0], l[1], top[0], top[1]));
            float4* own = outputs + part.number * pieces * 128;
            unroll<pieces>([&](int i) {
                const float* x = o + 4 * i;
                __stcg(own + 128 * i, make_float4(x[0] * ending.normal[0], x[1] * ending.normal[0], x[2] * ending.normal[1], x[3] * ending.normal[1]));
            });
        }
        __threadfence();  // what this thread stored comes before the count
        ptx::barrier_sync(store_barrier + warpgroup, 128);
        bool last = false;
        if (thread == 0) last = atomicInc(reinterpret_cast<u32*>(p.counters) + 1 + slot, part.count - 1) == part.count - 1;
        if (!uniform(ptx::barrier_any(store_barrier + warpgroup, 128, last))) return false;
        if (!some) return true;
        __threadfence();  // and the count before what is read
        unroll<2>([&](int r) { top[r] = minus_infinity(), l[r] = 0.0f; });
        for (i32 i = 0; i < part.count; ++i) {
            const float4 x = __ldcg(rows + i * 128);
            top[0] = fmaxf(top[0], x.z), top[1] = fmaxf(top[1], x.w);
        }
        clear();
        for (i32 i = 0; i < part.count; ++i) {
            const float4 x = __ldcg(rows + i * 128);
            const float weight[2] = {weight_of(x.x, x.z, top[0]), weight_of(x.y, x.w, top[1])};
            unroll<2>([&](int r) { l[r] += weight[r]; });
            unroll<pieces>([&](int n) {
                const float4 y = __ldcg(outputs + (i * pieces + n) * 128);
                o[4 * n] += weight[0] * y.x, o[4 * n + 1] += weight[0] * y.y, o[4 * n + 2] += weight[1] * y.z, o[4 * n + 3] += weight[1] * y.w;
            });
        }
        unroll<2>([&](int r) {
            state.top[r] = top[r];
            state.shift[r] = -top[r] * state.scale;
            ending.sum[r] = l[r];
            ending.normal[r] = l[r] == 0.0f ? 0.0f : __fdividef(1.0f, l[r]);
        });
        return true;
    }
    // What a part counts in a row whose maximum is `top`.
    __device__ __forceinline__ float weight_of(float l, float own, float top) const {
        return own == minus_infinity() ? 0.0f : l * ptx::ex2((own - top) * state.scale);
    }

    __device__ __forceinline__ void finish_ending(const Ending& ending) {
        const i32 first = ending.of.row + 64 * warpgroup + fragment_row();
        if constexpr (stage_output) {
            store_output(o_map, shared.q(ending.stage), warpgroup, ending.of);
            leaving = shared.barrier(q_empty + ending.stage);
            if constexpr (cfg::q_stages == 1) free_output();
        } else {
            write_float(o, p, p.o, ending.of, first);
        }
        write_statistics(p, ending.of, first, state, ending.sum);
    }

    // The end of a row tile with nothing to overlap with; one that may be `in_parts` keeps its buffer until then.
    __device__ __forceinline__ void write(const Work& before, Slot<cfg::q_stages> buffer, bool in_parts) {
        drain();
        Ending ending = begin_ending(before, state, buffer);
        clear_empty_rows(ending);
        if constexpr (cfg::split) {
            const Part part = in_parts ? shared.part(buffer.stage) : Part{};
            if (uniform(part.count > 1) && !merge_parts(part, ending)) return ptx::mbarrier_arrive(shared.barrier(q_empty + buffer.stage));
        }
        unroll<output_blocks>([&](int block) { write_columns(ending, block); });
        finish_ending(ending);
        if (!stage_output && in_parts) ptx::mbarrier_arrive(shared.barrier(q_empty + buffer.stage));
    }

    __device__ __forceinline__ void run() {
        if (warpgroup + 1 == warpgroups) pass_turn(warpgroup);  // the first warpgroup begins
        bool some = await_row();
        while (some) {
            if (passes_rows && !seen) {
                pass_row();
                some = await_row();
                continue;
            }
            state.reset();
            clear();
            bool last = false, pending = false, in_parts = false;
            Work before;
            Slot<cfg::q_stages> buffer;
            for (;;) {
#pragma unroll 1
                while (!last) {
                    if (later_tiles_vary && !seen) {
                        pass(pending);
                        await_keys();
                        pending = false;
                    } else if (!pending) {
                        last = single();
                        pending = true;
                    } else {
                        last = steps();
                    }
                }
                before = work;
                buffer = q;
                q.advance();
                if constexpr (cfg::split) in_parts = !crosses || uniform(shared.part(buffer.stage).count > 1);
                if (!stage_output && !in_parts) ptx::mbarrier_arrive(shared.barrier(q_empty + buffer.stage));
                if (!crosses || in_parts) break;
                free_output();
                some = await_row();
                if (!some || !seen) break;
                last = cross(before, buffer);
            }
            write(before, buffer, in_parts);
            if (!crosses || in_parts) some = await_row();
        }
        free_output();  // shared memory is read until then
    }
};

}  // namespace sm90::fwd
