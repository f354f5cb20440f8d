"""The warpgroup products against NumPy: one instruction, both kinds of left operand, both layouts of the right one."""

import ml_dtypes
import numpy as np
import pytest

from tests.kernels.probe import need_hopper, run

pytestmark = pytest.mark.gpu

BF16 = np.dtype(ml_dtypes.bfloat16)
ROWS = 64
WIDTHS = [64, 80, 96, 112, 128, 144, 160, 176, 192, 256]

# A lies in one slab, B in slabs of 64 columns when its long axis runs along rows (transposed), in one slab otherwise.
PUT = """
__device__ void put(unsigned char* tile, int row, int column, int rows, u16 value) {
    const int slab = column / 64, chunk = (column % 64 / 8) ^ (row % 8);
    reinterpret_cast<u16*>(tile + (slab * rows + row) * 128 + chunk * 16)[column % 8] = value;
}
"""
BODY = """
    constexpr int n = cfg::n, b_rows = cfg::transpose ? 16 : n, b_columns = cfg::transpose ? n : 16;
    unsigned char* b_tile = memory + 64 * 128;
    for (int i = threadIdx.x; i < 64 * 16; i += 128) put(memory, i / 16, i % 16, 64, a[i]);
    for (int i = threadIdx.x; i < 16 * n; i += 128) put(b_tile, i / b_columns, i % b_columns, b_rows, b[i]);
    ptx::async_proxy_fence();
    __syncthreads();
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4, row = 16 * (threadIdx.x / 32) + g;
    float x[n / 2];
    for (int i = 0; i < n / 2; ++i) x[i] = 1.0f;
    const u64 right = ptx::wgmma_descriptor(ptx::shared_address(b_tile), cfg::transpose ? b_rows * 128 : 16, 1024);
    ptx::wgmma_fence();
    if constexpr (cfg::registers) {
        const u32* words = reinterpret_cast<const u32*>(a);
        const u32 left[4] = {words[row * 8 + q], words[(row + 8) * 8 + q], words[row * 8 + 4 + q],
                             words[(row + 8) * 8 + 4 + q]};
        ptx::Product<n>::rs<cfg::bfloat16, cfg::sign, cfg::transpose>(x, left, right, 1);
    } else {
        const u64 left = ptx::wgmma_descriptor(at, 16, 1024);
        ptx::Product<n>::ss<cfg::bfloat16, cfg::sign, cfg::transpose>(x, left, right, 1);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(x);
    for (int i = 0; i < n / 2; ++i) d[(row + 8 * (i / 2 % 2)) * n + 8 * (i / 4) + 2 * q + i % 2] = x[i];"""


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("registers", [False, True])
def test_product(n, registers):
    need_hopper(newer=False)
    rng = np.random.default_rng(n)
    transpose = registers  # as the kernel uses them
    dtype, sign = (BF16, 1) if n % 32 else (np.dtype(np.float16), -1)
    a = rng.integers(-8, 8, (ROWS, 16)).astype(dtype)
    b = rng.integers(-8, 8, (16, n) if transpose else (n, 16)).astype(dtype)
    constants = {"n": n, "registers": registers, "transpose": int(transpose), "bfloat16": dtype == BF16, "sign": sign}
    d = run(
        ["ptx/tma.cuh", "ptx/wgmma.cuh"], "const u16* a, const u16* b, float* d", BODY, a.view(np.uint16),
        b.view(np.uint16), np.full((ROWS, n), np.nan, np.float32), constants=constants, threads=128, preamble=PUT,
        shared_bytes=64 * 128 + -(-n // 64) * 64 * 128, arch="sm_90a",
    )[2]  # fmt: skip
    right = (b if transpose else b.T).astype(np.float32)
    np.testing.assert_array_equal(d, 1 + sign * (a.astype(np.float32) @ right))
