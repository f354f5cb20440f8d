"""Masks of functions: what they show is what the function says, of the whole and of parts, alone and in calls."""

import functools
import math
import operator
import pickle
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

import cuattn
from cuattn import Origin, masks
from cuattn.cuda.constants import halves
from cuattn.dispatch import function_mask
from cuattn.errors import ArgumentError, DtypeError, MaskError, ShapeError, UnsupportedError
from cuattn.masks import ColumnMask, from_function
from cuattn.problem import FORWARD, Options, check
from cuattn.tracing import MASK, Frozen, Traced, trace
from tests.masks.predicates import assert_sound
from tests.problem.test_origin import parts, start
from tests.tolerances import assert_same
from tests.tracing import expressions as ex
from tests.tracing import recipes

SHAPE = recipes.BATCH, recipes.HEADS, recipes.N, recipes.N
DOCUMENTS = np.repeat([3, 1, 2], [10, 30, 24])
RECIPES = pytest.mark.parametrize("recipe", recipes.MASKS, ids=lambda recipe: recipe.name)


def dilated(b, h, i, j):
    return (j <= i) & ((i - j) % (h + 2) == 0)


def arrays(seed, *shapes, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def both(q, k, v, do, **options):
    """Return the results of forward and backward."""
    fwd = cuattn.forward(q, k, v, **options)
    options.pop("rng", None)
    return [*fwd[:3], *cuattn.backward(do, q, k, v, fwd, **options)[:3]]


@given(st.randoms(use_true_random=False))
def test_what_is_shown_is_what_the_function_says(random):
    text = ex.condition(random, 3)
    function, (batch, heads, *lengths) = ex.compiled(text, MASK), ex.LIMITS
    wanted = np.broadcast_to(ex.plain(text, MASK, **ex.grid()), ex.LIMITS)
    mask = from_function(function, *lengths, batch=batch, heads=heads)
    assert_array_equal(np.broadcast_to(mask.dense(), ex.LIMITS), wanted, text)


SECONDS = 1.7e9 + np.arange(64.0)  # since 1970: all one number in float32


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
@pytest.mark.parametrize(
    ("visible", "kind"),
    [
        (lambda b, h, i, j: abs(SECONDS[i] - SECONDS[j]) * 0.1 < 1.1, "function"),
        (lambda b, h, i, j: (j * 0.1 != 3.3) & (SECONDS[j] < 1.7e9 + 50), "column"),
    ],
)
def test_numbers_are_float64_in_calls_of_any_dtype(xp, visible, kind, dtype):
    wanted = np.broadcast_to(visible(0, 0, *np.ogrid[:64, :64]), (64, 64))
    mask, x = from_function(visible, 64), xp.put(np.zeros((2, 64, 16), dtype))
    assert mask.kind == kind
    assert_array_equal(mask.dense(), wanted)
    assert_sound(mask.tile_states(8, 8), wanted, 8, 8)
    for given_as in (mask, visible):
        assert_array_equal(xp.get(cuattn.forward(x, x, x, mask=given_as).l), 2 * [wanted.sum(1)])


def test_to_device_takes_the_current_one(monkeypatch):
    taken = []
    device = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(id=2)))
    monkeypatch.setattr("cuattn.masks.function.load_cupy", lambda name: device)
    monkeypatch.setattr("cuattn.masks.function.upload", lambda array, number: taken.append(number))
    mask = from_function(lambda b, h, i, j: (i - j) % 3 == 0, 8)
    assert mask.to_device() is mask.to_device(2) is mask
    assert taken == [2]


N = recipes.N


@pytest.mark.parametrize(
    ("function", "same"),
    [
        (lambda b, h, i, j: True, masks.full(N)),
        (lambda b, h, i, j: j <= i, masks.causal(N)),
        (lambda b, h, i, j: (j <= i) & (i - j < 9), masks.sliding_window(N, 9)),
        (lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j], masks.document([10, 30, 24])),
        (lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (j <= i), masks.causal_document([10, 30, 24])),
        (lambda b, h, i, j: (j <= i) | (j < 20), masks.prefix_lm_causal(N, 20)),
    ],
)
def test_columns_are_recognised(function, same):
    mask = from_function(function, N)
    assert isinstance(mask, ColumnMask) and mask.leading == () and mask.reach == same.reach
    assert_array_equal(mask.dense(), same.dense())
    assert_array_equal(mask.tile_states(8, 8), same.tile_states(8, 8))


