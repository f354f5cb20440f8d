"""Cut a problem into parts, each with its origin: which rows, keys, heads and batches a part has."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

import cuattn
from cuattn import masks

__all__ = ["Part", "draw_parts"]

Pieces = list[tuple[int, int]]
"""Global (start, stop) of the pieces of an axis that a part takes, in ascending order."""
AXES = {"bias": "rk", "mask": "rk", "q": "r.", "o": "r.", "k": "k.", "v": "k.", "l": "r", "m": "r", "lse": "r"}
"""What the last axes of an array are: rows, keys or columns; gradients (do: of o) have those of their operand."""


class Part(NamedTuple):
    """One part of a problem.

    Attributes
    ----------
    leads : tuple of Pieces
        Of batch and heads; () where they are not cut.
    rows, keys : Pieces
    group : int
        Query heads that share a key head.
    """

    leads: tuple
    rows: Pieces
    keys: Pieces
    group: int

    def index(self, name, x):
        """Return where this part lies in an array of the whole problem; an axis of 1 may be broadcast."""
        inner = AXES[name if name in AXES else name[1:]]
        wanted = {"r": _indices(self.rows), "k": _indices(self.keys), ".": None}
        leads = [_indices(pieces) for pieces in self.leads]
        if leads and inner[0] == "k" and self.group > 1:
            leads[-1] = np.unique(leads[-1] // self.group)
        found = [*leads, *(wanted[axis] for axis in inner)][-x.ndim :]
        found = [None] * (x.ndim - len(found)) + found
        return np.ix_(*(np.arange(n) if at is None or n == 1 else at for at, n in zip(found, x.shape, strict=True)))

    def origin(self, shape):
        """Return the origin of this part of scores of a shape."""
        *lead, n_queries, n_keys = shape
        starts = {name: pieces[0][0] for name, pieces in zip(("head", "batch"), self.leads[::-1], strict=False)}
        heads = {"heads": lead[-1]} if self.leads else {}
        return cuattn.Origin(
            row=_runs(self.rows), key=_runs(self.keys), n_queries=n_queries, n_keys=n_keys, **starts, **heads
        )


def draw_parts(problem, rng):
    """Cut a problem at random, where dropout, blocks and groups allow; return lists of parts that share their rows."""
    *lead, n_queries, n_keys = problem.shape
    units = [16 if "dropout_p" in problem.options else 1] * 2
    for mask in getattr(problem.mask, "parts", ()):
        if isinstance(mask, masks.BlockMask):
            units = np.lcm(units, (mask.block_m, mask.block_n)).tolist()
    rows, keys = (_deal(rng, n, unit) for n, unit in zip((n_queries, n_keys), units, strict=True))
    own_mask = problem.mask is not None and not isinstance(problem.mask, np.ndarray)
    kv_heads = problem.arrays["k"].shape[-3] if "grouped" in problem.features else 1
    group = lead[-1] // kv_heads if kv_heads > 1 else 1
    leads = []
    if lead and not own_mask and 0 not in lead and rng.random() < 0.5:
        axes = [(lead[0], 1)] * (len(lead) == 2) + [(lead[-1], group)]
        leads = [_halves(rng, n, unit) for n, unit in axes]
    return [[Part(lead, some, others, group) for others in keys] for *lead, some in itertools.product(*leads, rows)]


def _deal(rng, length, unit):
    """Deal out the pieces between random cuts to at most three parts."""
    places = np.arange(unit, length, unit)
    cuts = np.sort(rng.choice(places, min(len(places), int(rng.integers(0, 6))), replace=False)).tolist()
    pieces = list(itertools.pairwise([0, *cuts, length]))
    owner = rng.integers(0, rng.integers(1, 4), len(pieces))
    return [[piece for piece, index in zip(pieces, owner, strict=True) if index == own] for own in np.unique(owner)]


def _halves(rng, length, unit):
    cut = unit * int(rng.integers(0, length // unit))
    return [[piece] for piece in ((0, cut), (cut, length)) if piece[0] < piece[1]]


def _indices(pieces):
    return np.concatenate([np.arange(*piece) for piece in pieces])


def _runs(pieces):
    """Return the pieces as an origin names them."""
    if len(pieces) == 1:
        return pieces[0][0]
    local = itertools.accumulate((stop - start for start, stop in pieces[:-1]), initial=0)
    return tuple((at, start) for at, (start, _) in zip(local, pieces, strict=True))
