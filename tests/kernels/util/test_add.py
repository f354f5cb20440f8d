"""util/add.cu and cuattn.cuda.add: copies, conversions and sums of rows, wherever these begin."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import dispatch
from cuattn.cuda.add import add_sequence
from cuattn.cuda.params import ADD_PARAMS
from cuattn.problem import DTYPES
from tests.cuda.nvrtc import kernel_resources
from tests.cuda.recording import array

BF16, F16, F32, F64 = map(np.dtype, (ml_dtypes.bfloat16, np.float16, np.float32, np.float64))
PAIRS = [(BF16, BF16), (F32, BF16), (F32, F16), (F32, F32), (F64, F64), (F64, F32)]  # of terms and of sums
CUTS = [
    (slice(None), slice(None)),
    (slice(1, None), slice(None)),
    (slice(3, 40), slice(None)),
    (slice(2, 9), slice(1, 4)),
]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize(("part", "out"), PAIRS)
@pytest.mark.parametrize("adds", [False, True])
def test_spills(part, out, adds, arch):
    for width in (8, 1):
        constants = {"part": DTYPES[part].cuda, "out": DTYPES[out].cuda, "adds": adds, "width": width}
        (found,) = kernel_resources("util/add.cu", tuple(constants.items()), arch).values()
        assert found.spill_stores == found.stack == 0


@given(data=st.data(), shape=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_rows_and_packs_are_all_elements(data, shape):
    """Of parts of whole arrays, along any one axis: where each element of a term lies, and where it goes."""
    axis, dtype = data.draw(st.integers(0, len(shape) - 1)), F32
    stop = shape[axis]
    start = data.draw(st.integers(0, stop))
    index = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    cut = index[(slice(None),) * axis + (slice(start, stop),)]
    whole = array(tuple(shape), dtype, 1 << 20)
    first = int(cut.min()) if cut.size else 0
    part = array(cut.shape, dtype, whole.data.ptr + first * dtype.itemsize)
    part.strides, part.itemsize = tuple(np.array(index.strides) // index.itemsize * dtype.itemsize), dtype.itemsize
    out = array(cut.shape, dtype, 1 << 21)
    out.itemsize = dtype.itemsize
    made = add_sequence(out, part)
    if made is None:
        assert len(shape) > 2 or axis == len(shape) - 1  # more axes than two are left
        return
    for kernel in made._kernels:
        said = np.frombuffer(kernel._template, ADD_PARAMS)[0]
        width = cut.size // (int(said["rows"]) * int(said["packs"]))
        row, column = np.ogrid[: said["rows"], : said["packs"] * width]
        np.testing.assert_array_equal(first + (row * said["a_row"] + column).ravel(), cut.ravel())
        np.testing.assert_array_equal((row * said["out_row"] + column).ravel(), np.arange(cut.size))
        assert (part.data.ptr % 16 == 0 and said["a_row"] % width == 0) or width < 4
    assert made._kernels or not cut.size


@pytest.mark.gpu
@pytest.mark.parametrize(("part", "out"), PAIRS)
@pytest.mark.parametrize(("rows", "columns"), CUTS)
def test_sums(part, out, rows, columns):
    import cupy

    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((5, 64, 130)).astype(part) for _ in range(2))
    for x, y in ((a, b), (a[..., :128].copy(), b[..., :128].copy())):
        on_gpu = [cupy.asarray(each)[:, rows, columns] for each in (x, y)]
        x, y = x[:, rows, columns], y[:, rows, columns]
        for terms, right in ((on_gpu[:1], x), (on_gpu, x.astype(F64) + y.astype(F64))):
            target = cupy.full((5, 70, 140), 7, out)
            place = target[:, 3 : 3 + x.shape[1], : x.shape[2]]
            dispatch.add(place, *terms)
            wide = np.float32 if part.itemsize < 8 else np.float64
            expected = right.astype(wide).astype(out)
            np.testing.assert_array_equal(place.get(), expected)
            place[...] = 7
            assert (target == 7).all()  # nothing beside
    if part == out:
        dispatch.add(on_gpu[0], *on_gpu)
        np.testing.assert_array_equal(on_gpu[0].get(), (x.astype(F64) + y.astype(F64)).astype(wide).astype(out))
