"""Column masks in disguise: the intervals say exactly what the function says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.tracing.functions import MASK, trace
from cuattn.tracing.recognition import columns
from cuattn.tracing.values import evaluate
from tests.tracing import expressions as ex

_SIDES = (
    "i",
    "j",
    "i - j",
    "i + j",
    "abs(i - j)",
    "i // 3",
    "j // 3",
    "doc[b, i]",
    "doc[b, j]",
    "i - first[b, i]",
    "j - first[b, j]",
    "-i",
    "2 * j - i",
    "(i - j) // 4",
    "i % 7",
    "h",
    "np.minimum(i, 9) - j",
    "np.maximum(i - j, j)",
    "np.where(j < 5, i, j)",
    "odd[j]",
    "5",
    "-3",
    "2",
    "9",
    "i * 2 - 1",
)


def random_mask(random, depth):
    if depth == 0 or random.random() < 0.3:
        return f"({random.choice(_SIDES)} {random.choice(('<', '<=', '>', '>=', '==', '!='))} {random.choice(_SIDES)})"
    if random.random() < 0.2:
        return f"((doc[b, i] == doc[b, j]) & {random_mask(random, depth - 1)})"
    template = random.choice(("({} & {})", "({} | {})", "np.logical_not({})", "({} ^ {})", "np.where({}, {}, {})"))
    return template.format(*(random_mask(random, depth - 1) for _ in range(template.count("{}"))))


def hidden(found, n):
    lts, lte, uts, ute = found
    i = np.arange(n)[:, None]
    return ((lts <= i) & (i < lte)) | ((uts <= i) & (i < ute))


@given(random=st.randoms(use_true_random=False), row=st.sampled_from([0, 3]), key=st.sampled_from([0, 2]))
def test_what_is_recognised_is_exact(random, row, key):
    text = random_mask(random, 2)
    bound = ex.traced(text, MASK)
    rows, keys = np.arange(row, ex.N_QUERIES), np.arange(key, ex.N_KEYS)
    for b in range(ex.N_BATCH):
        found = columns(bound, rows, keys, b, 1)
        if found is None:
            continue
        assert found.dtype == np.int32 and found.min() >= 0 and found.max() <= len(rows)
        variables = {"b": b, "h": 1, "i": rows[:, None].astype(np.int32), "j": keys.astype(np.int32)}
        dense = np.broadcast_to(evaluate(bound, variables), (len(rows), len(keys)))
        np.testing.assert_array_equal(hidden(found, len(rows)), ~dense, text)


FAR = np.repeat([-2_000_000_000, 2_000_000_000, 0], 10)  # whose differences leave int32
LEVELS = np.repeat([-np.inf, 3, np.inf], 10)
MANY = np.arange(30) // 4 * 4  # where the document of a row begins
DOC = np.repeat([3, 1, 4, 0], [5, 9, 1, 15])
STARTS = np.concatenate([[0], np.flatnonzero(np.diff(DOC)) + 1])[np.repeat(np.arange(4), [5, 9, 1, 15])]


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, i, j: i >= j,
        lambda b, h, i, j: (i >= j) & (i - j <= 4),
        lambda b, h, i, j: abs(j - i) <= 4,
        lambda b, h, i, j: (j < 7) | (j <= i),
        lambda b, h, i, j: (DOC[i] == DOC[j]) & (i >= j),
        lambda b, h, i, j: DOC[i] == DOC[j],
        lambda b, h, i, j: i - STARTS[i] >= j - STARTS[i],
        lambda b, h, i, j: i // 4 >= j // 4,
        lambda b, h, i, j: j < 12,
        lambda b, h, i, j: i < 12,
        lambda b, h, i, j: (j // 5 == i // 5) | (j < 2),
        lambda b, h, i, j: True,
        lambda b, h, i, j: np.sqrt(i * 2.0) < 0.3 * j,
        lambda b, h, i, j: (i - j < 5) & ((j <= i) | (DOC[i] == DOC[j])),
        lambda b, h, i, j: 3 * i - 2 * j >= 5,
        lambda b, h, i, j: j < FAR[i],
        lambda b, h, i, j: j * 0.5 < LEVELS[i],
        lambda b, h, i, j: i * i >= j,
        lambda b, h, i, j: (i - MANY[i] - (j - MANY[j]) >= 0) & (i - MANY[i] - j + MANY[j] < 3) & (MANY[i] == MANY[j]),
    ],
)
def test_masks_that_are_columns_are_recognised(function):
    bound, i = trace(function, MASK).bind(), np.arange(30)
    found = columns(bound, i, i)
    assert found is not None
    dense = np.broadcast_to(evaluate(bound, {"i": i[:, None].astype(np.int32), "j": i.astype(np.int32)}), (30, 30))
    np.testing.assert_array_equal(hidden(found, 30), ~dense)


def test_others_are_not():
    i = np.arange(64)
    for function in (
        lambda b, h, i, j: (i - j) % 3 == 0,
        lambda b, h, i, j: i % 2 == j % 2,
        lambda b, h, i, j: abs(abs(i - j) - 9) < 2,
    ):
        assert columns(trace(function, MASK).bind(), i, i) is None
    nan = np.full(64, np.nan)
    assert columns(trace(lambda b, h, i, j: nan[i] < j * 0.5, MASK).bind(), i, i) is None


def test_no_rows_or_keys():
    bound = trace(lambda b, h, i, j: i >= j, MASK).bind()
    assert columns(bound, np.arange(0), np.arange(3)).shape == (4, 3) and columns(
        bound, np.arange(3), np.arange(0)
    ).shape == (4, 0)
