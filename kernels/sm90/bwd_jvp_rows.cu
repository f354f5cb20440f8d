// What the gradients' tangents need of every row: m, -log2 l (-inf: the row sees nothing, and all else is 0), and, over the scale of dropout,
// D = do.o - dlse and D. = do.o. + do..o; lse.; and, rounded, o. as the gradient by do (cfg::ddo).
//
// With cfg::one_pass dQ. begins with 0.
//
// p.rows: [head][cfg::unit rows][number][row], padded to whole tiles of 128 rows with rows that see nothing.
// Grid   anything; a warp takes four rows at a time.
#include "attn/tangents.cuh"

constexpr int kRows = 4, kWarps = 4, kLaneColumns = (cfg::head_dim_v + 31) / 32;

extern "C" __global__ __launch_bounds__(32 * kWarps) void backward_jvp_rows(const __grid_constant__ TangentParams p) {
    const i32 padded = (p.n_queries + 127) / 128 * 128, lane = threadIdx.x % 32;
    const i64 rows = i64(p.batch) * p.heads * padded, step = i64(gridDim.x) * kWarps * kRows;
    for (i64 first = (i64(blockIdx.x) * kWarps + threadIdx.x / 32) * kRows; first < rows; first += step) {
        const i32 flat = first / padded, row0 = first % padded, head = flat % p.heads;
        const BatchIndex index = batch_index(p, flat / p.heads);
        const auto place = [&](const Operand& x, i32 row) { return slice_offset(x, index, head) + row * x.row; };
        float delta[kRows] = {}, moved[kRows] = {};
        unroll<kRows, kLaneColumns>([&](int r, int c) {
            const i32 row = row0 + r, column = lane + 32 * c;
            if (row >= p.n_queries || column >= p.head_dim_v) return;
            const float x = to_acc(static_cast<const cfg::elem*>(p.dout.data)[place(p.dout, row) + column]);
            const float y = to_acc(static_cast<const cfg::o_elem*>(p.o.data)[place(p.o, row) + column]);
            const float z = to_acc(static_cast<const cfg::to_elem*>(p.to.data)[place(p.to, row) + column]);
            delta[r] = fmaf(x, y, delta[r]), moved[r] = fmaf(x, z, moved[r]);
            if constexpr (cfg::tdo) moved[r] = fmaf(to_acc(static_cast<const cfg::elem*>(p.tdo.data)[place(p.tdo, row) + column]), y, moved[r]);
            if constexpr (cfg::ddo) static_cast<cfg::grad*>(p.ddo.data)[(i64(flat) * p.n_queries + row) * p.head_dim_v + column] = round_to<cfg::grad>(z);
        });
        if constexpr (cfg::one_pass) {
            for (i32 i = lane; i < min(p.n_queries - row0, kRows) * p.head_dim; i += 32)
                static_cast<float*>(p.dq_acc)[(i64(flat) * p.n_queries + row0) * p.head_dim + i] = 0;
        }
        unroll<kRows>([&](int r) {
            for (int distance = 16; distance > 0; distance /= 2) {
                delta[r] += __shfl_xor_sync(~0u, delta[r], distance);
                moved[r] += __shfl_xor_sync(~0u, moved[r], distance);
            }
        });
        unroll<kRows>([&](int r) {
            const i32 row = row0 + r;
            if (lane != r) return;
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
