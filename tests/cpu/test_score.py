"""Score functions on the CPU: values, slopes and the gradients of arrays, by tiles and by whole heads."""

import functools
import tracemalloc

import numpy as np
import pytest

import cuattn
from cuattn.cpu import call
from cuattn.cpu.pairs import with_bias
from cuattn.cpu.score import along_diagonals
from tests import oracle
from tests.conftest import Host
from tests.cpu.sizes import tiled, whole_heads
from tests.strategies import DTYPES, normal
from tests.test_scoring import SHAPE, both, check_recipe, recipes
from tests.tolerances import assert_close, assert_same
from tests.tracing.recipes import HEADS, Recipe

WAYS = {
    "whole heads": whole_heads,
    "head by head": functools.partial(whole_heads, 1),
    "tiles": functools.partial(tiled, 16, 32, 2, 1, step=1),
    "stacks": functools.partial(tiled, 32, 16, 1, 2, step=3, workers=2),
}
in_each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


@recipes
@in_each_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_recipes_hold_the_rule(recipe, way, dtype):
    with way():
        check_recipe(Host, recipe, dtype)


@recipes
def test_what_is_added_has_a_bound(recipe, monkeypatch):
    made, scores = [], call.Scores
    monkeypatch.setattr(call, "Scores", lambda *arguments: made.append(scores(*arguments)) or made[-1])
    monkeypatch.setattr(call, "with_bias", lambda problem, operands, place: (problem, operands, None))
    q = np.zeros((*SHAPE[:3], 8))
    cuattn.attention(q, q, q, score=recipe.function, score_args=recipe.args)
    added, again = (recipe.formula(np.full(SHAPE, s)) - s for s in (0.0, 1.0))
    seen = added > -np.inf
    most, is_additive = np.abs(added[seen]).max(), np.allclose(added[seen], again[seen])
    assert made[0].largest >= most if is_additive else made[0].largest == np.inf
    assert made[0].largest < 1.1 * most or recipe.name not in ("learned_alibi", "key_bias", "relative", "t5")


def test_the_rule_knows_what_weights_lose():
    """1 - tanh(18)^2 is 2e-16, and 0 in float32: no algorithm in that precision knows better."""
    function = lambda s, b, h, i, j, x: s * np.tanh(x[h] + 18)  # noqa: E731
    recipe = Recipe("saturated", function, (np.zeros(HEADS),), lambda s: s * np.tanh(18), False)
    check_recipe(Host, recipe, np.dtype(np.float32))


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


def table(s, b, h, i, j, heads, table, temper, distance, factor):
    """A function with all kinds of arguments, of which the arrays are read in all kinds of places."""
    s = s + heads[1, -2] * (i + j) / 512
    return s * np.exp(temper * 0.125) + heads[b, h] * factor + table[h, i - j + 90] + table[0, distance[j]] * i / 64


def arguments(dtype=np.float64, seed=4):
    rng = np.random.default_rng(seed)
    floats = [rng.standard_normal(shape).astype(dtype) for shape in ((2, 6), (6, 180), ())]
    return *floats, rng.integers(0, 6, 90).astype(np.int16), 0.25


