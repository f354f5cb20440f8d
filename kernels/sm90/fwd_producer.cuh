// The producer warp: takes the planner's lists and keeps the copy engine busy with keys and values.  All lanes follow,
// lane 0 issues.
#pragma once
#include "attn/score.cuh"
#include "ptx/barrier.cuh"
#include "sm90/fwd_layout.cuh"
#include "sm90/hidden.cuh"
#include "sm90/scores.cuh"

namespace sm90::fwd {

// A key tile and where it comes from.
struct Source : MaskRow {
    KeyTile tile;
    i32 head, batch;  // of k and v
    i32 instance;     // of the mask
    BiasPlace bias;
};

// The bias of a tile's keys on its way to shared memory, block_n / 32 of them in each lane.
struct LoadedKeyBias {
    float of[(cfg::block_n + 31) / 32];

    __device__ __forceinline__ LoadedKeyBias(const Params& p, i64 offset, i32 first_key, u32 lane) {
        lane = ptx::opaque(static_cast<i32>(lane));  // of registers there are few
        unroll<(cfg::block_n + 31) / 32>([&](int i) {
            const i32 column = 32 * i + lane;
            of[i] = column < cfg::block_n && first_key + column < p.n_keys ? bias_at(p, offset, 0, first_key + column) : 0.0f;
        });
    }

    // True if a key is hidden.
    __device__ __forceinline__ bool store(u32 row, u32 lane) const {
        bool hides = false;
        unroll<(cfg::block_n + 31) / 32>([&](int i) {
            if (32 * i + lane < cfg::block_n) ptx::store_shared(row + 4 * (32 * i + lane), of[i]);
            hides |= of[i] == minus_infinity();
        });
        hides = uniform(hides);
        ptx::store_shared(row + 4 * cfg::block_n, hides ? 1.0f : 0.0f);
        return hides;
    }
};

__device__ __forceinline__ void load_bias_tile(const Params& p, const ptx::TensorMap& map, u32 tile, u32 full, const BiasPlace& of, i32 key) {
    load_tile<cfg::block_m, bias_slabs>(map, tile, full, ptx::evict_normal, of.row, {p.bias, of.query_head, of.batch}, key);
}

template <class Beside = Alone>
struct Producer {
    const Params& p;
    const ptx::TensorMap &k_map, &v_map, &bias_map;
    const Shared shared;
    const u32 lane;
    Slot<cfg::stages> k, v;
    Slot<1> list;
    Beside beside;
    u32 raw_phase = 1;

    // With the bias that travels with them; one that is broadcast along rows may leave keys that no row sees.
    __device__ __forceinline__ void load_keys(Source& from) {
        if constexpr (cfg::bias_keys && !cfg::split_bias) {
            const LoadedKeyBias bias = load_bias(from);
            issue_keys(from);
            if (bias.store(shared.key_bias(k.stage), lane)) from.tile.code |= KeyTile::dead_bit;
            ptx::mbarrier_arrive(shared.barrier(k_full + k.stage));
        } else {
            issue_keys(from);
        }
        k.advance();
    }
    __device__ __forceinline__ LoadedKeyBias load_bias(const Source& from) const {
        return {p, slice_of(p.bias, from.bias.batch, from.bias.query_head), from.tile.n() * cfg::block_n, lane};
    }

    __device__ __forceinline__ void issue_keys(const Source& from) {
        const u32 full = shared.barrier(k_full + k.stage);
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        if (lane == 0) {
            shared.code(k.stage) = from.tile;
            const bool with_cols = column_masks > 0 && from.tile.partial(), with_bits = boolean_mask && from.tile.partial();
            ptx::mbarrier_arrive_expect(full, k_bytes + (has_companion ? 0 : bias_bytes) + (with_cols ? cols_bytes : 0) + (with_bits ? bits_bytes : 0));
            const i32 key = from.tile.n() * cfg::block_n;
            if constexpr (cfg::bias_tiles && !has_companion) load_bias_tile(p, bias_map, shared.bias(k.stage), full, from.bias, key);
            load_tile<cfg::block_n, slabs>(k_map, shared.k(k.stage), full, ptx::evict_last, key,
                                           {p.k, from.head, from.batch});
            beside.load_keys(shared.k(k.stage) + k_part, full, key, from.head, from.batch);
            if (with_cols)
                ptx::bulk_load(shared.address + cols_at + k.stage * cols_bytes,
                               p.table.cols + static_cast<i64>(from.instance) * p.table.keys_padded + key, cols_bytes,
                               full);
            if (with_bits) load_bits(from, full);
        }
    }

