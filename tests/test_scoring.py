"""Score functions: what is refused, and the guide's recipes on NumPy and, on a GPU, on CuPy arrays."""

import copy
import pickle

import numpy as np
import pytest

import cuattn
from cuattn.errors import ArgumentError, DtypeError, UnsupportedError
from tests import oracle
from tests.strategies import BFLOAT16, normal
from tests.test_dispatch import gpu_array
from tests.tolerances import assert_close
from tests.tracing.recipes import BATCH, HEADS, SCORES, N

SHAPE = (BATCH, HEADS, N, N)
recipes = pytest.mark.parametrize("recipe", SCORES, ids=lambda recipe: recipe.name)
Q = np.ones((2, 4, 8, 16), np.float32)
SLOPES = np.ones(4, np.float32)


def both(do, q, k, v, **options):
    """Return a forward, its gradients, and those of the score function's arguments."""
    fwd = cuattn.forward(q, k, v, **options)
    options.pop("rng", None)
    options.pop("out_dtype", None)
    grads = cuattn.backward(do, q, k, v, fwd, **options)
    return fwd, grads


def check_recipe(xp, recipe, dtype):
    """Hold a recipe's forward and gradients, those of its arrays too, to the rule."""
    rng = np.random.default_rng(1)
    q, k, v, do = (normal(rng, (*SHAPE[:3], 16), dtype) for _ in range(4))
    score = oracle.Score(recipe.function, recipe.args, SHAPE)
    s = score.before(q, k)
    np.testing.assert_allclose(score(s)[0], np.broadcast_to(recipe.formula(s), SHAPE), rtol=1e-10, atol=1e-10)
    given = {"score": recipe.function, "score_args": [*map(xp.put, recipe.args)]}
    fwd, grads = both(*map(xp.put, (do, q, k, v)), **given)
    exact, rough = (oracle.solve(q, k, v, do, score=score, dtype=low) for low in (None, dtype))
    halves = xp.name == "cupy" and dtype == np.float32
    floors = oracle.floors(exact, q, k, v, do, score=score, halves=halves)
    for name, actual in zip(("o", "l", "m", "dq", "dk", "dv"), (*fwd[:3], *grads[:3]), strict=True):
        e, t = getattr(exact, name), getattr(rough, name)
        assert_close(xp.get(actual), e, t, dtype=dtype, floor=floors[name], name=name)
    judged = score.judged(grads.dscore, s, exact, rough, floors)
    for array, (actual, e, t, floor) in zip(recipe.args, judged, strict=True):
        assert (actual is None) == (array.dtype.kind != "f")
        if actual is not None:
            assert actual.dtype == array.dtype
            assert_close(xp.get(actual), e, t, dtype=dtype, floor=floor, name="dscore")


def alibi(s, b, h, i, j, slope):
    return s + slope[h] * (j - i)


@pytest.mark.parametrize(
    ("score", "args", "error", "message"),
    [
        (5, (), DtypeError, r"score is 5; expected a function score\(s, b, h, i, j, \*score_args\)"),
        (None, (1,), ArgumentError, "score_args has 1 items but score is None"),
        (None, SLOPES, DtypeError, "score_args is a numpy.ndarray; expected a tuple"),
        (alibi, SLOPES, DtypeError, "score_args is a numpy.ndarray; expected a tuple"),
        (alibi, ([1, 2],), ArgumentError, r"score_args\[0\] = \[1, 2\]: expected an array, or a number"),
        (alibi, (2**64,), ArgumentError, r"score_args\[0\] = 18446744073709551616: expected an array, or a number"),
        (alibi, (SLOPES.astype(complex),), ArgumentError, r"score_args\[0\] has dtype complex128"),
        (alibi, (np.ma.ones(4),), DtypeError, r"score_args\[0\] is a numpy\.ma\.MaskedArray"),
        (alibi, (), ArgumentError, r"test_scoring\.py:\d+: TypeError: .* 'slope', while the function was traced"),
        (
            lambda s, b, h, i, j: s if i < j else 0,
            (),
            ArgumentError,
            r"test_scoring\.py:\d+: a branch needs .*np\.where",
        ),
    ],
)
def test_bad_functions_and_arguments_are_refused(score, args, error, message):
    for _ in range(2):
        with pytest.raises(error, match=message):
            cuattn.attention(Q, Q, Q, score=score, score_args=args)


def test_tensors_that_require_grad_are_refused():
    torch = pytest.importorskip("torch")
    slope, q = torch.ones(4, requires_grad=True), torch.ones(2, 4, 8, 16)
    for score, args, error in (
        (alibi, (slope,), UnsupportedError),
        (lambda s, b, h, i, j, unread: s, (slope,), UnsupportedError),
        (lambda s, b, h, i, j: s * slope[h], (), ArgumentError),
    ):
        with pytest.raises(error, match="grad"):
            cuattn.attention(q, q, q, score=score, score_args=args)


def test_arrays_lie_where_q_does():
    device = gpu_array((4,), np.float32)
    with pytest.raises(DtypeError, match=r"score_args\[0\] is a cupy.* on CUDA device 0, but q is"):
        cuattn.attention(Q, Q, Q, score=alibi, score_args=(device,))
    with pytest.raises(DtypeError, match=r"score_args\[0\] is a numpy.* on the CPU, but q is"):
        cuattn.attention(*3 * [gpu_array(Q.shape)], score=alibi, score_args=(SLOPES,))


def test_gradients_are_four_and_have_those_of_the_score_function():
    made = cuattn.Gradients(1, 2, 3, 4, (5, None))
    assert tuple(made) == (1, 2, 3, 4) and cuattn.Gradients(1, 2, 3) == (1, 2, 3, None)
    for same in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made._replace(dq=1)):
        assert same == made and same.dscore == (5, None)
    assert made._replace(dscore=()).dscore == cuattn.Gradients._make([1, 2, 3, 4]).dscore == ()


@recipes
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
def test_recipes(xp, recipe, dtype):
    check_recipe(xp, recipe, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_come_back_as_tensors(dtype):
    torch = pytest.importorskip("torch")
    q, k, v, do = torch.randn(4, 2, 4, 8, 16, generator=torch.manual_seed(0)).to(getattr(torch, dtype)).unbind()
    slope, doc = torch.rand(4).to(q.dtype), torch.arange(8, dtype=torch.int32) // 3
    captured = torch.ones(4, dtype=q.dtype)

    def score(s, b, h, i, j, slope, doc):
        return np.where(doc[i] == doc[j], s + slope[h] * captured[h] * (j - i), -np.inf)

    for _ in range(2):
        fwd, grads = both(do, q, k, v, score=score, score_args=(slope, doc))
    gradient, nothing = grads.dscore
    assert nothing is None and type(gradient) is torch.Tensor and gradient.dtype == q.dtype and gradient.shape == (4,)
    i, j = np.ogrid[:8, :8]
    bias = slope.double()[:, None, None] * torch.from_numpy(j - i)
    bias = torch.where(doc[:, None] == doc, bias, -torch.inf)
    wanted = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=bias)
    torch.testing.assert_close(fwd.o.double(), wanted, rtol=2e-2, atol=2e-2)
