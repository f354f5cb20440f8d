"""Random problems: scales far apart, points in clusters or all alike, rows as keys, hidden keys, low temperatures."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import pairwise
from cuattn.pairwise import near
from tests.pairwise.textbook import KERNELS, Problem

SEEDS = st.integers(0, 2**32 - 1)
DIMS = 1, 2, 3, 5, 8, 11, 16, 24


def drawn(seed, dtypes=(np.float32, np.float64)):
    """Return a problem, its dtype and the wider one of the truth, and the scales of a call."""
    rng = np.random.default_rng(seed)
    m, n, d, p = (int(rng.integers(1, most)) for most in (300, 900, len(DIMS) + 1, 4))
    spread, dtype = 10 ** rng.uniform(-3, 3), dtypes[rng.integers(len(dtypes))]
    problem = Problem(DIMS[d - 1], p, m, n, spread, dtype, seed=seed)
    problem.h *= dtype(10 ** rng.uniform(-3, 3))
    kind = rng.choice(["plain", "apart", "two scales", "hidden", "alike", "far rows", "same"])
    if kind == "apart":
        problem.x += dtype(spread * 10 ** rng.uniform(-1, 3))
    elif kind == "two scales":
        problem.y[n // 2 :] *= dtype(100)
    elif kind == "hidden":
        problem.h[rng.random(n) < 0.7] = -np.inf
    elif kind == "alike":
        problem.x[:] = problem.x[0]
    elif kind == "far rows":
        problem.x[m // 2 :] *= dtype(1000)
    elif kind == "same":
        problem.y, problem.h, problem.b = problem.x, np.resize(problem.h, m), np.resize(problem.b, (m, p))
    wide = np.float64 if dtype == np.float32 else np.longdouble
    reach = max(np.square(of - problem.y.astype(wide).mean(0)).sum(-1).max() for of in (problem.x, problem.y))
    eps, bandwidth = 10 ** rng.uniform(-12, 3), spread * 10 ** rng.uniform(-1.5, 2)
    kernel = str(rng.choice(list(KERNELS)))
    return SimpleNamespace(**{name: value for name, value in locals().items() if name not in ("rng", "of")})


def expanded(drawn):
    """Return what squared distances may lose where they are expanded about the mean: little of few coordinates."""
    digits = {np.float32: (21, np.inf), np.float64: (49, 72)}[drawn.dtype]
    return drawn.reach * 2.0 ** -digits[drawn.problem.x.shape[-1] <= 8]


def hold(found, exact, plain, slack, drawn):
    """Hold a result to twice the direct error and a slack; what is infinite stays it."""
    found, there = np.asarray(found), np.isfinite(exact)
    assert np.array_equal(found[~there], exact[~there].astype(found.dtype)), drawn
    error, direct = (np.abs(of.astype(exact.dtype) - exact)[there].max(initial=0) for of in (found, plain))
    assert error <= 2 * direct + slack, (error, direct, slack, drawn)


def check_softmin(drawn, up=np.asarray, down=np.asarray):
    problem, unit = drawn.problem, np.finfo(drawn.dtype).eps
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        exact, plain = (problem.weights(dtype, drawn.eps)[0] for dtype in (drawn.wide, drawn.dtype))
    found = down(pairwise.softmin(*map(up, (problem.x, problem.y, problem.h)), eps=drawn.eps))
    size = sum(np.abs(of[np.isfinite(of)]).max(initial=0) for of in (exact, problem.h))
    hold(found, exact, plain, 4 * unit * size + expanded(drawn), drawn)


def check_matvec(drawn, up=np.asarray, down=np.asarray):
    problem, options = drawn.problem, dict(kernel_function=drawn.kernel, bandwidth=drawn.bandwidth)
    exact, plain = (problem.matvec(dtype, drawn.kernel, drawn.bandwidth) for dtype in (drawn.wide, drawn.dtype))
    found = down(pairwise.matvec(*map(up, (problem.x, problem.y, problem.b)), **options))
    problem.b = np.abs(problem.b)
    size = problem.matvec(drawn.wide, drawn.kernel, drawn.bandwidth).max()
    lost = expanded(drawn) / drawn.bandwidth**2
    lost = math.sqrt(lost) if drawn.kernel == "laplacian" and lost > 0 else lost
    info = np.finfo(drawn.dtype)
    slack = (
        (8 + 4 * max(-np.log(size), 0)) * info.eps + lost if size else 0
    )  # of low powers errors are of their exponents
    hold(found, exact, plain, slack * size + 2.0**16 * info.tiny * len(problem.y), drawn)


@pytest.mark.filterwarnings("ignore:.*precision=:RuntimeWarning")
@given(seed=SEEDS)
def test_softmin(seed):
    check_softmin(drawn(seed))


@pytest.mark.filterwarnings("ignore:.*precision=:RuntimeWarning")
@given(seed=SEEDS)
def test_matvec(seed):
    check_matvec(drawn(seed))


@pytest.mark.gpu
@pytest.mark.parametrize("check", [check_softmin, check_matvec])
@pytest.mark.parametrize("many", [0, near._MANY])
def test_on_a_gpu(monkeypatch, check, many):
    """`many`: float32 soft minima of at most three coordinates take pairwise/near.cu, and differences."""
    import cupy

    monkeypatch.setattr(near, "_MANY", many)
    monkeypatch.setattr(f"{__name__}.DIMS", (2, 3, 8, 16))  # few kernels to compile
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision=")
        for seed in range(200):
            check(drawn(seed, [np.float32]), cupy.asarray, cupy.asnumpy)
