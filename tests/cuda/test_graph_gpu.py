"""Calls captured in CUDA graphs and on streams of the caller, from CuPy and from PyTorch.

A captured call is replayed after whatever memory its capture gave back was overwritten, with new inputs in the old
places, and must give the bits of an eager call on those inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuattn
from cuattn import masks
from cuattn.masks import BlockMask
from tests.cuda.cases import BF16

pytestmark = pytest.mark.gpu

LENGTH = 320
DOCUMENTS = (100, 60, 160)
SIZES = (4, 512, 4096, 1 << 16, 1 << 20, 1 << 22)


class CuPy:
    """CuPy arrays, captured by a CuPy stream."""

    def __init__(self):
        import cupy

        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def put(self, array):
        return self.cupy.asarray(array)

    def bits(self, array):
        return array.get().tobytes()

    def copy(self, target, source):
        target[...] = source

    def poison(self):
        return [self.cupy.full(size, 0xFF, np.uint8) for size in SIZES for _ in range(16)]

    def capture(self, call):
        """Return the results of a captured call, and a function that replays it and waits."""
        with self.stream:
            self.stream.begin_capture()
            results = call()
            graph = self.stream.end_capture()
            noise = self.poison()  # in the memory of the stream, as in that of others
        self.cupy.cuda.Device().synchronize()
        noise += self.poison()

        def replay():
            self.cupy.cuda.Device().synchronize()
            graph.launch(self.stream)
            self.stream.synchronize()
            return noise

        return results, replay


class Torch:
    """PyTorch tensors, captured by torch.cuda.graph."""

    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def put(self, array):
        if array.dtype == BF16:
            return self.torch.from_numpy(array.view(np.int16)).cuda().view(self.torch.bfloat16)
        return self.torch.from_numpy(array).cuda()

    def bits(self, tensor):
        return tensor.contiguous().view(self.torch.uint8).cpu().numpy().tobytes()

    def copy(self, target, source):
        target.copy_(source)

    def capture(self, call):
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            results = call()
        noise = [self.torch.full((size,), 0xFF, dtype=self.torch.uint8, device="cuda") for size in SIZES * 16]
        noise += CuPy().poison()

        def replay():
            self.torch.cuda.synchronize()
            graph.replay()
            self.torch.cuda.synchronize()
            return noise

        return results, replay


@pytest.fixture(params=[CuPy, Torch])
def library(request):
    return request.param()


def _dense(rng):
    return rng.random((LENGTH, LENGTH)) < 0.5


def _blocks(rng):
    return BlockMask(rng.random((5, 5)) < 0.6, 64, 64)


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "column": {"mask": lambda rng: masks.causal_document(DOCUMENTS)},
    "blocks": {"mask": _blocks},
    "dense": {"mask": _dense},
    "bias": {"bias": lambda rng: rng.standard_normal((LENGTH, 1)).astype(np.float32)},
    "dropout": {"dropout_p": 0.2},
    "dropout column": {"dropout_p": 0.2, "mask": lambda rng: masks.causal_document(DOCUMENTS)},
}
PORTABLE_ONLY = ("dense", "bias")


def inputs(library, rng):
    """Return do, q, k, v."""
    return [library.put(rng.standard_normal((2, 6, LENGTH, 64)).astype(BF16)) for _ in range(4)]


def made(library, name, rng):
    """Return the options of a call, its mask in place for a capture."""
    options = dict(CALLS[name])
    for key in ("mask", "bias"):
        if key in options:
            value = options[key](rng)
            options[key] = library.put(value) if isinstance(value, np.ndarray) else value.to_device()
    return options


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("name", CALLS)
def test_replays_compute_on_new_inputs(library, name, kernel):
    if kernel == "sm90" and name in PORTABLE_ONLY:
        pytest.skip("the portable kernel alone takes it")
    rng = np.random.default_rng(5)
    arrays, options = inputs(library, rng), made(library, name, rng)
    dropped = "dropout_p" in options
    offset = library.put(np.zeros((), np.int64))

    def call(offset=offset):
        drawn = {"rng": cuattn.RNGState(9, offset)} if dropped else {}
        fwd = cuattn.forward(*arrays[1:], kernel=kernel, **drawn, **options)
        return fwd[:3], cuattn.backward(*arrays, fwd, kernel="sm80", deterministic=True, **options)

    call()  # compiles and loads
    (fwd, gradients), replay = library.capture(call)
    for step in range(2):
        for array, new in zip(arrays, inputs(library, rng), strict=True):
            library.copy(array, new)
        library.copy(offset, library.put(np.array(step)))
        replay()
        eager_fwd, eager = call(offset=step)
        for got, wanted in zip((*fwd, *gradients), (*eager_fwd, *eager), strict=True):
            assert got is wanted is None or library.bits(got) == library.bits(wanted)


def test_tables_of_a_new_mask_are_filled_by_the_graph(library):
    rng = np.random.default_rng(6)
    arrays = inputs(library, rng)
    cuattn.forward(*arrays[1:], mask=masks.causal_document(DOCUMENTS))
    mask = masks.causal_document(DOCUMENTS[::-1]).to_device()
    fwd, replay = library.capture(lambda: cuattn.forward(*arrays[1:], mask=mask))
    replay()
    assert library.bits(fwd.o) == library.bits(cuattn.forward(*arrays[1:], mask=mask).o)


def replays_bit_for_bit(library, call):
    """Whether a call, captured after it ran once, gives its bits again, also the third time."""
    eager = call()
    captured, replay = library.capture(call)
    for _ in range(3):
        replay()
    return [library.bits(x) for x in captured[:3]] == [library.bits(x) for x in eager[:3]]


def test_split_keys(library):
    rng = np.random.default_rng(7)
    q = library.put(rng.standard_normal((8, 1, 64)).astype(BF16))
    k, v = (library.put(rng.standard_normal((2, 4096, 64)).astype(BF16)) for _ in range(2))
    plan = cuattn.plan(q, k, v, enable_gqa=True, kernel="sm80")
    assert plan.workspace_bytes > 0 and "parts" in str(plan)
    assert replays_bit_for_bit(library, lambda: cuattn.forward(q, k, v, enable_gqa=True, kernel="sm80"))


def test_merge(library):
    _, q, k, v = inputs(library, np.random.default_rng(8))
    half = LENGTH // 2

    def call():
        parts = [cuattn.forward(q, k[..., s, :], v[..., s, :]) for s in (slice(None, half), slice(half, None))]
        return cuattn.merge(*parts)

    assert replays_bit_for_bit(library, call)


def test_strided_copies_live_as_long_as_the_results(library):
    rng = np.random.default_rng(9)
    q = library.put(rng.standard_normal((2, 64, LENGTH)).astype(np.float32)).swapaxes(-1, -2)
    assert replays_bit_for_bit(library, lambda: cuattn.forward(q, q, q))


def test_a_host_mask_is_refused_while_capturing():
    library = CuPy()
    arrays = inputs(library, np.random.default_rng(1))
    cuattn.forward(*arrays[1:], mask=masks.causal_document(DOCUMENTS))
    with pytest.raises(cuattn.errors.UnsupportedError, match="to_device"), library.stream:
        library.stream.begin_capture()
        try:
            cuattn.forward(*arrays[1:], mask=masks.causal_document(DOCUMENTS[::-1]))
        finally:
            library.stream.end_capture()


SPIN = r"""
extern "C" __global__ void late_fill(float* x, float value, int n) {
    const long long start = clock64();
    while (clock64() - start < 40000000) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) x[i] = value;
}
"""


@pytest.mark.parametrize("layout", ["contiguous", "copied"])
@pytest.mark.parametrize("kind", ["cupy", "torch"])
def test_work_follows_the_callers_stream(kind, layout):
    """Inputs that a slow kernel of the stream has yet to write are read after it, and nothing waits for the device."""
    import cupy

    library = {"cupy": CuPy, "torch": Torch}[kind]()
    fill = cupy.RawKernel(SPIN, "late_fill")
    v = library.put(np.zeros((2, 64, 64), np.float32))
    q = library.put(np.ones((2, 64, 64), np.float32))
    pointer = v.data.ptr if kind == "cupy" else v.data_ptr()
    seen = v.swapaxes(-1, -2) if layout == "copied" else v
    mask = masks.causal_document([20, 44])

    def call():
        fwd = cuattn.forward(q, q, seen, mask=mask)
        gradients = cuattn.backward(fwd.o, q, q, seen, fwd, mask=mask)
        return cuattn.merge(fwd).o, gradients.dv

    call()
    cupy.cuda.Device().synchronize()
    if kind == "cupy":
        scope = stream = cupy.cuda.Stream(non_blocking=True)
    else:
        scope = library.torch.cuda.stream(library.torch.cuda.Stream())
        stream = cupy.cuda.Stream.from_external(scope.stream)
    for value in (3.0, 4.0):  # the second call is warm on this stream
        with scope:
            fill((1,), (256,), (np.uint64(pointer), np.float32(value), np.int32(2 * 64 * 64)), stream=stream)
            o, dv = call()
            pending = not stream.done
            stream.synchronize()
        assert pending, "the call waited for the device"
        np.testing.assert_allclose(np.frombuffer(library.bits(o), np.float32), value, rtol=1e-6)
        assert np.isfinite(np.frombuffer(library.bits(dv), np.float32)).all()
