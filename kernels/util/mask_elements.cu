// The elements of a mask function, asked for where the bounds of tiles (p.rough) leave them open: which of 64 rows see a key, a bit each (p.bits,
// unless null); the states of tiles; which keys some row sees.  States and keys are zeros before.  A kernel that reads the bits need not know
// the function.
#include "attn/mask_function.cuh"
#include "util/mask_bits.cuh"

constexpr int kHeld = 32;  // rows at a time
constexpr bool holds_rows = sizeof(FunctionRow) * kWarps * kHeld <= 32768;

// Rows that a warp asks about, each made by one lane; where too much is known of them, made anew by all.
struct HeldRows {
    const MaskParams& p;
    const FunctionHead& head;
    FunctionRow* rows;
    i32 first;

    __device__ __forceinline__ void move_to(i32 row) {
        first = row;
        if constexpr (holds_rows) {
            __syncwarp();  // those before are no longer read
            rows[threadIdx.x % 32] = FunctionRow::of(p, head, row + threadIdx.x % 32);
            __syncwarp();  // all are there
        }
    }
    __device__ __forceinline__ FunctionRow operator[](i32 i) const {
        if constexpr (holds_rows) return rows[i];
        else return FunctionRow::of(p, head, first + i);
    }
};

__device__ __forceinline__ void ask(u64 (&bits)[kOwn], const MaskParams& p, const Place& at) {
    __shared__ FunctionRow held[kWarps][holds_rows ? kHeld : 1];
    const FunctionHead head = FunctionHead::of(p, static_cast<i32>(source_offset(p, p.function, at.instance)));
    HeldRows rows{p, head, held[threadIdx.x / 32], 0};
    FunctionKey keys[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) keys[i] = FunctionKey::of(p, head, at.key + i);
#pragma unroll 1
    for (int part = 0; part < kRows; part += kHeld) {
        u32 seen[kOwn] = {};
        rows.move_to(at.row + part);
#pragma unroll 4
        for (int i = 0; i < kHeld; ++i) {
            const FunctionRow row = rows[i];
#pragma unroll
            for (int key = 0; key < kOwn; ++key) seen[key] = __funnelshift_r(seen[key], function_shows(p, head, row, keys[key]), 1);
        }
#pragma unroll
        for (int key = 0; key < kOwn; ++key) bits[key] |= static_cast<u64>(seen[key]) << part;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) bits[i] &= i < at.count ? row_range(0, at.rows) : 0;
}

// Finds the rows that see all of a lane's keys by the bounds of the tiles; true where these leave something open.
__device__ __forceinline__ bool find_bounded(u64& rows, const MaskParams& p, const Place& at) {
    if (at.count == 0) return false;
    bool open = false;
    const i32 n = at.key / cfg::block_n;
    for (i32 m = at.row / cfg::block_m; m * cfg::block_m < at.row + at.rows; ++m) {
        const u32 state = __ldg(p.rough + at.instance * p.states_instance + state_word(m, n, p.key_tiles)) >> state_shift(m, n);
        open |= state & kSomeSeen && state & kSomeHidden;
        if (state & kSomeSeen) rows |= tile_rows(at, m);
    }
    return open;
}

extern "C" __global__ __launch_bounds__(kThreads) void mask_elements(const __grid_constant__ MaskParams p) {
    const Place at(p);
    if (at.instance >= p.instances) return;
    u64 bits[kOwn] = {}, rows = 0;
    if (__any_sync(~0u, find_bounded(rows, p, at))) {
        ask(bits, p, at);
    } else {
#pragma unroll
        for (int i = 0; i < kOwn; ++i) bits[i] = i < at.count ? rows : 0;
    }
    add_states(p, at, bits);
    store_bits(p, at, bits);
    mark_alive(p, at, bits);
}
