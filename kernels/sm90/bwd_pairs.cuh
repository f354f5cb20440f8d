// dS of one pair of tiles after another, in float32, for kernels that sum what follows from it: 128 rows by 128 keys.  It is the gradient by the
// finished scores, behind softcap and function.
//
// A block has a place, which says which pairs are its own.  A producer warp walks those that masks show and feeds two consumer warpgroups of 64
// rows each by one ring, whose stages hold 64 columns of two operands: of q and k, then of do and v.  So heads may be as wide as they like, and no
// tile waits for a buffer of its own.  NaN in rows and keys that nobody sees reaches products of those alone, which count as 0.
#pragma once
#include "attn/row_walk.cuh"
#include "ptx/barrier.cuh"
#include "ptx/registers.cuh"
#include "sm90/bwd_row_scores.cuh"

namespace sm90::pairs {

// Consumers: 64 rows each by all keys or, four of them, by half.  More hide each other's waits; what takes registers leaves two.
constexpr int warpgroups = cfg::pair_warpgroups, key_parts = warpgroups / (cfg::block_m / 64), own_keys = cfg::block_n / key_parts;
constexpr int threads = 128 * (warpgroups + 1);
constexpr int producer_registers = block_mask ? 56 : cfg::mask != kMaskNone ? 40 : 24, consumer_registers = ((warpgroups == 2 ? 504 : 480) - producer_registers) / (8 * warpgroups) * 8;
static_assert(warpgroups == 2 || warpgroups == 4);

constexpr bool may_hide_rows = may_have_empty_rows || cfg::bias || cfg::score, may_hide_keys = may_have_dead_keys || cfg::bias_keys;
// Are S and dP computed together?  They may not fit into the ring; and random numbers and functions need registers meanwhile.
constexpr bool late = cfg::dropout || cfg::dp_late || warpgroups == 4, together = slabs + slabs_v <= cfg::stages && !late && !cfg::score;

// Offsets in bytes; every tile starts on a multiple of 1024.
constexpr int a_bytes = cfg::block_m * row_bytes, stage_bytes = a_bytes + cfg::block_n * row_bytes;
constexpr int delta_bytes = cfg::split_delta ? cfg::block_m * kDeltaParts * 2 : cfg::block_m * 4;
constexpr int stat_bytes = cfg::block_m * 4, numbers_bytes = delta_bytes > stat_bytes ? delta_bytes : stat_bytes;
constexpr int numbers_at = cfg::stages * stage_bytes;

// A pair as the producer announces it, with the first stage of its q and k.
struct alignas(16) Step {
    i32 m, number;  // of the row tile and of the key tile; m is negative: the place has no more, and this is its number
    i32 head, batch;
    i32 flags;
    static constexpr i32 partial_bit = 1, far_bit = 2;
    __device__ __forceinline__ i32 n() const { return number; }
    __device__ __forceinline__ bool partial() const { return flags & partial_bit; }  // elements must be tested
    __device__ __forceinline__ bool far() const { return flags & far_bit; }          // some row is (attn/bwd_workspace.cuh); partial, too
};

constexpr int steps_at = numbers_at + cfg::stages * numbers_bytes;
constexpr int barriers_at = steps_at + cfg::stages * int(sizeof(Step));
constexpr int walk_at = (barriers_at + 2 * 8 * cfg::stages + 15) / 16 * 16;
constexpr int own_at = (walk_at + int(sizeof(WalkTables)) + 15) / 16 * 16;  // of the kernel that includes this

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 full(u32 stage) const { return address + barriers_at + 8 * stage; }
    __device__ __forceinline__ u32 empty(u32 stage) const { return address + barriers_at + 8 * (cfg::stages + stage); }
    __device__ __forceinline__ u32 a(u32 stage) const { return address + stage * stage_bytes; }
    __device__ __forceinline__ u32 b(u32 stage) const { return a(stage) + a_bytes; }
    __device__ __forceinline__ Step& step(u32 stage) const { return at<Step>(steps_at, stage); }
    __device__ __forceinline__ WalkTables& walk() const { return at<WalkTables>(walk_at); }
};

struct Maps {
    const ptx::TensorMap &q, &k, &v, &dout;
};

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    for (u32 stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.full(stage), 1);
        ptx::mbarrier_init(shared.empty(stage), 128 * warpgroups);
    }
    ptx::mbarrier_init_fence();
}

struct Producer {
    const Params& p;
    const Maps& maps;
    const Shared shared;
    const bool leader;  // lane 0
    Slot<cfg::stages> slot;

