"""Tile, product, softmax, score and mask helpers against NumPy, one warp each."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.probe import lanes, run

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


def gather(d, rows, columns):
    """Gather a result of m16n8 tiles from the lanes' values (32, m_tiles, n_tiles, 4)."""
    g, q = lanes()
    out = np.empty((rows, columns), d.dtype)
    for mt in range(rows // 16):
        for n in range(columns // 8):
            for r in range(4):
                out[16 * mt + g + 8 * (r // 2), 8 * n + 2 * q + r % 2] = d[:, mt, n, r]
    return out


@pytest.mark.parametrize("load_bytes", [16, 8, 4, 2])
@pytest.mark.parametrize("columns", [32, 64, 96])
def test_load_tile_is_what_the_swizzle_says(load_bytes, columns):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 65536, (16, columns + 8)).astype(np.uint16)
    have = columns - 5
    body = f"""
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(memory));
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
        const u32 at = static_cast<u32>(__cvta_generic_to_shared(memory));
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
        ["sm80/mma_f32.cuh", "sm80/mma_f64.cuh"], arguments, body, raw(q), raw(k), raw(v),
        np.empty((32, 2, 2, 4), out), np.empty((32, 2, head_dim // 8, 4), out),
        np.empty((head_dim // 8, 4), np.int32),
        constants={"elem": elem, "tf32": False}, preamble=keep, shared_bytes=total,
    )  # fmt: skip
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    tolerance = 1e-13 if elem == "double" else 5e-6
    found = gather(s, 32, 16)
    where = (columns[:, :, None] + np.arange(2)).reshape(-1)  # of the columns in the usual order
    np.testing.assert_allclose(found, q @ k.T, atol=tolerance * 10)
    assert np.abs(found).max() < 64
    p = (found / 64).astype(dtype).astype(np.float64) if size == 2 else found.astype(np.float64) / 64
    np.testing.assert_array_equal(np.sort(where), np.arange(head_dim))
    np.testing.assert_allclose(gather(o, 32, head_dim), (p @ v)[:, where], atol=tolerance * 40)


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
    scores = np.concatenate([gather(s[:, tile], 16, 16) for tile in range(2)], 1)
    top = scores.max(1)
    g, _ = lanes()
    for h in range(2):
        np.testing.assert_array_equal(m[:, h], top[g + 8 * h])
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(scores), 0, np.exp2((scores - top[:, None]) * 1.5)).sum(1)
    for h in range(2):
        np.testing.assert_allclose(sums[:, h], weights[g + 8 * h], rtol=1e-5)
    assert not p[:4, :, :, :, :2].any() and not np.isnan(p).any()


@pytest.mark.parametrize(("elem", "units"), [("float", 6), ("double", 3)])
def test_exp_times(elem, units):
    dtype = TYPES[elem]
    rng = np.random.default_rng(5)
    lowest = 60 if elem == "float" else 670
    x = -lowest * rng.random(64).astype(dtype) ** 3
    x[:4] = 0, -np.inf, np.nan, -1e5
    y = (1 / rng.uniform(1, 2.0**30, 64)).astype(dtype)
    body = "z[threadIdx.x] = exp_times(x[threadIdx.x], y[threadIdx.x]);"
    arguments = f"const {elem}* x, const {elem}* y, {elem}* z"
    z = run(["attn/math.cuh"], arguments, body, x, y, np.empty(64, dtype), threads=64)[2]
    wanted = np.exp(x.astype(np.longdouble)) * y
    np.testing.assert_allclose(z, wanted.astype(dtype), rtol=units * np.finfo(dtype).eps)
    assert z[1] == 0 and np.isnan(z[2]) and z[3] == 0


def test_cap_score_by_type():
    x = np.linspace(-30, 30, 32, dtype=np.float32)
    for elem, accuracy in (("__half", 2e-6), ("__nv_bfloat16", 2e-6), ("float", 1e-6)):
        constants = {"elem": elem, "acc": "float", "bias_elem": "float", "softcap": True, "bias": False}
        body = "Params p{}; p.scale = -0.5; p.softcap = 4; p.cap_scale = -0.125; y[l] = cap_score(p, x[l]);"
        y = run(["attn/score.cuh"], "const float* x, float* y", body, x, np.empty_like(x), constants=constants)[1]
        np.testing.assert_allclose(y, 4 * np.tanh(-0.5 * x.astype(float) / 4), atol=accuracy)


_MASK = {"block_m": 32, "block_n": 16, "band_left": True, "band_right": True, "mask": 0}


def test_walk_visits_what_the_band_sees():
    n_queries, n_keys, left, right, offset = 70, 100, 9, 4, 17
    body = f"""
        Params p{{}};
        p.n_queries = {n_queries}, p.n_keys = {n_keys};
        p.band_left = {left - offset}, p.band_right = {right + offset};
        __shared__ MaskPlace place;
        for (int tile = 0; tile < 3; ++tile) {{
            __syncwarp();
            place.rows = {{tile * 32, min(tile * 32 + 32, p.n_queries), tile}};
            place.lowest = band_first(p, place.rows) / cfg::block_n;
            __syncwarp();
            TileWalk walk(p, place, 7);
            i32 last = 1000;
            for (Tile at = walk.next(); at.exists(); at = walk.next()) {{
                if (l == 0) state[tile * 7 + at.n()] = at.n() < last ? (at.partial() ? 1 : 2) : 99;
                last = at.n();
            }}
            for (int i = l; i < 32 * {n_keys}; i += 32) {{
                const int row = min(tile * 32 + i / {n_keys}, p.n_queries - 1), key = i % {n_keys};
                seen[(tile * 32 + i / {n_keys}) * {n_keys} + key] = KeyMask(p, 0, 0, key).visible(p, row, key);
            }}
        }}
        for (int key = l; key < {n_keys}; key += 32) alive[key] = band_sees(p, key);"""
    state, seen, alive = run(
        ["attn/mask.cuh"], "u8* state, u8* seen, u8* alive", body, np.zeros((3, 7), np.uint8),
        np.zeros((96, n_keys), np.uint8), np.zeros(n_keys, np.uint8), constants=_MASK,
    )  # fmt: skip
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)
    band = (j >= i - left) & (j <= i + right)
    np.testing.assert_array_equal(seen[:n_queries], band)
    np.testing.assert_array_equal(alive, band.any(0))
    for m in range(3):
        for n in range(7):
            tile = band[32 * m : 32 * m + 32, 16 * n : 16 * n + 16]
            full = tile.all() and tile.shape[1] == 16
            if tile.any():
                assert state[m, n] == (2 if full else 1)
            else:
                assert state[m, n] in (0, 1)


@pytest.mark.parametrize("mask", [0, 1, 3, 8, 9, 10])
def test_row_walk_goes_both_ways(mask):
    rng = np.random.default_rng(mask)
    row_tiles, key_tiles, left, right, offset = 75, 7, 1700, 4, 70
    n_queries, n_keys = 32 * row_tiles - 5, 16 * key_tiles - 3
    ranges = 2 * (mask % 8)
    bounds = np.sort(rng.integers(0, row_tiles + 1, (key_tiles, ranges, 2)), -1).repeat(2, -1)[..., [0, 2, 1, 3]]
    blocks = rng.random((row_tiles, key_tiles)) < 0.1
    body = f"""
        Params p{{}};
        p.n_queries = {n_queries}, p.n_keys = {n_keys}, p.row_tiles = {row_tiles}, p.key_tiles = {key_tiles};
        p.band_left = {left - offset}, p.band_right = {right + offset};
        p.table.bounds = bounds, p.table.block_m = 32, p.table.block_n = 16;
        p.mask.data = blocks, p.mask.row = {key_tiles}, p.mask.col = 1;
        __shared__ WalkTables tables;
        for (int n = 0; n < {key_tiles}; ++n) {{
            __syncwarp();
            if (l == 0) describe_tables(tables, p, 0, 0, n);
            __syncwarp();
            int count = 0;
            for (RowWalk walk(p, tables); walk.next(p); ++count) if (l == 0) up[{row_tiles} * n + count] = walk.tile;
            count = 0;
            for (DirectedRowWalk<true> walk(p, tables); walk.next(p); ++count)
                if (l == 0) down[{row_tiles} * n + count] = walk.tile;
        }}"""
    nothing = np.full((key_tiles, row_tiles), -1, np.int32)
    _, _, up, down = run(
        ["attn/row_walk.cuh"], "const int4* bounds, u8* blocks, i32* up, i32* down", body,
        np.append(bounds, 0).astype(np.int32),
        blocks.astype(np.uint8), nothing, nothing, constants={**_MASK, "mask": mask},
    )  # fmt: skip
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)
    band = (j >= i - left) & (j <= i + right)
    for n in range(key_tiles):
        seen = [band[32 * m : 32 * m + 32, 16 * n : 16 * n + 16].any() for m in range(row_tiles)]
        for first, end in bounds[n, :, :2]:
            seen[first:end] = [False] * (end - first)
        if mask >= 8:
            seen &= blocks[:, n]
        visited = np.flatnonzero(seen)
        np.testing.assert_array_equal(up[n, : len(visited)], visited)
        np.testing.assert_array_equal(down[n, : len(visited)], visited[::-1])
        assert (up[n, len(visited) :] == -1).all() and (down[n, len(visited) :] == -1).all()
