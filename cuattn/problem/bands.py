"""A mask that is no more than a band can join the problem's own: it then needs no tables, and no kernel reads it.

Only kernels that take no boolean mask may do so: with those that do, a column mask must give the same bits as its dense
twin, for which nobody knows that it is a band.
"""

from __future__ import annotations

from dataclasses import replace

from cuattn.masks.bands import Reach
from cuattn.problem.model import Band, Operands, Problem

__all__ = ["join_reach", "mask_as_band"]


def mask_as_band(problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return a problem and operands without their column mask, where a band says the same, else as they are."""
    reach = operands.mask._reach if problem.mask == "column" else None
    if reach is None:
        return problem, operands
    band, whole = join_reach(problem.band, reach, problem.n_queries, problem.n_keys)
    return (replace(problem, mask=None, band=band), operands._replace(mask=None)) if whole else (problem, operands)


def join_reach(band: Band | None, reach: Reach, n_queries: int, n_keys: int) -> tuple[Band | None, bool]:
    """Join the band that a mask is with that of is_causal and window.

    Parameters
    ----------
    band : Band or None
        Of is_causal and window.
    reach : tuple of (int or None)
        Of the mask, see :attr:`cuattn.masks.ColumnMask._reach`.
    n_queries, n_keys : int

    Returns
    -------
    joined : Band or None
        What both leave visible, or `band` where that is no band.
    whole : bool
        Whether it is one.  A band has one diagonal, of two that there are, and reaches from it to both sides.

    Examples
    --------
    >>> join_reach(None, (None, 2), 4, 6)
    (Band(left=None, right=0, offset=2), True)
    >>> join_reach(Band(None, 0, 0), (3, 1), 8, 8)
    (Band(left=3, right=0, offset=0), True)
    """
    if reach == (None, None):
        return band, True
    offsets = sorted((0, n_keys - n_queries), key=lambda offset: offset != reach[1])  # causal: the one that is its edge
    for offset in offsets if band is None else (band.offset,):
        left, right = (
            None if side is None else side + shift for side, shift in zip(reach, (offset, -offset), strict=True)
        )
        if all(side is None or side >= 0 for side in (left, right)):
            if band is not None:
                left, right = _nearer(left, band.left), _nearer(right, band.right)
            return Band(left, right, offset), True
    return band, False


def _nearer(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