OPTIONS = {
    "plain": {},
    "causal and softcap": {"is_causal": True, "softcap": 2.0},
    "window and dropout": {"window": (30, 4), "dropout_p": 0.3, "rng": cuattn.RNGState(5)},
    "boolean mask": {"mask": np.random.default_rng(0).random((6, 90, 90)) < 0.3},
    "bias": {"bias": np.where(np.random.default_rng(1).random((90, 90)) < 0.1, -np.inf, 0.5)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_combine_with_everything_in_every_way(options, dtype):
    """Groups, masks, bias, dropout: whole heads and tiles agree with the textbook, and threads change no bit."""
    q, do, k, v = arrays(6, (2, 6, 90, 16), (2, 6, 90, 8), (2, 3, 90, 16), (2, 3, 90, 8), dtype=dtype)
    options = {**options, "score": table, "score_args": arguments(dtype), "enable_gqa": True}
    if "bias" in options:
        options["bias"] = options["bias"].astype(dtype)
    score, shape = oracle.Score(table, options["score_args"], (2, 6, 90, 90)), (2, 6, 90, 90)
    i, j = np.ogrid[:90, :90]
    seen = {"is_causal": j <= i, "window": (j >= i - 30) & (j <= i + 4), "mask": options.get("mask")}
    given = {name: options.get(name) for name in ("bias", "softcap")} | {"score": score}
    given["visible"] = next((seen[name] for name in seen if name in options), None)
    given |= oracle.dropped(options.get("rng"), options.get("dropout_p", 0.0), shape)
    exact, rough = (oracle.solve(q, k, v, do, **given, dtype=low) for low in (None, dtype))
    floors = oracle.floors(exact, q, k, v, do, **given)
    before = score.before(q, k, softcap=options.get("softcap"))
    results = []
    for way in (*WAYS.values(), functools.partial(tiled, 32, 16, 1, 2, step=3, workers=1)):
        with way():
            fwd, grads = both(do, q, k, v, **options)
        results.append((*fwd[:3], *grads[:3], *grads.dscore[:3]))
        for name, actual in zip(("o", "l", "m", "dq", "dk", "dv"), results[-1], strict=False):
            assert_close(actual, getattr(exact, name), getattr(rough, name), dtype=dtype, floor=floors[name], name=name)
        assert grads.dscore[3:] == (None, None)
        for actual, e, t, floor in list(score.judged(grads.dscore, before, exact, rough, floors))[:3]:
            if actual.ndim:
                assert_close(actual, e, t, dtype=dtype, floor=floor, name="dscore")
    assert_same(results[-1], results[-2])


DISTANCES = np.random.default_rng(3).random((60, 90))
PAIRS = {  # a function, the shape of x, and whether something is left of the function; False: it stays as it is
    "heads": (lambda s, b, h, i, j, x, y: s + x[h, i, j], (4, 60, 90), None),
    "turned, with another": (lambda s, b, h, i, j, x, y: s - 0.5 * h + x[j, 2, i, b] + y[h], (95, 3, 61, 6), True),
    "all": (lambda s, b, h, i, j, x, y: y[h] * j / 90 + (s + x[-1, b, h, i, j]), (2, 6, 4, 60, 90), True),
    "captured": (lambda s, b, h, i, j, x, y: s + x[h] + DISTANCES[i, j], (4,), True),
    "shared": (lambda s, b, h, i, j, x, y: s + x[i, j], (60, 90), None),
    "beyond its end": (lambda s, b, h, i, j, x, y: s + x[h, i, j], (4, 60, 80), False),
    "twice": (lambda s, b, h, i, j, x, y: s + x[h, i, j] + np.tanh(x[h, i, j]), (4, 60, 90), False),
    "taken away again": (lambda s, b, h, i, j, x, y: s + (x[h, i, j] - x[h, i, j]), (4, 60, 90), False),
    "read elsewhere": (lambda s, b, h, i, j, x, y: s + x[h, i, j] + x[h, i, 0], (4, 60, 90), False),
    "subtracted": (lambda s, b, h, i, j, x, y: s - x[h, i, j], (4, 60, 90), False),
}


@in_each_way
@pytest.mark.parametrize(
    "origin", [None, cuattn.Origin(batch=1, head=1, row=7, key=16, heads=4)], ids=["whole", "part"]
)
@pytest.mark.parametrize(("function", "shape", "rest"), PAIRS.values(), ids=PAIRS)
def test_what_is_added_by_row_and_key_is_a_bias(function, shape, rest, origin, way, monkeypatch):
    """To the caller that is the same, whichever axes it has, what is around it, and of a part too."""
    lead, n_queries, n_keys = ((1, 2, 3), 50, 70) if origin else ((3, 2, 4), 60, 90)
    operands = arrays(8, *2 * [(*lead, n_queries, 8)], *2 * [(*lead, n_keys, 8)])
    args, taken = arrays(9, shape, (4,)), []
    options = {"score": function, "score_args": args, "origin": origin, "out_dtype": np.float64}

    def recorded(problem, *more):
        taken.append(with_bias(problem, *more))
        return taken[-1]

    with way():
        monkeypatch.setattr(call, "with_bias", recorded)
        fwd, grads = both(operands[1], operands[0], *operands[2:], **options)
        assert all((pairs is not None) == (rest is not False) for *_, pairs in taken)
        assert rest or rest is False or taken[0][0].score is None
        monkeypatch.setattr(call, "with_bias", lambda problem, operands, place: (problem, operands, None))
        others = both(operands[1], operands[0], *operands[2:], **options)
    for x, y in zip(
        (*fwd[:3], *grads[:3], *grads.dscore), (*others[0][:3], *others[1][:3], *others[1].dscore), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


@in_each_way
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_merged_parts_are_the_whole(way, dropout_p):
    """Parts at any origin, of several pieces too: global indices, gradients of arrays sum up."""
    q, do, k, v = arrays(7, *2 * [(2, 4, 96, 16)], *2 * [(2, 4, 160, 16)])
    options = {"score": table, "dropout_p": dropout_p, "rng": cuattn.RNGState(3), "is_causal": "top_left"}
    options["score_args"] = args = (*(x if i else x[:, :4] for i, x in enumerate(arguments()[:2])), *arguments()[2:])
    with way():
        fwd, grads = both(do, q, k, v, **options)
        total = [np.zeros_like(x) if x is not None else None for x in grads.dscore]
        sums = [np.zeros_like(x) for x in grads[:3]]
        for rows in ([(0, 48)], [(48, 64), (80, 96)], [(64, 80)]):
            for heads in (slice(0, 3), slice(3, 4)):
                r = np.concatenate([np.arange(*piece) for piece in rows])
                parts, calls = [], []
                for keys in ([(0, 32), (64, 112)], [(32, 64)], [(112, 160)]):
                    c = np.concatenate([np.arange(*piece) for piece in keys])
                    starts = [(np.cumsum([0, *(b - a for a, b in x)])[:-1].tolist(), x) for x in (rows, keys)]
                    runs = [tuple((at, a) for at, (a, _) in zip(*start, strict=True)) for start in starts]
                    origin = cuattn.Origin(head=heads.start, heads=4, row=runs[0], key=runs[1])
                    part = [x[:, heads][:, :, at] for x, at in ((q, r), (k, c), (v, c))]
                    parts.append(cuattn.forward(*part, origin=origin, **options))
                    calls.append((part, origin, c))
                merged = cuattn.merge(*parts)
                np.testing.assert_allclose(merged.o, fwd.o[:, heads][:, :, r], rtol=1e-11, atol=1e-12)
                given = {name: x for name, x in options.items() if name != "rng"}
                for (part, origin, c), forward in zip(calls, parts, strict=True):
                    replayed = merged._replace(rng_state=forward.rng_state)
                    found = cuattn.backward(do[:, heads][:, :, r], *part, replayed, origin=origin, **given)
                    for n, at in enumerate((r, c, c)):
                        sums[n][np.ix_(range(2), range(*heads.indices(4)), at)] += found[n]
                    for x, y in zip(total[:3], found.dscore, strict=False):
                        x += y
    for one, other in zip((*sums, *total[:3]), (*grads[:3], *grads.dscore[:3]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10)
    assert len(args) == 5


@in_each_way
def test_what_nobody_sees_leaves_nothing(way):
    """Values and slopes that are infinite or no numbers where a mask, a bias or the function itself hides."""
    q, k, v, do = arrays(8, *4 * [(1, 2, 100, 16)], dtype=np.float32)
    i, j = np.ogrid[:100, :100]

    def harsh(s, b, h, i, j, x):
        return s + np.sqrt(i - j) * x[h] + np.log(s * 0 + i - j + 1)

    x = np.array([0.5, -0.25], np.float32)
    for hidden in ({"is_causal": True}, {"mask": j <= i}, {"bias": np.where(j <= i, 0, -np.inf).astype(np.float32)}):
        with way():
            fwd, grads = both(do, q, k, v, score=harsh, score_args=(x,), **hidden)
            inside = both(do, q, k, v, score=_hiding(harsh), score_args=(x,))
        results = [(*f[:3], *g[:3], *g.dscore) for f, g in ((fwd, grads), inside)]
        for one, other in zip(*results, strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _hiding(score):
    return lambda s, b, h, i, j, x: np.where(j <= i, score(s, b, h, i, j, x), -np.inf)


def test_visible_parts_join_the_mask():
    """A choice with -inf is a mask, which costs what the mask costs and gives its bits."""
    q, k, v, do = arrays(9, *4 * [(2, 2, 90, 16)], dtype=np.float32)
    document = np.repeat([0, 1], [40, 50])

    def score(s, b, h, i, j):
        return np.where((document[i] == document[j]) & (j <= i), s, -np.inf)

    mask = cuattn.masks.causal_document([40, 50])
    for way in WAYS.values():
        with way():
            found, wanted = both(do, q, k, v, score=score), both(do, q, k, v, mask=mask)
        assert_same((*found[0][:3], *found[1][:3]), (*wanted[0][:3], *wanted[1][:3]))


def test_functions_are_read_anew():
    """Numbers and elements of arguments count in each call, captured arrays when the function is made."""
    q, k, v = arrays(10, *3 * [(2, 30, 8)])
    x = np.ones(2)
    captured = np.ones(2)

    def argument(s, b, h, i, j, x, n):
        return s * x[h] * n

    def closure(s, b, h, i, j):
        return s * captured[h]

    for factor, n in ((1.0, 1), (2.0, 1), (2.0, 3)):
        x[:] = factor
        wanted = cuattn.attention(factor * n * q, k, v)
        np.testing.assert_allclose(cuattn.attention(q, k, v, score=argument, score_args=(x, n)), wanted, rtol=1e-10)
        wanted = cuattn.attention(q, k, v)
        captured[:] = factor
        np.testing.assert_allclose(cuattn.attention(q, k, v, score=closure), wanted, rtol=1e-10)


@pytest.mark.parametrize(
    ("keys", "rows"), [(240, 64), (1, 1), (1, 9), (9, 1), (4099, 1), (997, 16), (128, 2), (50, 70)]
)
def test_sums_along_diagonals(keys, rows):
    """Of any shape, in memory of a few times their own."""
    x = np.random.default_rng(keys).standard_normal((2, keys, rows))
    tracemalloc.start()
    sums, differences = along_diagonals(x)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = np.zeros((2, keys + rows - 1))
    np.add.at(found, (slice(None), np.clip(differences + keys - 1, 0, None)), sums)
    wanted = np.array([[np.trace(each, n) for n in range(1 - keys, rows)] for each in x])
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-12)
    assert most < 8 * x.nbytes + 100_000


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_empty_problems_have_gradients_of_zeros(shape):
    q, k = (np.zeros((2, n, 8)) for n in shape)
    x = np.ones((2, 0)), np.ones(3), np.arange(3)
    options = {"score": lambda s, b, h, i, j, x, y, z: s + x[h, j] + y[z[h]], "score_args": x}
    _, grads = both(np.zeros_like(q), q, k, k, **options)
    assert not grads.dscore[0].any() and grads.dscore[0].shape == (2, 0) and grads.dscore[2] is None
    np.testing.assert_array_equal(grads.dscore[1], np.zeros(3))


def test_what_is_not_read_has_a_gradient_of_zeros():
    q, k, v, do = arrays(11, *4 * [(2, 20, 8)])
    _, grads = both(do, q, k, v, score=lambda s, b, h, i, j, x, y: s, score_args=(np.ones(3, np.float32), 2))
    zeros, nothing = grads.dscore
    assert zeros.dtype == np.float32 and not zeros.any() and nothing is None
    np.testing.assert_array_equal(grads.dq, both(do, q, k, v)[1].dq)