    // Of rows that are not there, those of others.
    __device__ __forceinline__ void load_bits(const Source& from, u32 full) {
        for (int w = 0; w < warpgroups; ++w) {
            const i32 rows = min(max(from.row() / 64 + w, 0), (p.n_queries - 1) / 64);
            ptx::bulk_load(ptx::shared_address(shared.bits(k.stage, w)), boolean_bits(p, from.instance, rows, from.tile.n()), bits_part, full);
        }
    }

    // Does the bias hide some key of the tile whose values are next?  Of its keys, in the same place of their ring, all is told then.
    __device__ __forceinline__ bool hides() const {
        if constexpr (!cfg::split_bias) return false;
        ptx::mbarrier_wait(shared.barrier(k_full + v.stage), v.phase);
        return shared.hiding(v) != 0;
    }

    __device__ __forceinline__ void load_values(const Source& from) {
        u32 full = shared.barrier(v_full + v.stage);
        ptx::mbarrier_wait(shared.barrier(v_empty + v.stage), v.phase ^ 1);
        if constexpr (cfg::split_bias)  // most tiles; by code of their own, whose barrier needs no register of each lane
            if (!uniform(from.tile.dead() || hides())) return copy_values(from, full);
        if (may_hide_keys && (cfg::split_bias || from.tile.dead())) {
            // The bytes arrive at the cleaner, who passes the tile on.
            ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
            raw_phase ^= 1;
            full = shared.barrier(raw_full);
            if (lane == 0) {
                shared.mail() = {static_cast<i32>(cfg::split_bias ? v.place() : v.stage), from.tile.n(), from.instance};
                if constexpr (cfg::bias_keys && !cfg::split_bias) shared.bias_of_mail() = from.bias;
            }
        }
        copy_values(from, full);
    }
    __device__ __forceinline__ void copy_values(const Source& from, u32 full) {
        if (lane == 0) {
            ptx::mbarrier_arrive_expect(full, v_bytes);
            load_tile<cfg::block_n, slabs_v>(v_map, shared.v(v.stage), full, ptx::evict_last,
                                             from.tile.n() * cfg::block_n, {p.v, from.head, from.batch});
            beside.load_values(shared.v(v.stage) + v_part, full, from.tile.n() * cfg::block_n, from.head, from.batch);
        }
        v.advance();
    }

    // Values of a tile are needed one step after its keys, across row tiles too, unless the next one is not known yet.
    __device__ __forceinline__ void run() {
        Source before{};
        before.tile = KeyTile::none();
        for (;;) {
            if (before.tile.exists() && !uniform(ptx::mbarrier_passed(shared.barrier(list_full), list.phase))) {
                load_values(before);
                before.tile = KeyTile::none();
            }
            ptx::mbarrier_wait(shared.barrier(list_full), list.phase);
            list.advance();
            const TileList& from = shared.list();
            const KeyTile mine = from.tiles[lane];
            const i32 count = from.count;
            Source source{};
            source.tile = mine, source.head = from.head, source.batch = from.batch, source.instance = from.instance;
            source.set_row(from.row());
            if constexpr (cfg::bias || cfg::split_score) source.bias = shared.bias_of_list();
            if (count < 0) break;
            ptx::mbarrier_arrive(shared.barrier(list_empty));
            for (i32 i = 0; i < count; ++i) {
                source.tile.code = __shfl_sync(~0u, mine.code, i);
                load_keys(source);
                if (before.tile.exists()) load_values(before);
                before = source;
            }
        }
        if (before.tile.exists()) load_values(before);
        if (may_hide_keys) {
            ptx::mbarrier_wait(shared.barrier(raw_empty), raw_phase);
            if (lane == 0) {
                shared.mail() = {-1, 0, 0};
                ptx::mbarrier_arrive(shared.barrier(raw_full));
            }
        }
    }
};

// The producer's companion: follows the planner's lists, as that does, loads tiles of the bias, or stores what tensor cores add to keys.
struct Companion {
    const Params& p;
    const ptx::TensorMap& bias_map;
    const Shared shared;
    const u32 lane;
    Slot<cfg::stages> k;
    Slot<1> list;
    const cfg::bias_elem* row;  // the bias of a head's keys
    i32 last_whole;             // the first key of the last tile of which all biases are there and lie one after the other
    static constexpr int own = (cfg::block_n + 31) / 32;  // keys of a lane

