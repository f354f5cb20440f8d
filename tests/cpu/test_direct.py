"""Whole heads for small problems (cuattn.cpu.direct), and results that nothing is computed for (cuattn.cpu.call)."""

import math
import platform
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn.cpu import direct
from cuattn.cpu.direct import is_small, layout
from tests.cpu.problems import plain, problem_of
from tests.cpu.sizes import tiled, whole_heads
from tests.strategies import normal
from tests.test_api import check
from tests.tolerances import assert_same

FLOAT32 = np.dtype(np.float32)


def arrays(*shape, n_keys=None, kv_heads=None):
    rng = np.random.default_rng(0)
    *lead, n, d = shape
    keys = (*lead[:-1], kv_heads or lead[-1], n_keys or n, d)
    return normal(rng, shape, FLOAT32), normal(rng, keys, FLOAT32), normal(rng, keys, FLOAT32)


@given(
    batch=st.lists(st.integers(1, 5), max_size=2),
    heads=st.integers(1, 9),
    n=st.integers(1, 40),
    scores=st.integers(1, 9999),
)
def test_batches_cover_every_head_once_within_the_room(batch, heads, n, scores):
    q = np.zeros((*batch, heads, n, 8), np.float32)
    problem, *_ = problem_of(q, q, q)
    with whole_heads(scores):
        batches, sizes = layout(problem)
    seen = np.zeros((*batch, heads), int)
    for index in batches:
        seen[index] += 1
        count = math.prod(part.stop - part.start for part in index)
        assert count == 1 or count * n * n <= scores
        assert count * n * n <= sizes["s"]
    assert (seen == 1).all()


def test_what_is_small():
    x = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    assert is_small(problem_of(x(8, 512, 64), x(8, 512, 64), x(8, 512, 64))[0])
    assert not is_small(problem_of(x(1, 2048, 64), x(1, 2048, 64), x(1, 2048, 64))[0])
    assert is_small(problem_of(x(32, 1, 128), x(32, 100_000, 128), x(32, 100_000, 128))[0])


@pytest.mark.parametrize("n_keys", [1, 2, 3, 127, 128, 129, 1000, 4096])
@pytest.mark.parametrize("n_queries", [1, 2, 16, 33])
def test_any_number_of_keys_is_folded(n_queries, n_keys):
    q, k, v = arrays(1, n_queries, 16, n_keys=n_keys)
    fwd = cuattn.forward(q, k, v)
    check(plain(q, k, v), fwd[:3])


def test_decoding_copies_no_keys_or_values():
    import tracemalloc

    q, k, v = arrays(1, 16, 1, 64, n_keys=4096, kv_heads=4)
    cuattn.attention(q, k, v, enable_gqa=True)
    tracemalloc.start()
    try:
        cuattn.attention(q, k, v, enable_gqa=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < k.nbytes / 2


def test_grouped_heads_are_rows_of_one_product():
    q, k, v = arrays(2, 6, 20, 16, kv_heads=2)
    problem, *_ = problem_of(q, k, v, enable_gqa=True)
    assert layout(problem)[1]["s"] == 2 * 2 * 20 * 60


@pytest.mark.parametrize("way", [whole_heads, tiled])
def test_a_row_whose_scores_are_all_invisible_is_empty_without_a_mask(way):
    q, k, v = arrays(2, 5, 8)
    with way():
        fwd = cuattn.forward(np.ones_like(q), np.full_like(k, -np.inf), v)
    for found, expected in zip(fwd[:3], (0, 0, -np.inf), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n_keys", [1, 3])
def test_large_scores_of_rows_in_reverse_beside_empty_ones(n_keys):
    """The backward's scores have the forward's bits: the one weight of a row is 1 in both."""
    q, k, v = (1e4 * x for x in arrays(2, 14, 192, n_keys=n_keys))
    bias = np.zeros((14, n_keys), np.float32)
    bias[:, 1:] = -np.inf
    bias[5] = -np.inf
    q, do = q[..., ::-1, :], np.ones_like(q)
    fwd = cuattn.forward(q, k, v, bias=bias)
    dv = cuattn.backward(do, q, k, v, fwd, bias=bias).dv
    np.testing.assert_array_equal(dv[:, 0], 13)
    np.testing.assert_array_equal(dv[:, 1:], 0)


def in_reverse(x):
    return x[..., ::-1, :].copy()[..., ::-1, :]


def unaligned(x):
    held = np.empty(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    held[...] = x
    return held


@pytest.mark.parametrize("view", [in_reverse, unaligned])
@pytest.mark.parametrize("name", ["q", "k", "v", "do"])
def test_arrays_that_blas_does_not_read_in_place_give_its_bits(view, name):
    operands = dict(zip(("q", "k", "v"), arrays(2, 14, 192, n_keys=70), strict=True))
    operands["do"] = normal(np.random.default_rng(1), operands["q"].shape, FLOAT32)
    seen = operands | {name: view(operands[name])}
    found, expected = [], []
    for results, (q, k, v, do) in ((expected, operands.values()), (found, seen.values())):
        fwd = cuattn.forward(q, k, v)
        results += [*fwd[:3], *cuattn.backward(do, q, k, v, fwd)[:3]]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", ["q", "k", "v", "do", "bias"])
def test_what_is_not_finite_shows_in_dq(name, value, masked, monkeypatch):
    """The gradients are those that care for what is hidden gives, wherever something is not a finite number."""
    rng, mask = np.random.default_rng(0), np.tri(6, 5, dtype=bool) if masked else None
    for place in np.ndindex(4, 3):
        operands = dict(zip(("q", "k", "v"), arrays(1, 6, 4, n_keys=5), strict=True))
        operands |= {"do": normal(rng, (1, 6, 4), FLOAT32), "bias": normal(rng, (1, 6, 5), FLOAT32)}
        operands[name][(0, *place)] = value
        q, k, v, do, bias = operands.values()
        bias = bias if name == "bias" else None
        fwd, found = cuattn.forward(q, k, v, mask=mask, bias=bias), []
        for is_finite in (direct.is_finite, lambda *_: False):
            monkeypatch.setattr(direct, "is_finite", is_finite)
            found.append(cuattn.backward(do, q, k, v, fwd, mask=mask, bias=bias))
        monkeypatch.undo()
        assert_same(*found)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_malloc_keeps_what_calls_take():
    program = """
import resource, numpy as np, cuattn
q, k, v, do = np.random.default_rng(0).standard_normal((4, 512, 16, 32), np.float32)
fwd = cuattn.forward(q, k, v)
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    for _ in range(10):
        cuattn.backward(do, q, k, v, fwd)
print(faults() - before)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 1000  # of 4 MB a call they would be as many in each
