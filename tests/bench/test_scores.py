"""The functions of scores and masks: the same in NumPy and PyTorch, traced and compiled; measured and summed up."""

import numpy as np
import pytest

from bench.cases import Case
from bench.score_samples import FORMULAS, formula
from cuattn import tracing

torch = pytest.importorskip("torch")

from bench import inputs  # noqa: E402

SHAPE = (2, 4, 192, 192)


def case(name, direction="forward", **options):
    return Case("t", direction, 2, 4, 4, 192, 192, 16, dtype="float32", score=name, **options)


def indices():
    """The grids b, h, i and j, of arrays."""
    return [x.astype(np.int32) for x in np.ogrid[tuple(map(slice, SHAPE))]]


@pytest.mark.parametrize("name", [name for name in FORMULAS if formula(case(name)).visible])
def test_what_is_visible_is_the_same_in_numpy_and_pytorch(name):
    made = inputs.make(case(name), "cpu")
    found, grid = formula(made.case), indices()
    bound = tracing.trace(lambda b, h, i, j: found.visible(b, h, i, j, **found.given), tracing.MASK).bind()
    ours = tracing.evaluate(bound, dict(zip("bhij", grid, strict=True)), limits=SHAPE)
    theirs = made.functions({})[1](*map(torch.from_numpy, grid)).expand(SHAPE).numpy()
    np.testing.assert_array_equal(np.broadcast_to(ours, SHAPE), theirs)
    assert 0.02 < theirs.mean() < 0.8
    assert made.rho < 1


@pytest.mark.parametrize("name", [name for name in FORMULAS if formula(case(name)).score])
def test_scores_are_the_same_in_numpy_and_pytorch(name):
    """Traced and differentiated by cuattn, and by PyTorch: values, slopes, gradients of arrays."""
    made = inputs.make(case(name), "cpu")
    found, grid = formula(made.case), indices()
    s, cotangent = np.random.default_rng(0).normal(size=(2, *SHAPE), scale=9.0)
    args = tuple(x.numpy() for x in made.arrays.values())
    function = tracing.trace(lambda s, b, h, i, j, *args: found.score(s, b, h, i, j, *args, **found.given), args=args)
    bound = function.bind(args)

    def ours(root, dtype=None):
        return np.broadcast_to(tracing.evaluate(bound.of(root), variables, dtype or np.float64, SHAPE), SHAPE)

    variables = {**dict(zip("bhij", grid, strict=True)), "s": s}
    arrays = {key: x.double().requires_grad_() for key, x in made.arrays.items()}
    x = torch.from_numpy(s).requires_grad_()
    result = made.functions(arrays)[0](x, *map(torch.from_numpy, grid))
    np.testing.assert_allclose(ours(bound.root), result.detach(), rtol=1e-6, atol=1e-6)
    ds, *gradients = torch.autograd.grad(result, [x, *arrays.values()], torch.from_numpy(cotangent))
    np.testing.assert_allclose(ours(tracing.derivative(bound.root)) * cotangent, ds, rtol=1e-6, atol=1e-9)
    for array, wanted in zip(args, gradients, strict=True):
        gradient = np.zeros(wanted.shape)
        (slot,) = (slot for slot, x in enumerate(bound.arrays) if x is array)
        for weight in tracing.weights(bound.root, slot):
            np.add.at(gradient, tuple(map(ours, weight.indices)), cotangent * ours(weight.weight))
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-6)