    // Slab after slab of two operands' tiles, the first with `bytes` of the rows' numbers.
    template <int slab_count>
    __device__ __forceinline__ void load_product(const ptx::TensorMap& a, const Place& of_a, i32 row, const ptx::TensorMap& b, const Place& of_b, i32 key,
                                                 const void* numbers, u32 bytes, const Step& step) {
        unroll<slab_count>([&](int slab) {
            ptx::mbarrier_wait(shared.empty(slot.stage), slot.phase ^ 1);
            if (ptx::elected()) {
                const u32 full = shared.full(slot.stage);
                if (slab == 0) shared.step(slot.stage) = step;  // told by the arrival that follows
                ptx::mbarrier_arrive_expect(full, stage_bytes + (slab == 0 ? bytes : 0));
                if (slab == 0) ptx::bulk_load(shared.address + numbers_at + slot.stage * numbers_bytes, numbers, bytes, full);
                ptx::tensor_load(shared.a(slot.stage), a, full, ptx::evict_normal, 64 * slab, row, of_a.head, of_a.batch);
                ptx::tensor_load(shared.b(slot.stage), b, full, ptx::evict_normal, 64 * slab, key, of_b.head, of_b.batch);
            }
            slot.advance();
        });
    }

    __device__ __forceinline__ void load(const Step& step, i64 flat) {
        const i32 row = step.m * cfg::block_m, key = step.number * cfg::block_n, kv_head = step.head / p.group;
        const i64 at = stat_row(p, flat, row);
        const u8* delta = static_cast<const u8*>(p.delta) + at / cfg::block_m * delta_bytes;
        load_product<slabs>(maps.q, {p.q, step.head, step.batch}, row, maps.k, {p.k, kv_head, step.batch}, key, static_cast<const float*>(p.stat) + at,
                            stat_bytes, step);
        load_product<slabs_v>(maps.dout, {p.dout, step.head, step.batch}, row, maps.v, {p.v, kv_head, step.batch}, key, delta, delta_bytes, step);
    }

    // The pairs of a head that are the place's own and visible.
    template <class Pairs>
    __device__ __forceinline__ void feed_head(const Pairs& place, i32 flat) {
        const i32 batch = flat / p.heads, head = flat - batch * p.heads;
        const i32* flags = p.counters + static_cast<i64>(flat) * stat_groups(p);
        for (i32 key_tile = place.key_begin; key_tile < place.key_end; ++key_tile) {
            i32 begin, end;
            place.rows(p, key_tile, begin, end);
            if (begin >= end) continue;
            __syncwarp();  // the last walk is done with
            if (leader)
                describe_tables(shared.walk(), p, cfg::mask != kMaskNone ? slice_of(p.table, batch, head) : 0, block_mask ? slice_of(p.mask, batch, head) : 0,
                                key_tile);
            __syncwarp();  // the walk is described
            RowWalk walk(p, shared.walk());
            walk.tile = max(walk.tile, begin - 1);
            while (walk.next(p) && walk.tile < end) {
                const i32 far = flags[walk.tile * cfg::block_m / kStatRows] & kFarRows ? Step::far_bit | Step::partial_bit : 0;
                load({walk.tile, key_tile, head, batch, far | (walk.partial(p) ? Step::partial_bit : 0)}, flat);
            }
        }
    }

    // number: of the place, which comes back at its end.
    template <class Pairs>
    __device__ __forceinline__ void run(const Pairs& place, i32 number) {
        for (i32 head = 0; head < place.heads(); ++head) feed_head(place, place.head(p, head));
        ptx::mbarrier_wait(shared.empty(slot.stage), slot.phase ^ 1);
        if (ptx::elected()) {
            shared.step(slot.stage).m = -1, shared.step(slot.stage).number = number;
            ptx::mbarrier_arrive(shared.full(slot.stage));
        }
        slot.advance();
    }
};

// Self is what sums, and has take(): dS of the thread's elements is in `s`; or, with takes_products, P, and dP in `dp`; or (cfg::inputs), where weights
// depend on scores, for_ds() makes it.
template <class Self>
struct Consumer : RowScores<Self, own_keys> {
    using Base = RowScores<Self, own_keys>;
    using Base::dp, Base::p, Base::s;
    static constexpr bool takes_slopes = false;
    const Shared shared;
    const u32 warpgroup;
    Step step;
    Slot<cfg::stages> slot, done;  // of the next stage to be multiplied, and to be given back

    using Base::self;
    __device__ __forceinline__ const Step& work() const { return step; }
    __device__ __forceinline__ i32 row_part() const { return warpgroup / key_parts; }
    __device__ __forceinline__ i32 key_part() const { return warpgroup % key_parts; }
    __device__ __forceinline__ i32 own_row() const { return step.m * cfg::block_m + 64 * row_part() + fragment_row(); }

