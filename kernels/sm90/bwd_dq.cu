// Algorithm 4, line 21, for compute capability 9.0 where sm90/bwd.cu kept dS: dQ = dS K, each row tile against its key tiles of the slab, in a fixed order.
//
// A persistent grid; per block a producer warp feeds blocks of dS and key tiles to two consumer warpgroups of 64 query rows each.
#include "ptx/registers.cuh"
#include "sm90/bwd_kept.cuh"
#include "sm90/gradients.cuh"

namespace sm90::dq {

constexpr int warpgroups = cfg::block_m / 64, threads = 128 * (warpgroups + 1);
static_assert(warpgroups == 2 && cfg::block_n == 64);
constexpr int k_bytes = slabs * cfg::block_n * row_bytes, step_bytes = warpgroups * kBlockBytes + k_bytes;
constexpr int slab_bytes = 64 * row_bytes;  // of a warpgroup's dQ, which leaves slab by slab through two buffers
constexpr int staged_at = cfg::stages * step_bytes, barriers_at = staged_at + warpgroups * 2 * slab_bytes;

enum Barrier { rows_full, rows_empty, full, empty = full + cfg::stages, barrier_count = empty + cfg::stages };

// A row tile as the producer announces it.
struct alignas(16) Work {
    i32 tile;         // its number; negative: there is no further work
    i32 head, batch;  // of q
};

constexpr int work_at = (barriers_at + 8 * barrier_count + 15) / 16 * 16;
constexpr int shared_bytes = work_at + int(sizeof(Work));

struct Shared : SharedMemory {
    __device__ __forceinline__ u32 barrier(int number) const { return address + barriers_at + 8 * number; }
    __device__ __forceinline__ u32 ds(u32 stage) const { return address + stage * step_bytes; }
    __device__ __forceinline__ u32 k(u32 stage) const { return ds(stage) + warpgroups * kBlockBytes; }
    __device__ __forceinline__ Work& work() const { return at<Work>(work_at); }
};

// Key tiles of which 64 rows see something; those of another row tile of the pair are not far.
struct Span {
    i32 first, end;

    __device__ __forceinline__ static Span of(const Params& p, i32 rows) {
        Span span{0, p.key_tiles};
        if constexpr (cfg::band_left) {
            const i32 key = max(64 * rows - p.band_left, 0);
            span.first = key < p.n_keys ? key / cfg::block_n : p.key_tiles;
        }
        if constexpr (cfg::band_right) span.end = (max(min(64 * (rows + 1) + p.band_right, p.n_keys), 0) + cfg::block_n - 1) / cfg::block_n;
        if (64 * rows >= p.n_queries) span.end = 0;
        return {span.first, max(span.end, span.first)};
    }

    __device__ __forceinline__ i32 count() const { return end - first; }
    __device__ __forceinline__ bool has(i32 tile) const { return tile >= first && tile < end; }
    // Of them, those of the slab.
    __device__ __forceinline__ Span kept(const Params& p) const {
        const i32 from = max(first, first_kept(p));
        return {from, max(min(end, first_kept(p) + kept_tiles(p)), from)};
    }
    __device__ __forceinline__ Span with(const Span& other) const {
        return !count() ? other : !other.count() ? *this : Span{min(first, other.first), max(end, other.end)};
    }
};

// A pair's key tiles, and those of the slab.
struct PairSpan {
    Span upper, lower, whole, both;

    __device__ __forceinline__ PairSpan(const Params& p, i32 tile) {
        const Span u = Span::of(p, 2 * tile), l = Span::of(p, 2 * tile + 1);
        upper = u.kept(p), lower = l.kept(p), whole = u.with(l), both = whole.kept(p);
    }

    // Rows that see nothing belong to the last slab, for zeros.
    __device__ __forceinline__ bool here(const Params& p) const { return both.count() || (!whole.count() && first_kept(p) == 0); }
    __device__ __forceinline__ bool begins(const Params& p) const { return !whole.count() || whole.end <= first_kept(p) + kept_tiles(p); }
    __device__ __forceinline__ bool ends(const Params& p) const { return !whole.count() || whole.first >= first_kept(p); }
};

struct Producer {
    const Params& p;
    const ptx::TensorMap& k_map;
    const Shared shared;
    const bool leader;  // lane 0
    Slot<cfg::stages> slot;
    u32 rows_phase = 1;