    // The lane once more, where there is no register to keep it in.
    __device__ __forceinline__ u32 same_lane() const { return static_cast<u32>(ptx::opaque(static_cast<i32>(threadIdx.x))) % 32; }

    // Stores what is added to the lane's i-th key.  Nobody asks for what lay there any more, two rounds later: consumers have done with the first
    // round's scores, and so with the values before them.
    __device__ __forceinline__ void store(int i, const BiasParts& parts) const {
        const u32 key = 32 * i + same_lane();
        if (key < cfg::block_n) ptx::store_shared_v2(shared.parts(k) + part_bytes * key, parts.pair, parts.third);
    }
    // The tile's parts are there, if it has some.
    __device__ __forceinline__ void pass_on(i32 told) {
        ptx::async_proxy_fence();
        if constexpr (cfg::split_bias) shared.hidden_keys(k.place()).told = told;
        ptx::mbarrier_arrive(shared.barrier(k_full + k.stage));
        k.advance();
    }

    // What stays 0 beside the parts.
    __device__ __forceinline__ void clear_parts() const {
        for (u32 row = lane; row < 2 * cfg::stages * cfg::block_n; row += 32) ptx::store_shared_v4(shared.key_bias(0) + part_bytes * row, 0, 0, 0, 0);
        __syncwarp();
    }

    // At most two are under way: what a block begins with, its queries above all, is not to wait for tiles that are wanted later.
    __device__ __forceinline__ void load(i32 first_key, const BiasPlace& of) {
        const u32 full = shared.barrier(k_full + k.stage);
        const Slot<cfg::stages> two_before = k.before().before();
        ptx::mbarrier_wait(shared.barrier(k_full + two_before.stage), two_before.phase);
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        if (lane == 0) {
            ptx::mbarrier_arrive_expect(full, bias_bytes);
            load_bias_tile(p, bias_map, shared.bias(k.stage), full, of, first_key);
        }
        k.advance();
    }

    // What is added to a key.
    __device__ __forceinline__ float addend(i32 first_key, i32 key, const BiasPlace& of) const {
        if constexpr (cfg::split_score) return SplitScore(p, of.batch, of.query_head, first_key).of_key(key);
        return bias_of_product(p, to_acc(row[min(key, p.n_keys - 1) * p.bias.col]));
    }

    // The same where it may be anything, -inf too.
    __device__ __forceinline__ void store_any(int i, float x, u32& some) const {
        store(i, BiasParts(x));
        if constexpr (!cfg::split_bias) return;
        const u32 hidden = __ballot_sync(~0u, x == minus_infinity() && 32 * i + lane < cfg::block_n);
        shared.hidden_keys(k.place()).keys[i] = hidden;  // all lanes the same
        some |= hidden;
    }

    // Consumers on this scheduler wait for each of these instructions, so what is whole, contiguous and finite goes a short way.
    __device__ __forceinline__ void split(i32 first_key, const BiasPlace& of, float inverse) {
        if ((cfg::split_score || first_key <= last_whole) && split_finite(first_key, of, inverse)) return;
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        u32 some = 0;
#pragma unroll 1  // registers are few
        for (int i = 0; i < own; ++i) store_any(i, addend(first_key, first_key + static_cast<i32>(same_lane()) + 32 * i, of), some);
        pass_on(HiddenKeys::adds_bit | (some != 0 ? KeyTile::hides_bit : 0));
    }

