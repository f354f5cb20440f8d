"""Parts of a problem know their place: causality, windows and dropout of a part are the whole's."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.errors import ArgumentError, DtypeError
from cuattn.problem import FORWARD, Options, check, pieces, place_of
from tests import oracle
from tests.oracle import visible_band
from tests.strategies import DTYPES, Case
from tests.tolerances import assert_close

UNIT = 16


@st.composite
def parts(draw, length, unit=UNIT):
    """Draw what a part takes of a whole axis: ascending indices, of whole units, at least one."""
    count = -(-length // unit)
    units = draw(st.lists(st.booleans(), min_size=count, max_size=count).filter(any))
    return np.flatnonzero(np.repeat(units, unit)[:length])


def start(index):
    """Return the runs of a part, of one alone where it begins."""
    steps = np.flatnonzero(np.diff(index, prepend=-2) != 1)
    runs = tuple((int(local), int(index[local])) for local in steps)
    return runs if len(runs) > 1 else runs[0][1]


@st.composite
def problems(draw):
    """Draw a whole problem's lengths and options, and which rows and keys a part takes."""
    n_queries, n_keys = draw(st.integers(1, 90)), draw(st.integers(1, 90))
    dropped = draw(st.booleans())
    unit = UNIT if dropped else draw(st.sampled_from([1, 7, UNIT]))
    options = {"dropout_p": 0.3} if dropped else {}
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    if draw(st.booleans()):
        options["is_causal"] = align
    if draw(st.booleans()):
        sides = st.none() | st.integers(0, 40)
        options["window"] = (draw(sides), draw(sides), align)
    return n_queries, n_keys, options, draw(parts(n_queries, unit)), draw(parts(n_keys, unit))


def arrays(n_queries, n_keys, dtype, heads=2, d=8):
    numbers = np.random.default_rng(n_queries * 1000 + n_keys)
    q, do, k, v = (numbers.standard_normal((heads, n, d)).astype(dtype) for n in 2 * [n_queries] + 2 * [n_keys])
    return q, k, v, do


def solve(q, k, v, do, options, seed):
    """Return the whole problem's exact results, the textbook's and the floors of the rule."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    left, right, align = options.get("window", (None, None, options.get("is_causal")))
    if "is_causal" in options:
        right = 0 if right is None else min(right, 0)
    visible = visible_band(n_queries, n_keys, left, right, n_keys - n_queries if align == "bottom_right" else 0)
    dense = Case(q, k, v, do, visible, {**options, "rng": seed}).reference()
    exact = oracle.solve(q, k, v, do, **dense)
    return exact, oracle.solve(q, k, v, do, **dense, dtype=q.dtype), oracle.floors(exact, q, k, v, do, **dense)


def assert_is_part(actual, whole, name, index, dtype):
    """Assert that a result is the part `index` of a whole problem's, by the rule for the whole."""
    exact, textbook = (getattr(found, name) for found in whole[:2])
    floor = oracle.Floor(*(np.broadcast_to(x, exact.shape)[index] for x in whole[2][name]))
    assert_close(actual, exact[index], textbook[index], dtype=dtype, floor=floor, name=name)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(problem=problems(), head=st.integers(0, 1))
