"""Generated functions on the GPU against NumPy's evaluation of the same graphs."""

import random

import numpy as np
import pytest

from cuattn.tracing import MASK, SCORE, facts, source, trace
from cuattn.tracing.bound import ANY_LENGTH
from cuattn.tracing.derivatives import derivative
from cuattn.tracing.values import evaluate
from tests.kernels.probe import capability
from tests.tolerances import assert_close
from tests.tracing import expressions as ex
from tests.tracing import recipes

pytestmark = pytest.mark.gpu

KERNEL = """
using traced::acc;
extern "C" __global__ void probe(const traced::Arguments* given, const acc* s, acc* value, acc* slope) {
    const traced::Arguments& args = *given;
    const int b = blockIdx.z, h = blockIdx.y, i = blockIdx.x, j = threadIdx.x;
    const auto head = traced::head(args, b, h);
    const auto row = traced::row(args, head, b, h, i);
    const auto key = traced::key(args, head, b, h, j);
    const long long n = ((b * gridDim.y + h) * gridDim.x + i) * blockDim.x + j;
    RESULT found;
    traced::values(args, head, row, key, s[n], b, h, i, j, found, slope[n]);
    value[n] = found;
}
"""


def check(bound, variables, limits, dtype, short=False, lengths=ANY_LENGTH, name=""):
    """Compare a function and its slope on the GPU with NumPy's."""
    import cupy

    from cuattn.cuda import compile as compiler
    from cuattn.cuda import source as files

    roots = bound.root, derivative(bound.root)
    made = source({"values": roots}, facts(bound, lengths), dtype, short=short)
    kernel = KERNEL.replace("RESULT", "bool" if bound.root.kind == "b" else "acc")
    program = files.flatten_text(made.text + kernel, "probe.cu")
    kernel = compiler.load(compiler.compile_cubin(program, f"sm_{capability()}"), "probe")
    arrays = [cupy.asarray(x) for x in bound.arrays]
    s = cupy.asarray(np.broadcast_to(variables["s"], limits).astype(dtype))
    value, slope = cupy.empty_like(s), cupy.empty_like(s)
    packed = made.pack(bound, [x.data.ptr for x in arrays])
    arguments = cupy.asarray(np.frombuffer(packed.tobytes(), np.uint8))
    kernel(limits[2::-1], limits[3:], (arguments, s, value, slope))
    for result, root in ((value, roots[0]), (slope, roots[1])):
        exact = np.broadcast_to(evaluate(bound.of(root), variables, np.float64), limits).astype(float)
        numpy = np.broadcast_to(evaluate(bound.of(root), variables, dtype), limits).astype(dtype)
        largest = max(1.0, float(np.abs(exact[np.isfinite(exact)]).max(initial=0)))
        assert_close(result.get(), exact, numpy, magnitude=(256 if short else 32) * largest, name=name)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_compute_what_numpy_computes(dtype, short):
    if short and dtype == np.float64:
        pytest.skip("no such problems")
    generator = random.Random(9)
    for number in range(12):
        text = ex.number(generator, 4)
        lengths = ANY_LENGTH if number % 3 == 0 else ex.LIMITS
        check(ex.traced(text), ex.grid(dtype), ex.LIMITS, dtype, short, lengths, text)


@pytest.mark.parametrize("recipe", [*recipes.MASKS, *recipes.SCORES], ids=lambda recipe: recipe.name)
def test_recipes_compute_what_numpy_computes(recipe):
    shape = recipes.BATCH, recipes.HEADS, recipes.N, recipes.N
    bound = trace(recipe.function, SCORE if recipe in recipes.SCORES else MASK, recipe.args).bind(recipe.args)
    variables = {name: x.astype(np.int32) for name, x in zip("bhij", np.ogrid[tuple(map(slice, shape))], strict=True)}
    variables["s"] = np.random.default_rng(4).normal(size=shape, scale=3).astype(np.float32)
    for short in (False, True):
        check(bound, variables, shape, np.float32, short, shape, recipe.name)
