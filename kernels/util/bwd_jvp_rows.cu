// What the gradients' tangents need of every row: m, 1 / l (0 of an empty row), D = do.o - dlse, D. = do.o. + do..o, and lse.; and, rounded, o.
// as the gradient by do (cfg::ddo).  Elements that are added up in memory begin with 0.
//
// Grid   heads * batch * row groups of 4 warps; a warp takes a row at a time.
#include "attn/tangents.cuh"

using Source = cfg::source;

extern "C" __global__ __launch_bounds__(128) void backward_jvp_rows(const __grid_constant__ TangentParams p) {
    const i64 rows = i64(p.batch) * p.heads * p.n_queries, step = i64(gridDim.x) * 4;
    const i32 lane = threadIdx.x % 32;
    for (int k = 0; k < kWeights; ++k) {
        for (i64 i = i64(blockIdx.x) * 128 + threadIdx.x; i < p.sizes[k]; i += i64(gridDim.x) * 128) {
            if (p.elements[k] != nullptr) static_cast<double*>(p.elements[k])[i] = 0;
            if (p.telements[k] != nullptr) static_cast<double*>(p.telements[k])[i] = 0;
        }
    }
    for (i64 at = i64(blockIdx.x) * 4 + threadIdx.x / 32; at < rows; at += step) {
        const i32 flat = at / p.n_queries, row = at % p.n_queries, head = flat % p.heads;
        const BatchIndex index = batch_index(p, flat / p.heads);
        const auto place = [&](const Operand& x) { return slice_offset(x, index, head) + row * x.row; };
        const Source* dout = static_cast<const Source*>(p.dout.data) + place(p.dout);
        const Source* tdo = cfg::tdo ? static_cast<const Source*>(p.tdo.data) + place(p.tdo) : nullptr;
        const cfg::o_elem* o = static_cast<const cfg::o_elem*>(p.o.data) + place(p.o);
        const cfg::to_elem* to = static_cast<const cfg::to_elem*>(p.to.data) + place(p.to);
        cfg::acc delta = 0, moved = 0;
        for (i32 column = lane; column < p.head_dim_v; column += 32) {
            const cfg::acc x = to_acc(dout[column]), y = to_acc(o[column]), z = to_acc(to[column]);
            delta += x * y, moved += x * z;
            if constexpr (cfg::tdo) moved += cfg::acc(to_acc(tdo[column])) * y;
            if constexpr (cfg::ddo) static_cast<cfg::grad*>(p.ddo.data)[at * p.head_dim_v + column] = round_to<cfg::grad>(z);
        }
        for (int distance = 16; distance > 0; distance /= 2) {
            delta += __shfl_xor_sync(~0u, delta, distance);
            moved += __shfl_xor_sync(~0u, moved, distance);
        }
        if (lane) continue;
        const auto number = [&](const Operand& x) { return cfg::acc(static_cast<const cfg::stat*>(x.data)[place(x)]); };
        const cfg::acc l = number(p.l);
        if constexpr (cfg::dlse) delta -= number(p.dlse);
        const bool empty = l == 0;
        const cfg::acc found[kRowNumbers] = {number(p.m), 1 / l, delta, moved, number(p.tlse)};
        for (int i = 0; i < kRowNumbers; ++i) static_cast<cfg::acc*>(p.rows)[i * rows + at] = empty ? cfg::acc(0) : found[i];
    }
}