    __device__ __forceinline__ i32 draw() const { return __shfl_sync(~0u, leader ? atomicAdd(p.ticket + 1, 1) : 0, 0); }

    __device__ __forceinline__ void announce(const Work& work) {
        ptx::mbarrier_wait(shared.barrier(rows_empty), rows_phase);
        rows_phase ^= 1;
        if (!leader) return;
        shared.work() = work;
        ptx::mbarrier_arrive(shared.barrier(rows_full));
    }

    // k and, of the two blocks of dS, which lie one behind the other, those that there are.
    __device__ __forceinline__ void load(const Work& work, i32 n, bool upper, bool lower) {
        const u32 barrier = shared.barrier(full + slot.stage);
        ptx::mbarrier_wait(shared.barrier(empty + slot.stage), slot.phase ^ 1);
        if (leader) {
            const i32 bytes = (upper + lower) * kBlockBytes, own = upper ? 0 : 1;
            ptx::mbarrier_arrive_expect(barrier, k_bytes + bytes);
            load_tile<cfg::block_n, slabs>(k_map, shared.k(slot.stage), barrier, ptx::evict_last, n * cfg::block_n,
                                           {p.k, work.head / p.group, work.batch});
            if (bytes)
                ptx::bulk_load(shared.ds(slot.stage) + own * kBlockBytes, kept_block(p, work.batch * p.heads + work.head, n, 2 * work.tile + own),
                               bytes, barrier, ptx::evict_first);
        }
        slot.advance();
    }

    __device__ __forceinline__ void feed(const Work& work) {
        const PairSpan span(p, work.tile);
        if (!span.here(p)) return;
        announce(work);
        for (i32 n = span.both.end - 1; n >= span.both.first; --n) load(work, n, span.upper.has(n), span.lower.has(n));
    }

    __device__ __forceinline__ void run() {
        const i32 first = p.shared_key * p.row_tiles, end = p.shared_tile * p.row_tiles;
        if (leader && blockIdx.x == 0) *p.ticket = 0;  // of the launch that follows
        for (i32 number = first + draw(); number < end; number = first + draw()) {
            const TileRank place = rank_of(p, number, p.heads, p.row_tiles);
            feed({p.row_tiles - 1 - place.rank, place.head, place.batch});  // the last rows see most
        }
        announce({-1, 0, 0});
    }
};

struct Consumer {
    const Params& p;
    const ptx::TensorMap& dq_map;
    const Shared shared;
    const u32 warpgroup;
    Slot<cfg::stages> slot;
    float dq[cfg::head_dim / 2];  // of 64 rows

    // Key tiles that only the other warpgroup's rows see.
    __device__ __forceinline__ void skip(i32 count) {
        for (i32 i = 0; i < count; ++i, slot.advance()) {
            ptx::mbarrier_wait(shared.barrier(full + slot.stage), slot.phase);
            release(shared.barrier(empty + slot.stage));
        }
    }

    // Key by key from the last, as sm90/bwd_rows.cu does.
    __device__ __forceinline__ void multiply() {
        ptx::wgmma_fence();
        unroll<cfg::block_n / 16>([&](int number) {
            const int step = cfg::block_n / 16 - 1 - number;
            const u64 a = ptx::wgmma_descriptor(shared.ds(slot.stage) + kBlockBytes * warpgroup, 16, eight_rows) + (32 * step >> 4);
            const u64 b = ptx::wgmma_descriptor(shared.k(slot.stage), cfg::block_n * row_bytes, eight_rows) + ((step * 2 * eight_rows) >> 4);
            ptx::Product<cfg::head_dim>::template ss<is_bfloat16, 1, 1>(dq, a, b, 1);
        });
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ void accumulate(i32 count) {
        u32 before = 0;
        for (i32 i = 0; i < count; ++i, slot.advance()) {
            ptx::mbarrier_wait(shared.barrier(full + slot.stage), slot.phase);
            multiply();
            ptx::wgmma_wait<1>();
            if (i > 0) release(shared.barrier(empty + before));
            before = slot.stage;
        }
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(dq);
        if (count > 0) release(shared.barrier(empty + before));
    }

    // Where dQ waits for the slabs to come.
    __device__ __forceinline__ float4* unfinished(const Work& work) const {
        const i64 tile = static_cast<i64>(work.batch * p.heads + work.head - p.shared_key) * p.row_tiles + work.tile;
        return static_cast<float4*>(p.dq_acc) + (tile * warpgroups + warpgroup) * (16 * cfg::head_dim) + threadIdx.x % 128;
    }

    __device__ __forceinline__ void begin(const float4* from) {
        unroll<cfg::head_dim / 8>([&](int i) {
            const float4 four = from ? from[128 * i] : make_float4(0, 0, 0, 0);
            dq[4 * i] = four.x, dq[4 * i + 1] = four.y, dq[4 * i + 2] = four.z, dq[4 * i + 3] = four.w;
        });
        ptx::wgmma_pin(dq);  // before any product is under way
    }

    __device__ __forceinline__ void keep(float4* to) const {
        unroll<cfg::head_dim / 8>([&](int i) { to[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]); });
    }

