"""What the algorithms return."""

from typing import NamedTuple

import numpy as np

from cuattn.io_model import Tiles
from cuattn.reference.hbm import Counts
from cuattn.rng import RNGState

__all__ = ["Backward", "FlashMaskForward", "Forward", "RabeStaatsForward", "StandardForward"]


class StandardForward(NamedTuple):
    """O (N, d) and P (N, N), which the standard backward needs, and the accesses."""

    o: np.ndarray
    p: np.ndarray
    counts: Counts


class Forward(NamedTuple):
    """O (N, d), the row sums l and row maxima m (N,), the random state (None without dropout), and the accesses.

    An empty row, one without any visible key, has O = 0, l = 0 and m = -inf.
    """

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray
    rng_state: RNGState | None
    counts: Counts


class RabeStaatsForward(NamedTuple):
    """O (N, d) and the accesses."""

    o: np.ndarray
    counts: Counts


class FlashMaskForward(NamedTuple):
    """O (N, d), the logsumexp L (N,), -inf in an empty row, what was done with each tile, and the accesses."""

    o: np.ndarray
    lse: np.ndarray
    tiles: Tiles
    counts: Counts


class Backward(NamedTuple):
    """The gradients dQ, dK, dV (N, d), and the accesses."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    counts: Counts
