"""Score functions on the CPU: values, slopes and the gradients of arrays, by tiles and by whole heads."""

import functools

import numpy as np
import pytest

import cuattn
from tests import oracle
from tests.cpu.sizes import tiled, whole_heads
from tests.strategies import DTYPES, normal
from tests.tolerances import assert_close
from tests.tracing.recipes import BATCH, HEADS, SCORES, N

SHAPE = (BATCH, HEADS, N, N)
WAYS = {
    "whole heads": whole_heads,
    "head by head": functools.partial(whole_heads, 1),
    "tiles": functools.partial(tiled, 16, 32, 2, 1, step=1),
    "stacks": functools.partial(tiled, 32, 16, 1, 2, step=3, workers=2),
}
recipes = pytest.mark.parametrize("recipe", SCORES, ids=lambda recipe: recipe.name)
in_each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def both(do, q, k, v, **options):
    """Return a forward, its gradients, and those of the score function's arguments."""
    fwd = cuattn.forward(q, k, v, **options)
    options.pop("rng", None)
    options.pop("out_dtype", None)
    grads = cuattn.backward(do, q, k, v, fwd, **options)
    return fwd, grads


@recipes
@in_each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recipes_hold_the_rule(recipe, way, dtype):
    q, k, v, do = arrays(1, *4 * [(*SHAPE[:3], 16)], dtype=dtype)
    score = oracle.Score(recipe.function, recipe.args, SHAPE)
    s = 16**-0.5 * (q.astype(np.float64) @ k.astype(np.float64).swapaxes(-1, -2))
    np.testing.assert_allclose(score(s)[0], np.broadcast_to(recipe.formula(s), SHAPE), rtol=1e-10, atol=1e-10)
    with way():
        fwd, grads = both(do, q, k, v, score=recipe.function, score_args=recipe.args)
    exact, rough = (oracle.solve(q, k, v, do, score=score, dtype=low) for low in (None, dtype))
    floors = oracle.floors(exact, q, k, v, do, score=score)
    for name, actual in zip(("o", "l", "m", "dq", "dk", "dv"), (*fwd[:3], *grads[:3]), strict=True):
        e, t = getattr(exact, name), getattr(rough, name)
        assert_close(actual, e, t, dtype=dtype, floor=floors[name], name=name)
    judged = score.judged(grads.dscore, s, exact, rough, floors)
    for array, (actual, e, t, floor) in zip(recipe.args, judged, strict=True):
        assert (actual is None) == (array.dtype.kind != "f")
        if actual is not None:
            assert actual.dtype == array.dtype
            assert_close(actual, e, t, dtype=dtype, floor=floor, name="dscore")


@recipes
def test_gradients_are_finite_differences(recipe):
    q, k, v, do = arrays(2, *4 * [(*SHAPE[:3], 8)])
    given, rng = [q, k, v, *recipe.args], np.random.default_rng(3)

    def loss(q, k, v, *args):
        return (do * cuattn.attention(q, k, v, score=recipe.function, score_args=args)).sum()

    _, grads = both(do, q, k, v, score=recipe.function, score_args=recipe.args)
    for n, (x, gradient) in enumerate(zip(given, (*grads[:3], *grads.dscore), strict=True)):
        if gradient is not None:
            step = 1e-6 * rng.standard_normal(x.shape)
            ends = [loss(*given[:n], x + sign * step, *given[n + 1 :]) for sign in (1, -1)]
            np.testing.assert_allclose((ends[0] - ends[1]) / 2, (gradient * step).sum(), rtol=1e-6, atol=1e-13)
