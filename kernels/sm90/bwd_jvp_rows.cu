// What the gradients' tangents need of every row: m, -log2 l (-inf: the row sees nothing, and all else is 0), and, over the scale of dropout,
// D = do.o - dlse and D. = do.o. + do..o; lse.; and, rounded, o. as the gradient by do (cfg::ddo).
//
// With cfg::one_pass the sums of dQ. begin with 0, with cfg::first_parts > 1 so do `splits` counters.
//
// p.rows: [head][cfg::unit rows][number][row], padded to whole tiles of 128 rows with rows that see nothing.
// Grid   anything; kLanes neighbours of a warp take a row, 8 columns each, and a warp kRows at a time.
#include "attn/tangents.cuh"

constexpr int kWarps = 4, kLanes = cfg::head_dim_v / 8, kTogether = 2, kRows = 32 / kLanes * kTogether;

// Eight columns, which a few loads bring where addresses allow it.
template <class T>
struct alignas(cfg::whole_loads ? 16 : sizeof(T)) Piece {
    T x[8];
};

template <class T>
struct alignas(2 * sizeof(T)) Pair {
    T x[2];
};

template <class T>
__device__ __forceinline__ void load_piece(Piece<T>& piece, const Operand& x, i64 at) {
    piece = *reinterpret_cast<const Piece<T>*>(static_cast<const T*>(x.data) + at);
}

extern "C" __global__ __launch_bounds__(32 * kWarps) void backward_jvp_rows(const __grid_constant__ TangentParams p) {
    const i32 padded = (p.n_queries + 127) / 128 * 128, lane = threadIdx.x % 32, column = lane % kLanes * 8;
    const i64 rows = i64(p.batch) * p.heads * padded, step = i64(gridDim.x) * kWarps * kRows;
    if constexpr (cfg::first_parts > 1)
        for (i32 i = threadIdx.x; blockIdx.x == 0 && i < p.splits; i += 32 * kWarps) p.counters[i] = 0;
    for (i64 first = (i64(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows; first < rows; first += step) {
        const i32 flat = first / padded, row0 = first % padded + lane / kLanes, head = flat % p.heads;
        const BatchIndex index = batch_index(p, flat / p.heads);
        const auto row_of = [&](int r) { return row0 + r * (32 / kLanes); };
        const auto place = [&](const Operand& x, i32 row) { return slice_offset(x, index, head) + row * x.row; };
        const auto load = [&](auto& piece, const Operand& x, i32 row) { load_piece(piece, x, place(x, row) + column); };
        Piece<cfg::elem> dout[kTogether], tdo[kTogether];
        Piece<cfg::o_elem> o[kTogether];
        Piece<cfg::to_elem> to[kTogether];
        float delta[kTogether] = {}, moved[kTogether] = {};
        unroll<kTogether>([&](int r) {
            if (row_of(r) >= p.n_queries || column >= p.head_dim_v) return;
            load(dout[r], p.dout, row_of(r)), load(o[r], p.o, row_of(r)), load(to[r], p.to, row_of(r));
            if constexpr (cfg::tdo) load(tdo[r], p.tdo, row_of(r));
        });
        if constexpr (cfg::one_pass) {
            float4* sums = static_cast<float4*>(p.dq_acc) + first * (cfg::head_dim / 4);
            unroll<kRows * cfg::head_dim / 128>([&](int i) { sums[lane + 32 * i] = {}; });
        }
        unroll<kTogether>([&](int r) {
            if (row_of(r) >= p.n_queries || column >= p.head_dim_v) return;
            unroll<8>([&](int c) {
                const float x = to_acc(dout[r].x[c]), y = to_acc(o[r].x[c]);
                delta[r] = fmaf(x, y, delta[r]), moved[r] = fmaf(x, to_acc(to[r].x[c]), moved[r]);
                if constexpr (cfg::tdo) moved[r] = fmaf(to_acc(tdo[r].x[c]), y, moved[r]);
            });
            if constexpr (!cfg::ddo) return;
            cfg::grad* ddo = static_cast<cfg::grad*>(p.ddo.data) + (i64(flat) * p.n_queries + row_of(r)) * p.head_dim_v + column;
            unroll<4>([&](int pair) {
                Pair<cfg::grad> two;
                unroll<2>([&](int e) { two.x[e] = round_to<cfg::grad>(to_acc(to[r].x[2 * pair + e])); });
                reinterpret_cast<Pair<cfg::grad>*>(ddo)[pair] = two;
            });
        });
        unroll<kTogether>([&](int r) {
            for (int distance = kLanes / 2; distance > 0; distance /= 2) {
                delta[r] += __shfl_xor_sync(~0u, delta[r], distance);
                moved[r] += __shfl_xor_sync(~0u, moved[r], distance);
            }
        });
        unroll<kTogether>([&](int r) {
            const i32 row = row_of(r);
            if (column != 0) return;
            const auto number = [&](const Operand& x) { return static_cast<const float*>(x.data)[place(x, row)]; };
            const float l = row < p.n_queries ? number(p.l) : 0.0f, inverse = 1 / static_cast<float>(p.dropout_scale);
            const bool empty = l == 0.0f;
            if constexpr (cfg::dlse) delta[r] -= empty ? 0.0f : number(p.dlse);
            float* to = static_cast<float*>(p.rows) + (flat * i64(padded) + row / cfg::unit * cfg::unit) * 5 + row % cfg::unit;
            to[0] = empty ? 0.0f : number(p.m);
            to[cfg::unit] = -log2f(l);
            to[2 * cfg::unit] = empty ? 0.0f : delta[r] * inverse;
            to[3 * cfg::unit] = empty ? 0.0f : moved[r] * inverse;
            to[4 * cfg::unit] = empty ? 0.0f : number(p.tlse);
            if (empty) to[cfg::unit] = -infinity<float>();
        });
    }
}