@pytest.mark.parametrize(
    ("function", "leading"),
    [
        (lambda b, h, i, j: i % 3 == j % 5, ()),
        (lambda b, h, i, j: j <= i, ()),
        (dilated, (4,)),
        (lambda b, h, i, j: i - j > h, (4,)),
        (lambda b, h, i, j: (i + b) % 3 == j % 5, (2, 3, 1)),
        (lambda b, h, i, j: (i + b) % 3 == j % 5 + h, (2, 3, 4)),
    ],
)
def test_leading_axes_are_those_that_matter(function, leading):
    mask = from_function(function, 8, 9, batch=(2, 3), heads=4)
    assert mask.leading == leading
    wanted = np.broadcast_to(function(*np.ogrid[:6, :4, :8, :9]), (6, 4, 8, 9)).reshape(2, 3, 4, 8, 9)
    assert_array_equal(np.broadcast_to(mask.dense(), wanted.shape), wanted)


def test_arguments_are_snapshots():
    ids, window = DOCUMENTS.copy(), np.int32(3)
    mask = from_function(lambda b, h, i, j, ids, w: (ids[i] == ids[j]) & (abs(i - j) % 7 < w), N, args=(ids, window))
    wanted, captured = mask.dense(), from_function(lambda b, h, i, j: ids[i] == ids[j], N)
    ids[:] = 0
    assert_array_equal(mask.dense(), wanted)
    assert_array_equal(captured.dense(), DOCUMENTS[:, None] == DOCUMENTS)
    assert ids.flags.writeable and not mask.dense().all()


@given(st.data())
def test_parts_of_parts_see_global_indices(data):
    mask = from_function(dilated, 40, 30, heads=2)
    dense = mask.dense()
    for _ in range(2):
        index = data.draw(parts(mask.n_queries, unit=3))
        runs = [(x[0], x[-1] + 1) for x in np.split(index, np.flatnonzero(np.diff(index) > 1) + 1)]
        mask, dense = mask.restrict(runs, slice(3, 25)), dense[:, index, 3:25]
        assert_array_equal(mask.dense(), dense)
        assert_sound(mask.tile_states(5, 4), dense, 5, 4)


def test_algebra():
    mask, window, array = from_function(dilated, N, heads=2), masks.sliding_window(N, 12), np.eye(N, dtype=bool)
    for other in (window, array, masks.BlockMask(np.eye(8, dtype=bool), 8, 8), from_function(dilated, N, heads=2)):
        seen = other if other is array else other.dense()
        assert_array_equal((mask & other).dense(), mask.dense() & seen)
        assert_array_equal((other & mask).dense(), mask.dense() & seen)
        assert_sound((mask & other).tile_states(8, 8), mask.dense() & seen, 8, 8)
    assert pickle.loads(pickle.dumps(mask & window)) == mask & window


def test_equal_masks_compute_the_same():
    def window(width):
        return lambda b, h, i, j: (i - j) % 7 < width

    ids = from_function(lambda b, h, i, j: DOCUMENTS[i] * j % 7 < 3, N)
    again = DOCUMENTS.copy()
    assert from_function(window(3), N) == from_function(window(3), N) != from_function(window(4), N)
    assert from_function(window(3), N) != from_function(window(3), N, N + 1)
    assert ids == from_function(lambda b, h, x, y: again[x] * y % 7 < 3, N)
    again = again[::-1]
    assert ids != from_function(lambda b, h, i, j: again[i] * j % 7 < 3, N)
    assert hash(from_function(window(3), N)) == hash(from_function(window(3), N))
    part = pickle.loads(pickle.dumps(ids.restrict(slice(5, 9))))
    assert part == ids.restrict(slice(5, 9)) and part.n_queries == 4
    assert repr(ids).startswith(f"<FunctionMask {N} queries x {N} keys: less(") and "\n" not in repr(ids)


def test_deep_functions_pickle():
    def visible(b, h, i, j):
        return functools.reduce(operator.or_, [(i * x) % 7 == j % 5 for x in range(1500)])

    mask = from_function(visible, 16)
    assert pickle.loads(pickle.dumps(mask)) == mask


def test_arrays_on_a_gpu_are_no_constants():
    traced = Traced(trace(dilated, MASK).root, (object(),), (), ())
    assert not isinstance(traced.captured, Frozen) and traced.captured is traced.captured


def test_one_way_to_make_them():
    with pytest.raises(MaskError, match="from_function"):
        masks.FunctionMask()


def test_states_are_kept():
    mask = from_function(dilated, N, heads=2)
    assert mask.states((1,), 8, 8, 0, 4) is mask.states((1,), 8, 8, 0, 4)
    with pytest.raises(ValueError, match="read-only"):
        mask.states((1,), 8, 8, 0, 4)[:] = 2


