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
AXES = {"q": "bhr.", "o": "bhr.", "k": "bgk.", "v": "bgk.", "bias": "bhrk", "mask": "bhrk"}
AXES |= dict.fromkeys(("l", "m", "lse"), "bhr")
"""What the axes of an array are: batch, heads, groups that share a key head, rows, keys, columns; a gradient's (do: of
o) are those of its operand."""


class Part(NamedTuple):
    """One part of a problem.

    Attributes
    ----------
    cuts : dict of str to Pieces
        By axis: rows and keys, batch and heads where they are cut.
    group : int
        Query heads that share a key head.
    """

    cuts: dict[str, Pieces]
    group: int

    def index(self, name, x):
        """Return where this part lies in an array of the whole problem; an axis of 1 may be broadcast."""
        taken = {axis: np.concatenate([np.arange(*piece) for piece in pieces]) for axis, pieces in self.cuts.items()}
        if "h" in taken:
            taken["g"] = np.unique(taken["h"] // self.group)
        axes = ("." * x.ndim + AXES[name if name in AXES else name[1:]])[-x.ndim :]
        found = zip(axes, x.shape, strict=True)
        return np.ix_(*(np.arange(n) if n == 1 else taken.get(axis, np.arange(n)) for axis, n in found))

    def origin(self, shape):
        """Return the origin of this part of scores of a shape."""
        *lead, n_queries, n_keys = shape
        starts = {"row": _runs(self.cuts["r"]), "key": _runs(self.cuts["k"])}
        starts |= {name: self.cuts[name[0]][0][0] for name in ("batch", "head") if name[0] in self.cuts}
        heads = lead[-1] if "h" in self.cuts else None
        return cuattn.Origin(heads=heads, n_queries=n_queries, n_keys=n_keys, **starts)


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
    leads = {}
    if lead and not own_mask and 0 not in lead and rng.random() < 0.5:
        leads = {"b": _halves(rng, lead[0], 1)} if len(lead) == 2 else {}
        leads["h"] = _halves(rng, lead[-1], group)
    outer = [dict(zip(leads, pieces, strict=True)) for pieces in itertools.product(*leads.values())]
    return [[Part({**of, "r": some, "k": others}, group) for others in keys] for of in outer for some in rows]


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


def _runs(pieces):
    """Return the pieces as an origin names them."""
    if len(pieces) == 1:
        return pieces[0][0]
    local = itertools.accumulate((stop - start for start, stop in pieces[:-1]), initial=0)
    return tuple((at, start) for at, (start, _) in zip(local, pieces, strict=True))