    // The short way; false if something is not finite.
    __device__ __forceinline__ bool split_finite(i32 first_key, const BiasPlace& of, float inverse) {
        float x[own];
        const i32 key = first_key + static_cast<i32>(lane);
        const auto* from = row + key;
        unroll<own>([&](int i) { x[i] = cfg::split_score ? addend(first_key, key + 32 * i, of) : to_acc(from[32 * i]); });
        u32 bits = cfg::split_score;
        bool finite = true;
        unroll<own>([&](int i) {
            if constexpr (!cfg::split_score) bits |= __float_as_uint(x[i]), x[i] = product_of(x[i], inverse);
            finite &= fabsf(x[i]) < outsized;
        });
        if (!__all_sync(~0u, finite)) return false;
        const bool adds = __any_sync(~0u, bits << 1);
        ptx::mbarrier_wait(shared.barrier(k_empty + k.stage), k.phase ^ 1);
        if (adds) unroll<own>([&](int i) { store(i, BiasParts::of_finite(x[i])); });
        pass_on(adds ? HiddenKeys::adds_bit : 0);
        return true;
    }

    __device__ __forceinline__ void run() {
        const float inverse = product_unit(p);
        last_whole = p.bias.col == 1 ? p.n_keys - 32 * own : -1;
        if constexpr (splits) clear_parts();
        for (;;) {
            ptx::mbarrier_wait(shared.barrier(list_full), list.phase);
            list.advance();
            const KeyTile mine = shared.list().tiles[same_lane()];
            const i32 count = shared.list().count;
            const BiasPlace of = shared.bias_of_list();
            if (count < 0) return;
            ptx::mbarrier_arrive(shared.barrier(list_empty));
            if constexpr (cfg::split_bias) row = static_cast<const cfg::bias_elem*>(p.bias.data) + slice_of(p.bias, of.batch, of.query_head);
            for (i32 i = 0; i < count; ++i) {
                const i32 first_key = KeyTile{__shfl_sync(~0u, mine.code, i)}.n() * cfg::block_n;
                if constexpr (splits) split(first_key, of, inverse);
                else load(first_key, of);
            }
        }
    }
};

// The cleaner warp: rows of v that belong to keys no query sees become zero, since 0 * NaN would reach the output.
__device__ __forceinline__ void clean(const Params& p, const Shared& shared) {
    const u32 lane = threadIdx.x % 32;
    for (u32 phase = 0;; phase ^= 1) {
        ptx::mbarrier_wait(shared.barrier(raw_full), phase);
        const Mail mail = shared.mail();
        if (mail.place < 0) return;
        const u32 stage = cfg::split_bias ? mail.place % cfg::stages : mail.place;
        constexpr bool asks_bias = cfg::bias_keys && !cfg::split_bias;
        i64 bias = 0;
        if constexpr (asks_bias) bias = slice_of(p.bias, shared.bias_of_mail().batch, shared.bias_of_mail().query_head);
#pragma unroll 1  // registers are few
        for (u32 word = 0; word < key_words; ++word) {
            const i32 row = 32 * word + lane, key = mail.n * cfg::block_n + row;
            const bool there = row < cfg::block_n && key < p.n_keys;
            u32 unseen = __ballot_sync(~0u, there && !(band_sees(p, key) && key_alive(p, mail.instance, key) && (!asks_bias || bias_shows(p, bias, key))));
            if (cfg::split_bias && shared.hiding(mail.place)) unseen |= shared.hidden_keys(mail.place).keys[word];
            clear_rows<cfg::block_n, slabs_v * (1 + cfg::tv)>(shared.memory + v_at + stage * v_bytes, 32 * word, unseen, lane);
        }
        ptx::async_proxy_fence();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(shared.barrier(v_full + stage));
        ptx::mbarrier_arrive(shared.barrier(raw_empty));
    }
}

}  // namespace sm90::fwd
