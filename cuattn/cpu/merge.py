"""Merging forwards over disjoint sets of keys."""

import numpy as np
from numpy import ndarray


def merge(parts: list[list[ndarray]]) -> list[ndarray]:
    """Combine (o, l, m), or (o, l, m, to, tlse), of the same queries over disjoint sets of keys.

    Parameters
    ----------
    parts : list of (o, l, m) or (o, l, m, to, tlse)
        At least one; all of one shape and dtype.

    Returns
    -------
    o, l, m, ... : ndarray
        As one call for all keys would have given them; o and its tangent are summed in l's dtype and rounded once.

    Notes
    -----
    A part in which a row is empty changes nothing in that row, not even a bit; two parts may be exchanged.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 1, lines 11 and 12.
    """
    outputs, sums, maxima, *tangents = zip(*parts, strict=True)
    with np.errstate(all="ignore"):  # -inf - -inf of a row that is empty in all parts
        sums, maxima = np.array(sums), np.array(maxima)
        m = np.maximum.reduce(maxima)
        shares = np.where(maxima == -np.inf, 0, sums * np.exp(maxima - m))
        l = np.add.reduce(shares)
        weights = np.where(l == 0, 0, shares / l)
        o = _weighed(outputs, weights)
        found = [o.astype(outputs[0].dtype, copy=False), l, m]
        if tangents:  # each part's tangent of o is relative to its own tangent of lse
            of_o, of_lse = tangents
            tlse = np.add.reduce(weights * np.array(of_lse))
            moved = _weighed(outputs, weights * (np.array(of_lse) - tlse))
            found += [(_weighed(of_o, weights) + moved).astype(of_o[0].dtype, copy=False), tlse]
        return found


def _weighed(parts: tuple[ndarray, ...], weights: ndarray) -> ndarray:
    """Return the sum of parts times weights of their rows."""
    return sum(part * weight[..., None] for part, weight in zip(parts, weights, strict=True))  # type: ignore[return-value]
