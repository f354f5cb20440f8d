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
    with np.errstate(all="ignore"):  # -inf - -inf of a row that is empty in all parts
        m = np.maximum.reduce([part[2] for part in parts])
        shares = [np.where(part[2] == -np.inf, 0, part[1] * np.exp(part[2] - m)) for part in parts]
        l = np.add.reduce(shares)
        o = np.zeros(parts[0][0].shape, l.dtype)
        for part, share in zip(parts, shares, strict=True):
            o += part[0] * np.where(l == 0, 0, share / l)[..., None]
        return o.astype(parts[0][0].dtype, copy=False), l, m