def test_rows_of_the_whole(xp, dtype, problem, head):
    """Any rows and one head of a problem, on their own, are the whole's."""
    n_queries, n_keys, options, index, _ = problem
    q, k, v, do = arrays(n_queries, n_keys, dtype)
    whole = solve(q, k, v, do, options, 5)
    origin = cuattn.Origin(head=head, heads=2, n_queries=n_queries, n_keys=n_keys, row=start(index))
    part = [x[head : head + 1, index] if x is q else x[head : head + 1] for x in (q, k, v)]
    fwd = cuattn.forward(*map(xp.put, part), origin=origin, rng=5, **options)
    for name, actual in zip("olm", fwd[:3], strict=False):
        assert_is_part(xp.get(actual), whole, name, np.index_exp[head : head + 1, index], dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(problem=problems())
def test_merged_keys_and_their_gradients(xp, dtype, problem):
    """Two parts of the keys: merged they are the whole, and their gradients are the whole's."""
    n_queries, n_keys, options, _, index = problem
    q, k, v, do = arrays(n_queries, n_keys, dtype)
    stat = np.float64 if dtype == np.float64 else np.float32
    whole = solve(q, k, v, do, options, 5)
    rest = np.setdiff1d(np.arange(n_keys), index)
    shards = [own for own in (index, rest) if own.size]
    origins = [cuattn.Origin(n_queries=n_queries, n_keys=n_keys, key=start(own)) for own in shards]
    put = [tuple(map(xp.put, (k[:, own], v[:, own]))) for own in shards]
    made = [
        cuattn.forward(xp.put(q), *kv, rng=5, out_dtype=stat, origin=origin, **options)
        for kv, origin in zip(put, origins, strict=True)
    ]
    merged = cuattn.merge(*made)
    for name, actual in zip("olm", merged[:3], strict=False):
        assert_is_part(xp.get(actual), whole, name, ..., dtype)
    grads = [
        cuattn.backward(xp.put(do), xp.put(q), *kv, merged, origin=origin, out_dtype=stat, **options)
        for kv, origin in zip(put, origins, strict=True)
    ]
    assert all(xp.get(x).dtype == stat for grad in grads for x in grad[:3])
    assert_is_part(sum(xp.get(grad.dq) for grad in grads), whole, "dq", ..., dtype)
    for own, grad in zip(shards, grads, strict=True):
        for name in ("dk", "dv"):
            assert_is_part(xp.get(getattr(grad, name)), whole, name, np.index_exp[:, own], dtype)


def test_a_shards_blocks_take_no_memory_of_its_length():
    n = 1 << 22
    x, origin = np.broadcast_to(np.float32(0), (n, 1)), cuattn.Origin(row=((0, 0), (32, 64)))
    problem = check(FORWARD, dict.fromkeys("qkv", x), (), Options(dropout_p=0.5), origin)
    tracemalloc.start()
    blocks = place_of(problem, origin).row_blocks
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 16e6 and len(blocks) == n // 16 and blocks[:4].tolist() == [0, 16, 64, 80]


@given(st.integers(1, 80), st.data())
def test_pieces_cover_the_part(length, data):
    index = data.draw(parts(length, unit=3))
    assert np.array_equal(
        np.concatenate([np.arange(*piece) for piece in pieces("row", start(index), len(index))]), index
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"row": -1}, ArgumentError, "origin.row is -1"),
        ({"row": 1.5}, DtypeError, "origin.row is 1.5"),
        ({"batch": True}, DtypeError, "origin.batch is True"),
        ({"key": 2**31}, ArgumentError, "origin.key is 2147483648"),
        ({"head": 1}, ArgumentError, "origin.head is 1 without origin.heads"),
        ({"row": ()}, ArgumentError, r"origin.row is \(\); expected an integer, or runs"),
        ({"row": ((1, 0),)}, ArgumentError, "first run at local index 0"),
        ({"row": ((0, 8), (4, 9))}, ArgumentError, "ascend and do not overlap"),
        ({"key": ((0, 8), (0, 90))}, ArgumentError, "ascend and do not overlap"),
    ],
)
def test_bad_origins(fields, error, message):
    with pytest.raises(error, match=message):
        cuattn.Origin(**fields)


@pytest.mark.parametrize(
    ("origin", "options", "error", "message"),
    [
        ((0, 16), {}, DtypeError, r"origin is \(0, 16\); expected a cuattn.Origin"),
        (cuattn.Origin(), {"is_causal": "bottom_right"}, ArgumentError, "expected the lengths of the whole"),
        (cuattn.Origin(row=8), {"dropout_p": 0.5}, ArgumentError, "origin.row is 8; expected multiples of 16"),
        (cuattn.Origin(key=((0, 0), (24, 40))), {"dropout_p": 0.5}, ArgumentError, "expected multiples of 16"),
        (cuattn.Origin(head=7, heads=8), {}, ArgumentError, "origin.head is 7 with 2 heads"),
        (cuattn.Origin(row=2**31 - 16), {}, ArgumentError, "which ends at 2147483680"),
        (cuattn.Origin(key=16, n_keys=40), {}, ArgumentError, "origin.key is 16, which ends at 64"),
        (cuattn.Origin(row=((0, 0), (49, 60))), {}, ArgumentError, "local starts of at most 48"),
    ],
)
def test_origins_that_do_not_fit(origin, options, error, message):
    x = np.ones((2, 48, 4), np.float32)
    for call in (cuattn.attention, cuattn.plan):
        with pytest.raises(error, match=message):
            call(x, x, x, origin=origin, **options)


def test_true_means_top_left_in_a_part():
    x = np.random.default_rng(0).standard_normal((40, 8), np.float32)
    part = cuattn.attention(x[30:], x, x, is_causal=True, origin=cuattn.Origin(row=30))
    assert_close(part, cuattn.attention(*[x.astype(np.float64)] * 3, is_causal=True)[30:], part)


def test_parts_at_many_places_twice():
    """Places are remembered, some of them."""
    x = np.random.default_rng(0).standard_normal((2, 64, 8), np.float32)
    whole = cuattn.attention(x, x, x, window=(9, 2))
    for _ in range(2):
        for row in range(0, 60, 2):
            part = cuattn.attention(x[:, row : row + 4], x, x, window=(9, 2), origin=cuattn.Origin(row=row))
            np.testing.assert_allclose(part, whole[:, row : row + 4], atol=1e-6)
