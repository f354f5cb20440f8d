"""float32 on halves: the split, and the backward's scores against the forward's, one warp each."""

import numpy as np
import pytest

from tests.kernels.probe import gather, run

pytestmark = pytest.mark.gpu

CONSTANTS = {"elem": "float", "acc": "float", "grad": "float", "tf32": False, "block_n": 32}


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
        load_tile<float, rows, columns, 32, 16>(at, x, columns, columns, [](int) {{ return true; }}, l);
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
        ["sm80/split_f32.cuh"], "const float* x, unsigned short* halves, float* exponents", body, x,
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


def uneven(rng, shape):
    """Rows of which some are a thousand times others, one of zeros and one of NaN."""
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 2, (shape[0], 1))
    x[6] = 0
    x[7, 1] = np.nan
    return x.astype(np.float32)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_backward_has_the_scores_of_the_forward_bit_for_bit(head_dim):
    rng = np.random.default_rng(head_dim)
    q, k = uneven(rng, (16, head_dim)), uneven(rng, (32, head_dim))
    stride = head_dim * 4 + 16
    tiles = 48 * (head_dim + -(-head_dim // 128)) * 4
    body = f"""
        using P = Mma<float>;
        constexpr int d = {head_dim}, stride = {stride};
        const u32 keys = at + P::tile_bytes<16, d>;
        const auto all = [](int) {{ return true; }};
        load_tile<float, 16, d, 32, 16>(at, q, d, d, all, l);
        load_tile<float, 32, d, 32, 16>(keys, k, d, d, all, l);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        P::prepare_q<16, d, 32>(at, l);
        for (int i = 0; i < split::steps<32, d, 32>; ++i) split::split_step<32, d, 32, P::key_shift>(keys, l, i);
        __syncwarp();
        P::QRows<1, d> rows(at, 16, 0, l);
        float s[1][4][4] = {{}}, t[1][4][4] = {{}};
        P::scores(s, rows, keys, l);
        __syncwarp();
        const u32 keys_behind = at + 16 * stride, units = at + 48 * stride;
        for (int i = l; i < 16 * d; i += 32) ptx::store_shared(at + i / d * stride + i % d * 4, q[i]);
        for (int i = l; i < 32 * d; i += 32) ptx::store_shared(keys_behind + i / d * stride + i % d * 4, k[i]);
        __syncwarp();
        for (int i = 0; i < 3; ++i) split_rows<d>(at + 16 * i * stride, units + 4 * i);
        __syncwarp();
        product<d, Along::columns, stride, Along::columns, stride>(t, {{at, units}}, {{keys_behind, units + 4}});
        for (int i = 0; i < 16; ++i) forward[16 * l + i] = s[0][i / 4][i % 4];
        for (int i = 0; i < 16; ++i) backward[16 * l + i] = t[0][i / 4][i % 4];"""
    _, _, forward, backward = run(
        ["sm80/mma_f32.cuh", "sm80/bwd_product.cuh"], "const float* q, const float* k, float* forward, float* backward",
        body, q, k, np.empty((32, 4, 4), np.float32), np.empty((32, 4, 4), np.float32),
        constants=CONSTANTS, shared_bytes=max(tiles, 48 * stride + 12),
    )  # fmt: skip
    np.testing.assert_array_equal(forward, backward)
    exact, size = q.astype(float) @ k.astype(float).T, np.abs(q).astype(float) @ np.abs(k).astype(float).T
    good, found = ~np.isnan(exact), gather(forward)
    np.testing.assert_array_equal(np.isnan(found), ~good)
    assert (np.abs(found - exact)[good] <= size[good] * 2.0**-20).all()


@pytest.mark.parametrize("down", [False, True], ids=["dS K", "dS^T Q"])
def test_backward_multiplies_weights(down):
    rng = np.random.default_rng(7)
    w, x = rng.standard_normal((16, 32)).astype(np.float32), rng.standard_normal((32, 32)).astype(np.float32)
    w[:, 16:] *= 1e-3
    x = x[:16] if down else x
    rows, m, length = len(x), 2 if down else 1, 16 if down else 32
    stride = 32 * 4 + 16
    along = "rows" if down else "columns"
    body = f"""
        const u32 other = at + 16 * {stride}, units = at + 48 * {stride};
        float weights[1][4][4], acc[{m}][4][4] = {{}};
        for (int n = 0; n < 4; ++n)
            for (int i = 0; i < 4; ++i) weights[0][n][i] = w[(l / 4 + i / 2 * 8) * 32 + 8 * n + l % 4 * 2 + i % 2];
        store_split<{stride}, false>({{at, units}}, weights);
        for (int i = l; i < {rows} * 32; i += 32) ptx::store_shared(other + i / 32 * {stride} + i % 32 * 4, x[i]);
        __syncwarp();
        for (int i = 0; i < {rows // 16}; ++i) split_rows<32>(other + 16 * i * {stride}, units + 8 + 4 * i);
        __syncwarp();
        product<{length}, Along::{along}, {stride}, Along::rows, {stride}>(acc, {{at, units}}, {{other, units + 8}});
        for (int i = 0; i < {m} * 16; ++i) result[{m} * 16 * l + i] = acc[i / 16][i / 4 % 4][i % 4];"""
    *_, result = run(
        ["sm80/mma_f32.cuh", "sm80/bwd_product.cuh"], "const float* w, const float* x, float* result", body, w, x,
        np.empty((32, m, 4, 4), np.float32), constants=CONSTANTS, shared_bytes=48 * stride + 16,
    )  # fmt: skip
    a = w.T.astype(float) if down else w.astype(float)
    exact, size = a @ x.astype(float), np.abs(a) @ np.abs(x).astype(float)
    largest = np.abs(w).max() * np.abs(x).max()
    assert (np.abs(gather(result) - exact) <= size * 2.0**-21 + largest * 2.0**-36).all()
