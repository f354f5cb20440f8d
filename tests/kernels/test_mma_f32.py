"""float32 on halves: the split, and the backward's scores against the forward's, one warp each."""

import numpy as np
import pytest

from tests.kernels.probe import lanes, run

pytestmark = pytest.mark.gpu

CONSTANTS = {"elem": "float", "acc": "float", "tf32": False}


def wide(rng, shape):
    """Values over many powers of two, with rows far apart, one of zeros and one of NaN."""
    x = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    x[3] *= 1e6
    x[5] *= 1e-6
    x[6] = 0
    x[7, 1] = np.nan
    return x.astype(np.float32)


@pytest.mark.parametrize("columns", [16, 64, 128, 256])
def test_halves_add_up(columns):
    rows, segments = 16, -(-columns // 128)
    x = wide(np.random.default_rng(0), (rows, columns))
    body = f"""
        constexpr int rows = {rows}, columns = {columns}, segments = {segments};
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(memory));
        load_tile<float, rows, columns, 32, 16>(at, x, columns, columns, [](int) {{ return true; }});
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        constexpr int steps = split::steps<rows, columns, 32>;
        for (int step = 0; step < steps; ++step) split::split_step<rows, columns, 32, 3>(at, l, step);
        __syncwarp();
        for (int i = l; i < rows * columns; i += 32) {{
            const int row = i / columns, column = i % columns;
            for (int part = 0; part < 2; ++part) {{
                const u32 chunk = at + swizzle<columns * 4>(row, column / 8 * 2 + part);
                halves[2 * i + part] = *reinterpret_cast<const unsigned short*>(memory + (chunk - at) + column % 8 * 2);
            }}
        }}
        const u32 behind = at + rows * columns * 4;
        for (int i = l; i < rows * segments; i += 32) ptx::load_shared(exponents[i], behind + i * 4);"""
    _, halves, exponents = run(
        ["attn/split_f32.cuh"], "const float* x, unsigned short* halves, float* exponents", body, x,
        np.empty((rows, columns, 2), np.uint16), np.empty((rows, segments), np.float32),
        shared_bytes=rows * (columns + segments) * 4,
    )  # fmt: skip
    hi, lo = np.moveaxis(halves.view(np.float16).astype(np.float64), -1, 0)
    scale = np.repeat(exponents.astype(np.float64) * 2.0 ** (3 - 14), columns // segments, 1)
    back = (hi + lo / 2048) * scale
    np.testing.assert_array_equal(np.isnan(back), np.isnan(x))
    good = ~np.isnan(x)
    largest = np.repeat(np.nanmax(np.abs(x.reshape(rows, segments, -1)), -1), columns // segments, 1)
    assert (np.abs(hi[good]) <= 2**15).all()
    error = np.abs(back - x)[good]
    assert (error <= np.maximum(np.abs(x) * 2.0**-22, largest * 2.0**-49)[good]).all()


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_backward_has_the_scores_of_the_forward_bit_for_bit(head_dim):
    rng = np.random.default_rng(head_dim)
    q, k = wide(rng, (16, head_dim)), wide(rng, (32, head_dim))
    stride = head_dim * 4 + 16
    tiles = 48 * (head_dim + -(-head_dim // 128)) * 4
    body = f"""
        using P = Mma<float>;
        constexpr int d = {head_dim}, stride = {stride};
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(memory)), keys = at + P::tile_bytes<16, d>;
        const auto all = [](int) {{ return true; }};
        load_tile<float, 16, d, 32, 16>(at, q, d, d, all);
        load_tile<float, 32, d, 32, 16>(keys, k, d, d, all);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        P::prepare_q<16, d, 32>(at, l);
        for (int i = 0; i < split::steps<32, d, 32>; ++i) split::split_step<32, d, 32, P::key_shift>(keys, l, i);
        __syncwarp();
        P::QRows<1, d> rows(at, 16, 0, l);
        float s[1][4][4] = {{}}, t[1][4][4] = {{}};
        P::scores(s, rows, keys, l);
        __syncwarp();
        const u32 keys_behind = at + 16 * stride;
        for (int i = l; i < 16 * d; i += 32) ptx::store_shared(at + i / d * stride + i % d * 4, q[i]);
        for (int i = l; i < 32 * d; i += 32) ptx::store_shared(keys_behind + i / d * stride + i % d * 4, k[i]);
        __syncwarp();
        sm80::product_of_rows<3, d, stride, stride>(t, at, keys_behind);
        for (int i = 0; i < 16; ++i) forward[16 * l + i] = s[0][i / 4][i % 4];
        for (int i = 0; i < 16; ++i) backward[16 * l + i] = t[0][i / 4][i % 4];"""
    _, _, forward, backward = run(
        ["attn/mma_f32.cuh", "sm80/bwd_split.cuh"], "const float* q, const float* k, float* forward, float* backward",
        body, q, k, np.empty((32, 4, 4), np.float32), np.empty((32, 4, 4), np.float32),
        constants=CONSTANTS, shared_bytes=max(tiles, 48 * stride),
    )  # fmt: skip
    np.testing.assert_array_equal(forward, backward)
    g, c = lanes()
    exact, size = q.astype(float) @ k.astype(float).T, np.abs(q).astype(float) @ np.abs(k).astype(float).T
    for n in range(4):
        for r in range(4):
            at = g + 8 * (r // 2), 8 * n + 2 * c + r % 2
            good = ~np.isnan(exact[at])
            np.testing.assert_array_equal(np.isnan(forward[:, n, r]), ~good)
            assert (np.abs(forward[:, n, r] - exact[at])[good] <= size[at][good] * 2.0**-20).all()
