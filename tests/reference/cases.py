"""Problems for the reference algorithms, and what their results are compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from cuattn import io_model, rng
from tests import oracle
from tests.tolerances import assert_close, eps

FLOAT32 = np.dtype(np.float32)


class Case(NamedTuple):
    """One problem; the arrays are float32, so that the oracle and the algorithms work in a higher precision."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    M: int

    @property
    def qkv(self):
        return self.q, self.k, self.v


@st.composite
def cases(draw, max_n=24, max_d=6):
    """Draw N, d and the M of the theorems' range d <= M <= N d."""
    n, d = draw(st.integers(1, max_n)), draw(st.integers(1, max_d))
    return make_case(n, d, draw(st.integers(d, n * d)), draw(st.integers(0, 2**32)))


def make_case(n, d, M, seed=0):
    generator = np.random.default_rng(seed)
    arrays = generator.standard_normal((4, n, d), np.float32) * generator.choice([0.3, 1, 4], (4, 1, 1))
    return Case(*arrays.astype(np.float32), M)


def draw_blocks(n, d, M, share, seed=0):
    """Draw a block mask of FlashAttention's blocks, of which a share is nonzero."""
    return np.random.default_rng(seed).random(io_model.block_sizes(n, d, M)[2:]) < share


def causal(i, j):
    return j <= i


def window(i, j):
    return abs(i - j) <= 2


def scattered(i, j):
    """Hide about a half, with empty rows and keys that no row sees."""
    return ((i * 7 + j * 5) % 11 < 6) & (i % 5 != 3) & (j % 6 != 2)


MASKS = st.sampled_from([None, causal, window, scattered])


def dense(mask, n):
    """Return a mask function as a boolean (N, N) array, None as None."""
    return None if mask is None else mask(*np.ogrid[:n, :n])


class Dropout(NamedTuple):
    """Dropout as the algorithms take it (p, state, b), replayed densely for the oracle."""

    p: float = 0.0
    state: rng.RNGState | None = None
    b: int = 0

    def replay(self, n):
        threshold = rng.threshold(self.p)
        if not threshold:
            return {}
        kept = rng.keep(self.state, threshold, self.b, (0, n), (0, n))
        return {"keep": kept, "keep_scale": 65536 / (65536 - threshold)}


NO_DROPOUT = Dropout()
DROPOUTS = st.one_of(
    st.just(NO_DROPOUT),
    st.builds(
        Dropout,
        st.sampled_from([0.1, 0.5, 0.9]),
        st.builds(rng.RNGState, st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)),
        st.integers(0, 100),
    ),
)


def solutions(case, visible=None, scale=None, dropout=NO_DROPOUT):
    """Return the oracle's results by name, exact and in the steps of float32, with lse for l and m."""
    for dtype in (None, FLOAT32):
        options = {"visible": visible, "scale": scale, **dropout.replay(len(case.q)), "dtype": dtype}
        found = oracle.solve(*case.qkv, case.do, **options)._asdict()
        with np.errstate(divide="ignore"):
            yield {**found, "lse": found["m"] + np.log(found["l"])}


def check_forward(case, result, **options):
    """Compare o, and where they are known l, m and lse, with the oracle, to the accuracy of float32."""
    exact, textbook = solutions(case, **options)
    for name in {"o", "l", "m", "lse"} & set(result._fields):
        assert_close(getattr(result, name), exact[name], textbook[name], dtype=FLOAT32, name=name)


def check_backward(case, result, **options):
    """Compare the gradients with the oracle, to the accuracy of float32.

    All three together, because dq and dk may be exactly 0 (when rows see one key each), which leaves no scale.
    """
    exact, textbook = (np.stack([one[name] for name in ("dq", "dk", "dv")]) for one in solutions(case, **options))
    assert_close(np.stack(result[:3]), exact, textbook, dtype=FLOAT32, name="dq, dk, dv")


def check_derivatives(arrays, do, forward, gradients, step=1e-3):
    """Compare gradients with central differences of sum(o * do) along random directions, in float64.

    A difference with half the step is accepted as far as the two differences disagree, which is three times its own
    error, plus the rounding of the sums.
    """
    arrays, do = [x.astype(np.float64) for x in arrays], do.astype(np.float64)
    generator = np.random.default_rng(1)
    for which, gradient in enumerate(gradients):
        direction = generator.standard_normal(gradient.shape)

        def loss(h, which=which, direction=direction):
            moved = [x + h * direction if index == which else x for index, x in enumerate(arrays)]
            return forward(*moved) * do

        coarse, fine = ((loss(h) - loss(-h)).sum() / (2 * h) for h in (step, step / 2))
        rounding = do.shape[0] * eps(np.float64) * np.abs(loss(0)).sum() / step
        exact = (gradient * direction).sum()
        assert abs(exact - fine) <= abs(coarse - fine) + rounding, which