    __device__ __forceinline__ float2 own_numbers(u32 stage) const {
        const float* own = &shared.template at<const float>(numbers_at + stage * numbers_bytes) + 64 * row_part() + fragment_row();
        return make_float2(own[0], own[8]);
    }

    __device__ __forceinline__ float whole_delta(u32 stage, u32 row) const {
        const u16* parts = &shared.template at<const u16>(numbers_at + stage * numbers_bytes);
        float sum = 0.0f;
        unroll<kDeltaParts>([&](int part) { sum += __uint_as_float(static_cast<u32>(parts[delta_part(row, part)]) << 16); });
        return sum;
    }

    __device__ __forceinline__ float2 own_deltas(u32 stage) const {
        if constexpr (!cfg::split_delta) return own_numbers(stage);
        const u32 row = 64 * row_part() + fragment_row();
        return make_float2(whole_delta(stage, row), whole_delta(stage, row + 8));
    }

    __device__ __forceinline__ void await() const { ptx::mbarrier_wait(shared.full(slot.stage), slot.phase); }

    // A B^T of so many columns, of which the first slab has arrived.
    template <int columns, int sign_a>
    __device__ __forceinline__ void issue(typename Base::Scores& x) {
        ptx::wgmma_fence();
        unroll<(columns + 63) / 64>([&](int slab) {
            if (slab) await();
            const u32 rows = shared.a(slot.stage) + 64 * row_part() * row_bytes, keys = shared.b(slot.stage) + key_part() * own_keys * row_bytes;
            if (columns - 64 * slab >= 64) multiply_rows<64, cfg::block_m, cfg::block_n, sign_a>(x, rows, keys, slab > 0);
            else multiply_rows<columns % 64, cfg::block_m, cfg::block_n, sign_a>(x, rows, keys, slab > 0);
            slot.advance();
        });
        ptx::wgmma_commit();
    }

    // Gives stages back whose products are there.
    template <int count>
    __device__ __forceinline__ void give_back() {
        unroll<count>([&](int) {
            release_read(shared.empty(done.stage));
            done.advance();
        });
    }