def test_memory_is_no_matrix():
    n = 1 << 15
    mask = from_function(lambda b, h, i, j: (abs(i // 256 - j // 256) <= 1) & ((i + j) % 3 > 0), n)
    tracemalloc.start()
    states, hidden = mask.tile_states(128, 128), mask.hidden((), slice(0, 128), slice(0, n))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 2 * hidden.nbytes + 12e6 and (states > 0).sum() < 1600


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (lambda b, h, i, j: i - j, {}, ArgumentError, r"test_function.py:\d+: the function returns a number: expected"),
        (dilated, {}, MaskError, "heads = None: expected a length, as the function depends on h"),
        (lambda b, h, i, j: i % 3 == b, {}, MaskError, "batch = None: expected a length, as the function depends on b"),
        (dilated, {"heads": -1}, MaskError, "heads = -1"),
        (dilated, {"heads": 2, "n_queries": -1}, MaskError, "n_queries = -1"),
        (dilated, {"heads": 2, "n_keys": 2.5}, DtypeError, "n_keys = 2.5"),
        (dilated, {"heads": 2, "batch": (2, -3)}, MaskError, "batch = -3"),
        (lambda b, h, i, j, x: i < x, {"args": ("x",)}, ArgumentError, r"args\[0\] = 'x'"),
    ],
)
def test_bad_functions(function, options, error, message):
    with pytest.raises(error, match=message):
        from_function(function, **{"n_queries": 8, **options})


def test_bad_functions_in_calls():
    x = np.ones((2, 8, 4), np.float32)
    with pytest.raises(ArgumentError, match=r"test_function.py:\d+: the function returns a number"):
        cuattn.attention(x, x, x, mask=lambda b, h, i, j: i)
    with pytest.raises(ShapeError, match="heads"):
        cuattn.attention(x, x[:1].repeat(3, 0), x, mask=dilated)
    with pytest.raises(DtypeError, match="enable_gqa"):
        cuattn.attention(x, x, x, mask=dilated, enable_gqa=[1])
    with pytest.raises(DtypeError, match="q is a list"):
        cuattn.attention([1.0], x, x, mask=dilated)
    for axis in ("row", "key"):
        with pytest.raises(ArgumentError, match=f"origin.{axis} is .*local starts of at most 8"):
            cuattn.attention(x, x, x, mask=dilated, origin=Origin(**{axis: ((0, 0), (9, 60))}))
        with pytest.raises(ArgumentError, match="which ends at"):
            cuattn.attention(x, x, x, mask=dilated, origin=Origin(**{axis: 2**31 - 4}))


def test_two_functions_are_one():
    near, far = (from_function(lambda b, h, i, j, n=n: abs(i - j) % n < DOCUMENTS[i] - h, 64, heads=2) for n in (3, 5))
    both = near & far & masks.causal(64)
    assert [part.kind for part in both.parts] == ["function", "column"]
    assert_array_equal(both.dense(), near.dense() & far.dense() & masks.causal(64).dense())
    plain = from_function(lambda b, h, i, j: (i + j) % 2 == 0, 64)
    assert_array_equal((plain & near).dense(), plain.dense() & near.dense())


def test_a_gpu_takes_one():
    mask, x = from_function(dilated, 8, heads=2), np.ones((2, 8, 4), np.float32)
    with pytest.raises(UnsupportedError, match="mask holds 2 function masks; expected at most 1"):
        halves(check(FORWARD, {"q": x, "k": x, "v": x}, (mask, mask), Options()))
    source, fields = mask.source(), mask.fields
    assert (source.leading, source.strides, source.arrays) == ((2,), (1,), 0) and fields["matrices.heads"] == 2
    assert "namespace traced::mask" in mask.generated["visible"].text
    assert "visible_in" in mask.generated["tiles"].text


# In calls.


@RECIPES
def test_recipes_in_calls(recipe):
    q, k, v, do = arrays(1, *[(*SHAPE[:-1], 8)] * 4)
    wanted = both(q, k, v, do, mask=np.broadcast_to(recipe.formula(), SHAPE))
    assert_same(both(q, k, v, do, mask=recipe.function), wanted)
    mask = from_function(recipe.function, recipes.N, batch=recipes.BATCH, heads=recipes.HEADS)
    assert isinstance(mask, ColumnMask) or not recipe.columns
    assert_same(both(q, k, v, do, mask=mask), wanted)


def by_batch(b, h, i, j):
    return (i + j + b) % 3 > 0


@pytest.mark.parametrize("function", [dilated, by_batch, lambda b, h, i, j: (i * j + b) % 5 != h])
@pytest.mark.parametrize(
    ("q", "k", "options"),
    [
        ((300, 8), (333, 8), {}),
        ((2, 70, 8), (2, 45, 8), {"bias": 1}),
        ((2, 2, 4, 30, 8), (2, 30, 8), {"enable_gqa": True}),
        ((3, 4, 600, 8), (3, 2, 520, 8), {"enable_gqa": True, "is_causal": "bottom_right"}),
        ((2, 2, 160, 8), (2, 2, 160, 8), {"dropout_p": 0.3, "rng": 5, "window": (40, 9)}),
    ],
)
def test_calls_equal_those_of_the_matrix(function, q, k, options):
    batch, heads = math.prod(q[:-3]), math.prod(q[-3:-2])
    dense = function(*np.ogrid[:batch, :heads, : q[-2], : k[-2]])
    dense = dense.reshape(*(q[:-3] if batch > 1 < len(dense) else ()), *dense.shape[1 + (len(q) == 2) :])
    q, k, v, do = arrays(2, q, k, k, q)
    options = {**options, "bias": np.linspace(-1, 1, k.shape[-2], dtype=np.float32)} if "bias" in options else options
    assert_same(both(q, k, v, do, **options, mask=function), both(q, k, v, do, **options, mask=dense))
    plan = cuattn.plan(q, k, v, mask=function, enable_gqa="enable_gqa" in options)
    assert plan.kernel == "cpu"


@given(st.data())
def test_shards_equal_the_whole(data):
    """A function sees global rows, keys, batches and heads; a mask object is the part's own."""
    n, d = 48, 4
    function = data.draw(st.sampled_from((dilated, by_batch, lambda b, h, i, j: (j <= i) & (i - j < 9 + h))))
    q, k, v = arrays(3, *[(3, 2, n, d)] * 3)
    rows, keys = data.draw(parts(n, unit=3)), data.draw(parts(n, unit=3))
    b, h = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 1))
    dense = np.broadcast_to(function(*np.ogrid[:3, :2, :n, :n]), (3, 2, n, n))[b:, h:, rows[:, None], keys]
    origin = Origin(batch=b, head=h, heads=2, row=start(rows), key=start(keys))
    part = q[b:, h:, rows], k[b:, h:, keys], v[b:, h:, keys]
    wanted = both(*part, part[0], mask=dense)
    assert_same(both(*part, part[0], mask=function, origin=origin), wanted)
    own = from_function(lambda b, h, i, j: dense[b, h, i, j], len(rows), len(keys), batch=3 - b, heads=2 - h)
    assert_same(both(*part, part[0], mask=own, origin=origin), wanted)


