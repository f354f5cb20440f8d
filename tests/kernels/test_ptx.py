"""The instruction wrappers against NumPy, one warp each."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.probe import gather, lanes, need_hopper, run

pytestmark = pytest.mark.gpu

BF16 = np.dtype(ml_dtypes.bfloat16)


def pairs(x):
    """Pack neighbours along the last axis into 32-bit words, the first in the low half."""
    return np.ascontiguousarray(x).view(np.uint32)


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "f16"), (BF16, "bf16")])
def test_mma_m16n8k16(dtype, name):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((16, 16)).astype(dtype), rng.standard_normal((16, 8)).astype(dtype)
    g, q = lanes()
    words, columns = pairs(a), pairs(b.T)
    fa = np.stack([words[g, q], words[g + 8, q], words[g, q + 4], words[g + 8, q + 4]], 1)
    fb = np.stack([columns[g, q], columns[g, q + 4]], 1)
    body = f"""
        float x[4] = {{1, 2, 3, 4}};
        u32 f[4] = {{a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3]}};
        ptx::mma_m16n8k16_{name}(x, f, b[2 * l], b[2 * l + 1]);
        for (int r = 0; r < 4; ++r) d[4 * l + r] = x[r];"""
    d = run(["ptx/mma.cuh"], "const u32* a, const u32* b, float* d", body, fa, fb, np.empty((32, 4), np.float32))[2]
    start = gather(np.tile(np.float32([1, 2, 3, 4]), (32, 1)))
    np.testing.assert_allclose(gather(d), start + a.astype(float) @ b.astype(float), rtol=1e-5, atol=1e-5)


def test_mma_f64():
    rng = np.random.default_rng(2)
    a, b = rng.integers(-9, 9, (16, 8)).astype(float), rng.integers(-9, 9, (8, 8)).astype(float)
    g, q = lanes()
    fa, fb = np.stack([a[g, q], a[g + 8, q], a[g, q + 4], a[g + 8, q + 4]], 1), np.stack([b[q, g], b[q + 4, g]], 1)
    body = """
        double x[4] = {};
        double f[4] = {a[4 * l], a[4 * l + 1], a[4 * l + 2], a[4 * l + 3]};
        mma(x, f, b[2 * l], b[2 * l + 1]);
        double y[2] = {};
        ptx::mma_m8n8k4_f64(y, f[0], b[2 * l]);
        for (int r = 0; r < 4; ++r) d[6 * l + r] = x[r];
        d[6 * l + 4] = y[0], d[6 * l + 5] = y[1];"""
    arguments = "const double* a, const double* b, double* d"
    d = run(["sm80/mma.cuh"], arguments, body, fa, fb, np.empty((32, 6)))[2]
    np.testing.assert_array_equal(gather(d[:, :4]), a @ b)
    small = np.empty((8, 8))
    small[g, 2 * q], small[g, 2 * q + 1] = d[:, 4], d[:, 5]
    np.testing.assert_array_equal(small, a[:8, :4] @ b[:4])


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(trans):
    tiles = np.arange(4 * 64, dtype=np.uint16).reshape(4, 8, 8)
    body = f"""
        for (int i = l; i < 128; i += 32) reinterpret_cast<u32*>(memory)[i] = x[i];
        __syncwarp();
        u32 r[4];
        ptx::ldmatrix_x4{"_trans" if trans else ""}(r, at + l * 16);
        for (int i = 0; i < 4; ++i) y[4 * l + i] = r[i];"""
    words = pairs(tiles).reshape(-1)
    empty = np.empty((32, 4), np.uint32)
    y = run(["ptx/shared.cuh"], "const u32* x, u32* y", body, words, empty, shared_bytes=512)[1]
    g, q = lanes()
    wanted = pairs(tiles.swapaxes(1, 2) if trans else tiles)
    np.testing.assert_array_equal(y, np.stack([wanted[i][g, q] for i in range(4)], 1))


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("valid", [0, 3, 4])
def test_cp_async_fills_with_zeros(size, valid):
    x = np.arange(1, 33 * 16, dtype=np.uint8)[: 32 * 16]
    body = f"""
        const u32 own = at + l * 16;
        for (int i = 0; i < 16; ++i) memory[l * 16 + i] = 255;
        ptx::cp_async<{size}>(own, x + l * 16, {valid});
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncwarp();
        for (int i = 0; i < 16; ++i) y[l * 16 + i] = memory[l * 16 + i];"""
    y = run(["ptx/shared.cuh"], "const u8* x, u8* y", body, x, np.empty((32, 16), np.uint8), shared_bytes=512)[1]
    wanted = np.full((32, 16), 255, np.uint8)
    wanted[:, :size] = 0
    wanted[:, :valid] = x.reshape(32, 16)[:, :valid]
    np.testing.assert_array_equal(y, wanted)


def test_convert():
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((32, 2)) * 10.0 ** rng.integers(-6, 5, (32, 2))).astype(np.float32)
    body = """
        p[5 * l] = ptx::pack_f16(x[2 * l], x[2 * l + 1]);
        p[5 * l + 1] = ptx::pack_bf16(x[2 * l], x[2 * l + 1]);
        p[5 * l + 2] = ptx::pack_positive_f16(x[2 * l], x[2 * l + 1]);
        p[5 * l + 3] = ptx::pack_positive_bf16(x[2 * l], x[2 * l + 1]);
        p[5 * l + 4] = ptx::prmt(0x33221100u, 0x77665544u, 0x0426u);
        f[3 * l] = ptx::ex2(x[2 * l] / 1000);
        f[3 * l + 1] = ptx::lg2(x[2 * l] * x[2 * l]);
        f[3 * l + 2] = ptx::rcp(x[2 * l]);"""
    _, p, f = run(
        ["ptx/registers.cuh"], "const float* x, u32* p, float* f", body, x, np.empty((32, 5), np.uint32),
        np.empty((32, 3), np.float32),
    )  # fmt: skip
    with np.errstate(over="ignore"):
        wanted = [pairs(y.astype(kind))[:, 0] for y in (x, np.maximum(x, 0)) for kind in (np.float16, BF16)]
    np.testing.assert_array_equal(p[:, :4].T, wanted)
    assert (p[:, 4] == 0x00442266).all()
    np.testing.assert_allclose(f[:, 0], np.exp2(x[:, 0] / np.float32(1000)), rtol=2**-21)
    np.testing.assert_allclose(f[:, 1], np.log2(x[:, 0].astype(float) ** 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(f[:, 2], 1 / x[:, 0].astype(float), rtol=2**-22)


def test_bulk_load_by_one_lane():
    need_hopper()
    x = np.random.default_rng(6).standard_normal((3, 32))
    body = """
        __shared__ u64 word;
        const u32 barrier = ptx::shared_address(&word);
        if (l == 0) {
            ptx::mbarrier_init(barrier, 32);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        const bool chosen = ptx::elected();
        if (l == 0) ptx::mbarrier_arrive_expect(barrier, 3 * 256);
        else ptx::mbarrier_arrive(barrier);
        if (chosen)
            for (int i = 0; i < 3; ++i) ptx::bulk_load(at + 272 * i, x + 32 * i, 256, barrier);
        ptx::mbarrier_wait(barrier, 0);
        n[l] = chosen;
        for (int i = 0; i < 3; ++i) ptx::load_shared(y[32 * i + l], at + 272 * i + 8 * l);"""
    arguments = "const double* x, double* y, i32* n"
    y, n = run(["ptx/barrier.cuh", "ptx/tma.cuh"], arguments, body, x, np.empty((3, 32)), np.empty(32, np.int32),
               shared_bytes=1024)[1:]  # fmt: skip
    assert n.sum() == 1
    np.testing.assert_array_equal(y, x)


def test_negate_unless():
    x, bits = np.random.default_rng(7).standard_normal(32).astype(np.float32), np.arange(32, dtype=np.uint32) % 5 * 3
    body = "y[l] = ptx::negate_unless(x[l], bits[l]);"
    y = run(["ptx/registers.cuh"], "const float* x, const u32* bits, float* y", body, x, bits, np.empty_like(x))[2]
    np.testing.assert_array_equal(y, np.where(bits, x, -x))


def test_simd():
    need_hopper()
    rng = np.random.default_rng(4)
    x, y = (rng.integers(0, 65536, (32, 2)).astype(np.uint16) for _ in range(2))
    body = """
        z[4 * l] = ptx::min_u16x2(x[l], y[l]);
        z[4 * l + 1] = ptx::max_s16x2(x[l], y[l]);
        z[4 * l + 2] = ptx::add_s16x2(x[l], y[l]);
        z[4 * l + 3] = ptx::max_u16x2(x[l], y[l]);"""
    arguments = "const u32* x, const u32* y, u32* z"
    z = run(["ptx/registers.cuh"], arguments, body, pairs(x), pairs(y), np.empty((32, 4), np.uint32))[2]
    z = z.view(np.uint16).reshape(32, 4, 2)
    np.testing.assert_array_equal(z[:, 0], np.minimum(x, y))
    np.testing.assert_array_equal(z[:, 1].view(np.int16), np.maximum(x.view(np.int16), y.view(np.int16)))
    np.testing.assert_array_equal(z[:, 2], x + y)
    np.testing.assert_array_equal(z[:, 3], np.maximum(x, y))
