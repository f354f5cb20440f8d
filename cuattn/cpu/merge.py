"""Merging forwards over disjoint sets of keys."""

import numpy as np
from numpy import ndarray


def merge(parts: list[tuple[ndarray, ndarray, ndarray]]) -> tuple[ndarray, ndarray, ndarray]:
    """Combine (o, l, m) of the same queries over disjoint sets of keys.

    Parameters
    ----------
    parts : list of (o, l, m)
        At least one; all of one shape and dtype.

    Returns
    -------
    o, l, m : ndarray
        As one forward over all keys would have given them; o is summed in l's dtype and rounded once.

    Notes
    -----
    A part in which a row is empty changes nothing in that row, not even a bit; two parts may be exchanged.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 1, lines 11 and 12.
    """
    outputs, sums, maxima = zip(*parts, strict=True)
    with np.errstate(all="ignore"):  # -inf - -inf of a row that is empty in all parts
        sums, maxima = np.array(sums), np.array(maxima)
        m = np.maximum.reduce(maxima)
        shares = np.where(maxima == -np.inf, 0, sums * np.exp(maxima - m))
        l = np.add.reduce(shares)
        weights = np.where(l == 0, 0, shares / l)[..., None]
        o = sum(output * weight for output, weight in zip(outputs, weights, strict=True))
        return o.astype(outputs[0].dtype, copy=False), l, m
