"""Generated functions on the GPU against NumPy's evaluation of the same graphs."""

import random

import numpy as np
import pytest

from cuattn.tracing.bound import ANY_LENGTH, facts
from cuattn.tracing.cuda import source
from cuattn.tracing.derivatives import derivative
from cuattn.tracing.values import evaluate
from tests.kernels.probe import capability
from tests.tolerances import assert_close
from tests.tracing import expressions as ex

pytestmark = pytest.mark.gpu

KERNEL = """
using traced::acc;
extern "C" __global__ void probe(const traced::Arguments* given, const acc* s, acc* value, acc* slope) {
    const traced::Arguments& args = *given;
    const int b = blockIdx.y, h = blockIdx.x, i = threadIdx.y, j = threadIdx.x;
    const auto head = traced::head(args, b, h);
    const auto row = traced::row(args, head, b, h, i);
    const auto key = traced::key(args, head, b, h, j);
    const long long n = ((b * gridDim.x + h) * blockDim.y + i) * blockDim.x + j;
    traced::score(args, head, row, key, s[n], b, h, i, j, value[n], slope[n]);
}
"""


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_compute_what_numpy_computes(dtype, short):
    import cupy

    from cuattn.cuda import compile as compiler
    from cuattn.cuda import source as files

    if short and dtype == np.float64:
        pytest.skip("no such problems")
    generator = random.Random(9)
    for number in range(12):
        text = ex.number(generator, 4)
        bound, variables = ex.traced(text), ex.grid(dtype)
        roots = bound.root, derivative(bound.root)
        made = source({"score": roots}, facts(bound, ANY_LENGTH if number % 3 == 0 else ex.LIMITS), dtype, short=short)
        program = files.flatten_text(made.text + KERNEL, "probe.cu")
        kernel = compiler.load(compiler.compile_cubin(program, f"sm_{capability()}"), "probe")
        arrays = [cupy.asarray(x) for x in bound.arrays]
        s = cupy.asarray(variables["s"])
        value, slope = cupy.empty_like(s), cupy.empty_like(s)
        packed = made.pack(bound, [x.data.ptr for x in arrays])
        arguments = cupy.asarray(np.frombuffer(packed.tobytes(), np.uint8))
        kernel((ex.N_HEADS, ex.N_BATCH), (ex.N_KEYS, ex.N_QUERIES), (arguments, s, value, slope))
        for result, root in ((value, roots[0]), (slope, roots[1])):
            exact = np.broadcast_to(evaluate(bound.of(root), variables, np.float64), ex.LIMITS)
            numpy = np.broadcast_to(evaluate(bound.of(root), variables, dtype), ex.LIMITS)
            largest = max(1.0, float(np.abs(exact[np.isfinite(exact)]).max(initial=0)))
            assert_close(result.get(), exact, numpy, magnitude=(256 if short else 32) * largest, name=text)
