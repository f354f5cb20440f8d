"""What the algorithms share: results, placing inputs, blocks, the online softmax, MASK and dropout."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cuattn import rng as random
from cuattn.errors import ArgumentError, ShapeError
from cuattn.reference.hbm import HBM, Counts

__all__ = [
    "Backward",
    "Forward",
    "Options",
    "block",
    "fresh_state",
    "place",
    "reciprocal",
    "rescaling",
    "softmax_tile",
    "update",
]


class Forward(NamedTuple):
    """O (N, d), the row sums l and row maxima m (N,), the random state (None without dropout), and the accesses.

    An empty row, one without any visible key, has O = 0, l = 0 and m = -inf.
    """

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray
    rng_state: random.RNGState | None
    counts: Counts


class Backward(NamedTuple):
    """The gradients dQ, dK, dV (N, d), and the accesses."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    counts: Counts


def place(hbm, **arrays):
    """Put Q, K, V, ... (N, d), all of one shape, into HBM and return N and d."""
    shapes = {name: np.shape(array) for name, array in arrays.items()}
    (first, shape), *others = shapes.items()
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"{first} has shape {shape}: expected (N, d) with N, d >= 1")
    for name, other in others:
        if other != shape:
            raise ShapeError(f"{name} has shape {other}: expected {shape}, the shape of {first}")
    for name, array in arrays.items():
        hbm.place(name, array)
    return shape


def block(i, size, n):
    """Return block i of blocks of `size` that n elements are divided into; the last may be shorter."""
    return slice(i * size, min((i + 1) * size, n))


def softmax_tile(S):
    """Return m~ = rowmax(S), P~ = exp(S - m~) and l~ = rowsum(P~) of a tile.

    In a row that is masked throughout, m~ = -inf and P~ = 0 (the papers leave that row undefined).
    """
    m = S.max(axis=1)
    P = np.exp(S - np.where(m == -np.inf, 0, m)[:, None])
    return m, P, P.sum(axis=1)


def rescaling(m, m_new):
    """Return e^(m - m_new), 0 where m = -inf: nothing was summed with that maximum."""
    return np.exp(m - np.where(m_new == -np.inf, 0, m_new))


def reciprocal(l):
    """Return 1 / l, 0 where l = 0: an empty row's output is 0."""
    return np.divide(1, l, out=np.zeros_like(l), where=l != 0)


def update(S_ij, V_j, O_i, l_i, m_i, Z_ij=1):
    """Return O_i, l_i and m_i after a tile of scores; Z_ij is dropout's factor."""
    m_ij, P_ij, l_ij = softmax_tile(S_ij)  # Alg. 1 l. 10; Alg. 2, 5 l. 12
    m_new = np.maximum(m_i, m_ij)  # Alg. 1 l. 11; Alg. 2, 5 l. 13
    old, new = rescaling(m_i, m_new), rescaling(m_ij, m_new)
    l_new = old * l_i + new * l_ij
    P_dropped = P_ij * Z_ij  # Alg. 2, 5 l. 14
    O_i = (l_i * old)[:, None] * O_i + new[:, None] * (P_dropped @ V_j)  # Alg. 1 l. 12; Alg. 2, 5 l. 15
    return reciprocal(l_new)[:, None] * O_i, l_new, m_new


class Options(NamedTuple):
    """What Algorithms 2, 4 and 5 add to attention: tau, MASK and dropout.

    `mask` is None, a function of row and key indices that is evaluated on the chip, or "mask", a boolean array in
    HBM.  `threshold` is 0 without dropout.
    """

    scale: float
    mask: Callable | str | None
    threshold: int
    state: random.RNGState | None
    b: int

    @classmethod
    def resolve(cls, hbm: HBM, n, d, scale, mask, dropout_p, b, state_of):
        """Check the caller's arguments; a boolean array as mask is put into HBM, `state_of` gives dropout's state."""
        if mask is not None and not callable(mask):
            shape = np.shape(mask)
            if shape != (n, n):
                raise ShapeError(f"mask has shape {shape}: expected (N, N) = {(n, n)}, or a function of (i, j)")
            hbm.place("mask", mask, np.bool_)
            mask = "mask"
        threshold = random.threshold(dropout_p)
        return cls(d**-0.5 if scale is None else scale, mask, threshold, state_of() if threshold else None, b)

    def masked(self, hbm: HBM, S, rows, keys):
        """Return MASK(S): -inf where row i may not see key j."""
        if self.mask is None:
            return S
        if self.mask == "mask":
            visible = hbm.load("mask", (rows, keys))
        else:
            visible = self.mask(np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None, :])
        return np.where(visible, S, -np.inf)

    def dropout(self, dtype, rows, keys):
        """Return Z: 1 / (1 - p) where an element is kept, 0 where it is dropped."""
        if not self.threshold:
            return dtype.type(1)
        span, keep_scale = (rows.start, rows.stop), random.LEVELS / (random.LEVELS - self.threshold)
        kept = random.keep(self.state, self.threshold, self.b, span, (keys.start, keys.stop))
        return np.where(kept, dtype.type(keep_scale), dtype.type(0))


def fresh_state(rng):
    """Return the random state of a forward, which cannot be reproduced without a seed."""
    if rng is None:
        raise ArgumentError("rng is None: with dropout, expected a seed or a state")
    return random.resolve(rng)