    __device__ __forceinline__ void write(const Work& work) const {
        const float factor = static_cast<float>(p.scale * p.dropout_scale);
        const i32 row = work.tile * cfg::block_m + 64 * warpgroup;
        if constexpr (unrounded) {
            write_gradient(dq, factor, p.dq.data, work.batch * p.heads + work.head, p.n_queries, p.head_dim, row + fragment_row());
            return;
        }
        const u32 barrier = 1 + warpgroup;
        unroll<slabs>([&](int slab) {
            const u32 staged = shared.address + staged_at + (2 * warpgroup + slab % 2) * slab_bytes;
            if (threadIdx.x % 128 == 0) slab == 0 ? ptx::bulk_wait_read<0>() : ptx::bulk_wait_read<1>();
            ptx::barrier_sync(barrier, 128);  // the slab before the last has left
            stage_gradient(reinterpret_cast<const float(&)[32]>(dq[32 * slab]), factor, staged, slab_bytes);
            ptx::barrier_sync(barrier, 128);  // this one is staged
            if (threadIdx.x % 128 != 0) return;
            ptx::tensor_store(dq_map, staged, 64 * slab, row, work.head, work.batch);
            ptx::bulk_commit();
        });
    }

    __device__ __forceinline__ void run() {
        for (u32 phase = 0;; phase ^= 1) {
            ptx::mbarrier_wait(shared.barrier(rows_full), phase);
            const Work work = shared.work();
            release_read(shared.barrier(rows_empty));
            if (uniform(work.tile < 0)) break;
            const PairSpan span(p, work.tile);
            const Span &all = span.both, own = warpgroup ? span.lower : span.upper;
            begin(uniform(span.begins(p)) ? nullptr : unfinished(work));
            skip(own.count() ? all.end - own.end : all.count());
            accumulate(own.count());
            skip(own.count() ? own.first - all.first : 0);
            if (uniform(span.ends(p))) write(work);
            else keep(unfinished(work));
        }
        if (threadIdx.x % 128 == 0) ptx::bulk_wait_read<0>();
    }
};

__device__ __forceinline__ void init_barriers(const Shared& shared) {
    ptx::mbarrier_init(shared.barrier(rows_full), 1);
    ptx::mbarrier_init(shared.barrier(rows_empty), 128 * warpgroups);
    for (int stage = 0; stage < cfg::stages; ++stage) {
        ptx::mbarrier_init(shared.barrier(full + stage), 1);
        ptx::mbarrier_init(shared.barrier(empty + stage), 4 * warpgroups);
    }
    ptx::mbarrier_init_fence();
}

}  // namespace sm90::dq

extern "C" __global__ void __launch_bounds__(sm90::dq::threads, 1)
backward_dq(const __grid_constant__ Params p, const __grid_constant__ ptx::TensorMap q_map,
            const __grid_constant__ ptx::TensorMap k_map, const __grid_constant__ ptx::TensorMap v_map,
            const __grid_constant__ ptx::TensorMap do_map, const __grid_constant__ ptx::TensorMap dq_map) {
    using namespace sm90::dq;
    extern __shared__ __align__(1024) u8 memory[];
    const Shared shared{ptx::shared_address(memory), memory};
    // The same in all lanes; the shuffle tells the compiler so.
    const u32 warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();  // the barriers are ready
    ptx::await_launch_before();

    if (warp < 4) {
        ptx::registers_release<24>();
        if (warp == 0) {
            Producer producer{p, k_map, shared, threadIdx.x == 0};
            producer.run();
        }
    } else {
        ptx::registers_claim<240>();
        Consumer consumer{p, dq_map, shared, warp / 4 - 1};
        consumer.run();
    }
}