    // As Base has it, with a bit for each of the thread's keys in a row: sums leave few registers for more keys at a time.
    __device__ __forceinline__ void mask_scores(const Step& step) {
        const MaskSlices slices = this->mask_slices();
        const i32 row = own_row(), rows[2] = {min(row, p.n_queries - 1), min(row + 8, p.n_queries - 1)};
        u32 shown[2] = {};
#pragma unroll 4
        for (int number = 0; number < own_keys / 4; ++number) {
            const i32 key = step.n() * own_keys + 2 * (threadIdx.x % 4) + 4 * number - 3 * (number % 2);
            const KeyMaskOf<true> mask(p, slices, key);
            unroll<2>([&](int r) { shown[r] |= static_cast<u32>(mask.visible(p, rows[r], key)) << number; });
        }
        unroll<own_keys / 2>([&](int i) {
            if (!(shown[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) s[i] = minus_infinity();
        });
    }

    // Products with a key that a bias hides, which may hold NaN.
    __device__ __forceinline__ void clear_hidden() {
        const i64 offset = slice_of(p.bias, step.batch, step.head);
        for_keys([&](int i, i32 key) {
            const bool hides = self().bias_of(i, offset, 0, key) == minus_infinity();
            unroll<2>([&](int r) { s[i + 2 * r] = hides ? 0.0f : s[i + 2 * r]; });
        });
    }

    // Calls work(i, key) for each of the thread's keys and its element in the first row.
    template <class Work>
    __device__ __forceinline__ void for_keys(const Work& work) const {
        const i32 first = step.n() * own_keys + 2 * (threadIdx.x % 4);
        unroll<own_keys / 8, 2>([&](int eight, int odd) { work(4 * eight + odd, first + Base::key_of(4 * eight + odd)); });
    }

    // Calls work(i, head, row, key) for each element, in ascending order of keys, as functions are asked.
    template <class Work>
    __device__ __forceinline__ void for_elements(const Work& work) const {
        const TracedHead head = TracedHead::of(p, step.batch, step.head);
        const TracedRow rows[2] = {TracedRow::of(p, head, own_row()), TracedRow::of(p, head, own_row() + 8)};
        for_keys([&](int i, i32 key) {
            const TracedKey traced = TracedKey::of(p, head, key);
            unroll<2>([&](int r) { work(i + 2 * r, head, rows[r], traced); });
        });
    }

    __device__ __forceinline__ void issue_dp() {
        await();
        this->delta = own_deltas(slot.stage);
        issue<cfg::head_dim_v, 1>(dp);
    }

    // Calls work(i, dS, input of the function or 0, head, row, key) for each element, once run() has come to a pair.
    template <class Work>
    __device__ __forceinline__ void for_ds(const Work& work) {
        if constexpr (!cfg::inputs) return for_elements([&](int i, const auto&... place) { work(i, s[i], 0.0f, place...); });
        float tops[2] = {};
        if (uniform(step.partial())) {
            mask_scores(step);
            if (uniform(step.far())) this->find_maxima(tops);
        }
        const i64 offset = cfg::bias ? slice_of(p.bias, step.batch, step.head) : 0;
        for_elements([&](int i, const TracedHead& head, const TracedRow& row, const TracedKey& key) {
            const int r = i / 2 % 2;
            const float shift = r ? this->stat.y : this->stat.x;
            const i32 number = step.n() * own_keys + 2 * (threadIdx.x % 4) + Base::key_of(i);
            const float bias = cfg::bias ? self().bias_of(i, offset, own_row() + 8 * r, number) : 0.0f;
            const float input = cfg::softcap ? cap_product(p, s[i]).score : product_of(s[i], static_cast<float>(p.scale));
            const bool hidden = s[i] == minus_infinity() || shift == minus_infinity();
            const float score = score_with_bias(p, s[i], bias, head, row, key).score;
            const float weight = ptx::ex2(fmaf(hidden ? minus_infinity() : rounded_difference(score, tops[r]), static_cast<float>(kLog2e), hidden ? 0.0f : shift));
            work(i, weight == 0.0f ? 0.0f : weight * (dp[i] - (r ? this->delta.y : this->delta.x)), input, head, row, key);
        });
    }

    // S and dP of the pair that has begun to arrive, where weights depend on scores; for_ds() does the rest.
    __device__ __forceinline__ void find_products() {
        this->stat = own_numbers(slot.stage);
        issue<cfg::head_dim, sign>(s);
        if constexpr (!together) {
            ptx::wgmma_wait<0>();
            give_back<slabs>();
        }
        issue_dp();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(s);
        ptx::wgmma_pin(dp);
        give_back<(together ? slabs : 0) + slabs_v>();
        if constexpr (cfg::bias_keys) clear_hidden();
    }

    // dS of the pair that has begun to arrive.
    __device__ __forceinline__ void find_ds() {
        this->stat = own_numbers(slot.stage);
        issue<cfg::head_dim, sign>(s);
        if constexpr (together) issue_dp();
        ptx::wgmma_wait<together ? 1 : 0>();
        ptx::wgmma_pin(s);
        give_back<slabs>();
        if constexpr (!together && !late) issue_dp();
        if constexpr (cfg::bias_keys) clear_hidden();
        this->weigh(step);
        if constexpr (late) issue_dp();
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dp);
        give_back<slabs_v>();
        if (may_hide_keys && (cfg::bias_keys || uniform(step.partial())))
            unroll<own_keys / 2>([&](int i) { dp[i] = s[i] == 0.0f ? 0.0f : dp[i]; });  // a key that nobody sees may hold NaN
        if constexpr (!Self::takes_products) this->template differentiate<may_hide_rows>();
        else if constexpr (may_hide_rows) clear_empty();
    }

    // P and dP of rows that see nothing, which may be NaN.
    __device__ __forceinline__ void clear_empty() {
        const bool empty[2] = {this->stat.x == minus_infinity(), this->stat.y == minus_infinity()};
        if (!uniform(empty[0] || empty[1])) return;
        unroll<own_keys / 2>([&](int i) { s[i] = empty[i / 2 % 2] ? 0.0f : s[i], dp[i] = empty[i / 2 % 2] ? 0.0f : dp[i]; });
    }

    // All pairs of a place, whose number is returned: sums leave no register to remember it.
    __device__ __forceinline__ i32 run() {
        for (;;) {
            await();
            step = shared.step(slot.stage);
            if (uniform(step.m < 0)) break;
            step.number = step.number * key_parts + key_part();
            if constexpr (cfg::inputs) find_products();
            else find_ds();
            self().take();
        }
        slot.advance();
        give_back<1>();
        return step.number;
    }
};

// What all warps of a block do.  produce(producer) and consume(warpgroup): place after place.
template <class Produce, class Consume>
__device__ __forceinline__ void run_block(const Params& p, const Maps& maps, const Shared& shared, const Produce& produce, const Consume& consume) {
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the same in all lanes; the shuffle tells the compiler so
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();  // the barriers are ready
    if (warp < 4) {
        ptx::registers_release<producer_registers>();
        if (warp == 0) {
            Producer producer{p, maps, shared, threadIdx.x == 0};
            produce(producer);
        }
    } else {
        ptx::registers_claim<consumer_registers>();
        consume(warp / 4 - 1);
    }
}

}  // namespace sm90::pairs
