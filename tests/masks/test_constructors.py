"""Each constructor equals its predicate, in O(N)."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from cuattn import masks
from cuattn.errors import DtypeError, MaskError
from tests import oracle
from tests.masks import predicates
from tests.masks.strategies import calls


@given(st.integers(0, 24).flatmap(lambda n: st.tuples(st.just(n), calls(n))))
def test_constructor_is_its_predicate(drawn):
    n, (name, arguments) = drawn
    mask = getattr(masks, name)(*arguments)
    assert (mask.n_queries, mask.n_keys, mask.leading, mask.on_device) == (n, n, (), False)
    if name == "random_eviction":
        return
    expected = getattr(predicates, name)(*np.ogrid[:n, :n], *arguments)
    assert_array_equal(mask.dense(), np.broadcast_to(expected, (n, n)))


@given(st.integers(0, 12), st.integers(0, 12))
def test_rectangles(n_queries, n_keys):
    assert masks.full(n_queries, n_keys).dense().all()
    for align, offset in (("bottom_right", n_keys - n_queries), ("top_left", 0)):
        expected = oracle.visible_band(n_queries, n_keys, None, 0, offset)
        assert_array_equal(masks.causal(n_queries, n_keys, align).dense(), expected)


@given(st.integers(0, 12), st.integers(0, 14), st.integers(0, 2**64))
def test_random_eviction_evicts_one_visible_key_per_row(n, start, seed):
    mask = masks.random_eviction(n, start, seed)
    visible = mask.dense()
    before = np.tril(np.ones((n, n), dtype=bool))
    for i in range(n):
        gone = before[i] & ~visible[i]
        candidates = before[i] & (np.arange(n) < i)
        assert gone.sum() == (1 if i >= start and candidates.any() else 0)
        assert not (gone & ~candidates).any()
        before &= ~gone
    assert mask == masks.random_eviction(n, start, np.random.default_rng(seed))


def test_random_eviction_is_uniform():
    """Row 3 evicts key 0, 1 or 2, and row 4 one of the two left or key 3: nine histories, equally likely."""
    rng = np.random.default_rng(7)
    counts, draws = {}, 4500
    for _ in range(draws):
        mask = masks.random_eviction(5, 3, rng)
        history = tuple(int(np.flatnonzero(mask.lts == row)[0]) for row in (3, 4))
        counts[history] = counts.get(history, 0) + 1
    assert len(counts) == 9
    expected = draws / 9
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_square < 26.1  # 8 degrees of freedom, probability 0.001


def test_eviction_takes_leading_axes():
    evicted_at = np.array([[2, 3, 3], [3, 2, 3]])
    mask = masks.eviction(evicted_at)
    assert mask.leading == (2,)
    for one, row in zip(mask.dense(), evicted_at, strict=True):
        assert_array_equal(one, masks.eviction(row).dense())


def test_qk_sparse_keeps_keys_without_a_span():
    assert masks.qk_sparse(4, []) == masks.causal(4)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("full", (-1,), MaskError, "n_queries = -1"),
        ("full", (2, -3), MaskError, "n_keys = -3"),
        ("full", (2.0,), DtypeError, "n_queries = 2.0"),
        ("full", (True,), DtypeError, "n_queries = True"),
        ("full", (2**31,), MaskError, "n_queries = 2147483648"),
        ("causal", (4, None, "left"), MaskError, "align = 'left'.*bottom_right"),
        ("sliding_window", (4, -1), MaskError, "window = -1"),
        ("sliding_window", (4, 1.5), DtypeError, "window = 1.5"),
        ("causal_document", ([3, -1],), MaskError, r"lengths\[1\] = -1"),
        ("causal_document", ([3.0, 1],), DtypeError, "lengths has dtype float64"),
        ("causal_document", ([True],), DtypeError, "lengths has dtype bool"),
        ("causal_document", ([[1, 2]],), MaskError, r"lengths has shape \(1, 2\)"),
        ("causal_document", ([[1], [2, 3]],), DtypeError, "lengths = list"),
        ("causal_document", (3,), MaskError, r"lengths has shape \(\)"),
        ("causal_document", (None,), DtypeError, "lengths"),
        ("causal_document", ("abc",), DtypeError, "lengths"),
        ("document", ([2**31 - 1, 1],), MaskError, r"sum\(lengths\) = 2147483648"),
        ("share_question", ([(3, [1, -2])],), MaskError, r"documents\[0\]\[1\]\[1\] = -2"),
        ("share_question", ([(3, [1]), (-1, [])],), MaskError, r"documents\[1\]\[0\] = -1"),
        ("share_question", ([(3, [1], 4)],), MaskError, r"documents\[0\]"),
        ("share_question", ([3],), DtypeError, r"documents\[0\] = 3"),
        ("share_question", (3,), DtypeError, "documents = 3"),
        ("share_question", ([(3.5, [1])],), DtypeError, r"documents\[0\]\[0\] = 3.5"),
        ("global_sliding_window", (4, -1, 0), MaskError, "window = -1"),
        ("global_sliding_window", (4, 1, -2), MaskError, "n_global = -2"),
        ("causal_blockwise", ([-4],), MaskError, r"lengths\[0\] = -4"),
        ("prefix_lm_causal", (4, 5), MaskError, r"prefix = 5.*\[0, 4\]"),
        ("prefix_lm_document", ([(1, 2), (3, 2)],), MaskError, r"documents\[1\] = \(3, 2\)"),
        ("prefix_lm_document", ([1, 2, 3],), MaskError, r"documents has shape \(3,\)"),
        ("prefix_lm_document", ([(1, -2)],), MaskError, r"documents\[0, 1\] = -2"),
        ("prefix_lm_document", ([(1, 2.5)],), DtypeError, "documents has dtype float64"),
        ("qk_sparse", (8, [(4, 5)]), MaskError, r"spans\[0\] = \(4, 5\).*\[0, 8\)"),
        ("qk_sparse", (8, [(-1, 5)]), MaskError, r"spans\[0, 0\] = -1"),
        ("qk_sparse", (8, [(1, -5)]), MaskError, r"spans\[0, 1\] = -5"),
        ("hash_sparse", ([1, -1],), MaskError, r"bucket_lengths\[1\] = -1"),
        ("eviction", ([5, 1],), MaskError, r"evicted_at\[0\] = 5.*\[0, 2\]"),
        ("eviction", ([0.5, 1],), DtypeError, "evicted_at has dtype float64"),
        ("eviction", (3,), MaskError, "evicted_at = 3"),
        ("random_eviction", (4, -1), MaskError, "start = -1"),
        ("random_eviction", (4, 1, "seed"), DtypeError, "rng = 'seed'"),
        ("random_eviction", (4, 1, -5), MaskError, "rng = -5"),
    ],
)
def test_bad_arguments(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(masks, name)(*arguments)


N = 2**20
LARGE = {
    "full": (N,),
    "causal": (N,),
    "sliding_window": (N, 4096),
    "causal_document": ([1024] * 1024,),
    "document": ([1024] * 1024,),
    "share_question": ([(512, [256, 256])] * 1024,),
    "global_sliding_window": (N, 4096, 64),
    "causal_blockwise": ([1024] * 1024,),
    "prefix_lm_causal": (N, 4096),
    "prefix_lm_document": ([(128, 1024)] * 1024,),
    "qk_sparse": (N, [(start, 512) for start in range(0, N, 1024)]),
    "hash_sparse": ([1024] * 1024,),
    "random_eviction": (N, N // 2, 0),
    "eviction": (np.full(N, N),),
}


@pytest.mark.parametrize("name", sorted(LARGE))
def test_large_masks_are_cheap(name):
    seconds = min(_timed(name) for _ in range(2))
    assert seconds < 0.7
    tracemalloc.start()
    mask = getattr(masks, name)(*LARGE[name])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (mask.n_queries, mask.n_keys) == (N, N)
    assert peak < 100 * N  # bytes: a handful of 64-bit vectors beside the mask's own 16 bytes per key


def _timed(name):
    begin = time.process_time()
    getattr(masks, name)(*LARGE[name])
    return time.process_time() - begin
