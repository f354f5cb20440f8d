"""Tiles, products and softmax of the forward against NumPy, one warp each."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.probe import gather, lanes, run

pytestmark = pytest.mark.gpu

TYPES = {
    "__half": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
}


def raw(x):
    """Reinterpret as unsigned integers, which every library can move."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


@pytest.mark.parametrize("load_bytes", [16, 8, 4, 2])
@pytest.mark.parametrize("columns", [32, 64, 96])
def test_load_tile_is_what_the_swizzle_says(load_bytes, columns):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 65536, (16, columns + 8)).astype(np.uint16)
    have = columns - 5
    body = f"""
        const u16* from = x;
        const auto live = [](int r) {{ return r < 13; }};
        load_tile<u16, 16, {columns}, 32, {load_bytes}>(at, from, {columns + 8}, {have}, live, l);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncwarp();
        for (int i = l; i < 16 * {columns}; i += 32) {{
            const int row = i / {columns}, column = i % {columns};
            y[i] = *reinterpret_cast<u16*>(memory + swizzle<{2 * columns}>(row, column / 8) + column % 8 * 2);
        }}"""
    y = run(
        ["sm80/tile.cuh"], "const u16* x, u16* y", body, x, np.empty((16, columns), np.uint16),
        shared_bytes=32 * columns,
    )[1]  # fmt: skip
    wanted = np.where((np.arange(16) < 13)[:, None] & (np.arange(columns) < have), x[:, :columns], 0)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("elem", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_products(elem, head_dim):
    dtype = TYPES[elem]
    acc = "double" if elem == "double" else "float"
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((rows, head_dim)).astype(dtype) for rows in (32, 16, 16))
    size = dtype.itemsize
    total = 64 * (head_dim * size + 4)
    body = f"""
        using P = Mma<cfg::elem>;
        constexpr int d = {head_dim}, bytes = {min(size * 2, 16)};
        const u32 kv = at + P::tile_bytes<32, d>, v_at = kv + P::tile_bytes<16, d>;
        const auto all = [](int) {{ return true; }};
        load_tile<cfg::elem, 32, d, 32, bytes>(at, q, d, d, all, l);
        load_tile<cfg::elem, 16, d, 32, bytes>(kv, k, d, d, all, l);
        load_tile<cfg::elem, 16, d, 32, bytes>(v_at, v, d, d, all, l);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        P::prepare_q<32, d, 32>(at, l);
        P::prepare_kv<16, d, d, 32>(kv, l, 0, 1);
        __syncwarp();
        P::QRows<2, d> rows(at, 32, 0, l);
        rows.load();
        {acc} s[2][2][4] = {{}}, o[2][{head_dim // 8}][4] = {{}};
        P::scores(s, rows, kv, l);
        for (int i = 0; i < 16; ++i) s_out[16 * l + i] = s[i / 8][i / 4 % 2][i % 4];
        const auto shrink = [&](int c) {{  // probabilities are at most 1
            for (int i = 0; i < 16; ++i) s[i / 8][2 * c + i / 4 % 2][i % 4] /= 64;
        }};
        P::values(o, s, v_at, l, shrink, Keep(), Keep());
        P::arrange(o);
        for (int i = 0; i < d; ++i) o_out[d * l + i] = o[i / (d / 2)][i / 4 % (d / 8)][i % 4];
        if (l < 4) for (int n = 0; n < d / 8; ++n) columns[n * 4 + l] = P::column(n, l);"""
    keep = """struct Keep {
        template <class... X> __device__ void operator()(X&&...) const {}
    };"""
    arguments = f"const cfg::elem* q, const cfg::elem* k, const cfg::elem* v, {acc}* s_out, {acc}* o_out, int* columns"
    out = np.float64 if elem == "double" else np.float32
    *_, s, o, columns = run(
        ["sm80/mma_f32.cuh"], arguments, body, raw(q), raw(k), raw(v),
        np.empty((32, 2, 2, 4), out), np.empty((32, 2, head_dim // 8, 4), out),
        np.empty((head_dim // 8, 4), np.int32),
        constants={"elem": elem, "tf32": False}, preamble=keep, shared_bytes=total,
    )  # fmt: skip
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    tolerance = 1e-13 if elem == "double" else 5e-6
    found = gather(s)
    where = (columns[:, :, None] + np.arange(2)).reshape(-1)  # of the columns in the usual order
    np.testing.assert_allclose(found, q @ k.T, atol=tolerance * 10)
    assert np.abs(found).max() < 64
    p = (found / 64).astype(dtype).astype(np.float64) if size == 2 else found.astype(np.float64) / 64
    np.testing.assert_array_equal(np.sort(where), np.arange(head_dim))
    np.testing.assert_allclose(gather(o), (p @ v)[:, where], atol=tolerance * 40)


def test_softmax_rows():
    rng = np.random.default_rng(2)
    s = rng.standard_normal((32, 2, 1, 2, 4)).astype(np.float32) * 4  # two tiles of 16 keys
    s[:4, :, :, :, :2] = -np.inf  # row 0 sees nothing
    s[4:8, 0, :, :, :2] = -np.inf  # row 1 sees nothing of the first tile
    body = """
        SoftmaxRows<float, 1, true> rows;
        float o[1][1][4] = {{{1, 1, 1, 1}}};
        for (int tile = 0; tile < 2; ++tile) {
            float x[1][2][4];
            for (int i = 0; i < 8; ++i) x[0][i / 4][i % 4] = s[(l * 2 + tile) * 8 + i];
            rows.update(x, o, Log2Factor<float>{1.5f, 0.f});
            rows.exponentiate(x, 0, Log2Factor<float>{1.5f, 0.f});
            for (int i = 0; i < 8; ++i) p[(l * 2 + tile) * 8 + i] = x[0][i / 4][i % 4];
        }
        rows.finish();
        for (int h = 0; h < 2; ++h) m[2 * l + h] = rows.m[0][h], sums[2 * l + h] = rows.l[0][h];"""
    arguments = "const float* s, float* p, float* m, float* sums"
    _, p, m, sums = run(
        ["sm80/softmax.cuh"], arguments, body, s, np.empty_like(s), np.empty((32, 2), np.float32),
        np.empty((32, 2), np.float32),
    )  # fmt: skip
    scores = np.concatenate([gather(s[:, tile]) for tile in range(2)], 1)
    top = scores.max(1)
    g, _ = lanes()
    for h in range(2):
        np.testing.assert_array_equal(m[:, h], top[g + 8 * h])
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(scores), 0, np.exp2((scores - top[:, None]) * 1.5)).sum(1)
    for h in range(2):
        np.testing.assert_allclose(sums[:, h], weights[g + 8 * h], rtol=1e-5)
    assert not p[:4, :, :, :, :2].any() and not np.isnan(p).any()