def test_functions_on_a_gpu(xp):
    """Recognised ones run as their constructors do; arrays on the device are read back once, or in every call."""
    x, ids = xp.put(np.linspace(-1, 1, 2 * N * 8, dtype=np.float32).reshape(2, N, 8)), xp.put(DOCUMENTS)

    def same_document(b, h, i, j, ids):
        return (ids[i] == ids[j]) & (j <= i)

    wanted = xp.get(cuattn.attention(x, x, x, mask=masks.causal_document([10, 30, 24])))
    for mask in (
        from_function(same_document, N, args=(ids,)),
        from_function(lambda b, h, i, j: same_document(b, h, i, j, ids), N),
        lambda b, h, i, j: same_document(b, h, i, j, DOCUMENTS),
    ):
        for _ in range(2):
            assert_array_equal(xp.get(cuattn.attention(x, x, x, mask=mask)), wanted)
    live = cuattn.attention(x, x, x, mask=lambda b, h, i, j: same_document(b, h, i, j, ids))
    assert_array_equal(xp.get(live), wanted)


def test_a_function_is_one_mask():
    x, table = np.ones((2, 8, 4), np.float32), np.arange(9)

    def visible(b, h, i, j):
        return (table[i] * table[j]) % 5 < 3 + h

    def made():
        return function_mask.cache_info().misses

    before = made()
    first = cuattn.attention(x, x, x, mask=visible)
    assert_array_equal(cuattn.attention(x, x, x, mask=visible), first)
    cuattn.attention(x, x, x, mask=lambda b, h, i, j: (table[i] * table[j]) % 5 < 3 + h)
    assert made() == before + 1
    table = np.arange(9)[::-1]
    cuattn.attention(x, x, x, mask=visible)
    assert made() == before + 2
    cuattn.attention(x, x, x, mask=visible, origin=Origin(row=1))
    cuattn.attention(x[:1], x[:1], x[:1], mask=visible)
    assert made() == before + 4
