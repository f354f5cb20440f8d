"""Rows or keys that a part of a matrix takes from the whole: a few runs of neighbours, in ascending order."""

from typing import Any

import numpy as np

from cuattn.errors import MaskError, shown
from cuattn.masks import checks
from cuattn.masks.device import namespace

Runs = tuple[tuple[int, int], ...]
"""Pairs (start, stop), each with start <= stop, none beginning before its predecessor stops."""

Reach = tuple[int | None, int | None]
"""How far a row sees before and behind its diagonal; None leaves that side open."""

_OPEN = 2**33  # beyond any row index: a window at least this wide is open


def as_runs(name: str, value: Any, length: int) -> Runs:
    """Return a slice, or a sequence of (start, stop), as runs of an axis.

    Examples
    --------
    >>> as_runs("rows", slice(2, None), 8), as_runs("rows", [(0, 2), (6, 8)], 8)
    (((2, 8),), ((0, 2), (6, 8)))
    """
    if isinstance(value, slice):
        start, stop, step = value.indices(length)
        if step != 1:
            raise MaskError(f"{name} = {value!r}: expected a slice of step 1")
        return ((start, max(start, stop)),)
    runs = checks.numbers(name, value, 2)
    if (np.diff(runs.ravel(), prepend=0, append=length) < 0).any():
        raise MaskError(f"{name} = {shown(runs.tolist())}: expected ascending runs within [0, {length}]")
    return tuple(map(tuple, runs.tolist()))


def length_of(runs: Runs) -> int:
    """Return how many elements the runs take."""
    return sum(stop - start for start, stop in runs)


def indices(runs: Runs, step: int = 1) -> np.ndarray:
    """Return the elements that the runs take, int64, or every `step`-th of each run."""
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(*run, step) for run in runs)])


def kept_before(bound: Any, runs: Runs) -> Any:
    """Return of each index into the whole how many elements before it the runs take.

    Examples
    --------
    >>> import numpy as np
    >>> kept_before(np.array([0, 1, 5, 7]), ((0, 2), (6, 8))).tolist()
    [0, 1, 2, 3]
    """
    xp = namespace(bound)
    return sum((xp.clip(bound, start, stop) - start for start, stop in runs), xp.zeros_like(bound))


def taken(array: Any, cells: np.ndarray, axis: int) -> Any:
    """Return a copy of what an array, wherever it lies, holds at some indices along an axis."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(cells), axis=axis)


def rows_of_band(key: Any, left: int | None, right: int | None, rows: Runs) -> tuple[Any, Any]:
    """Return the rows that see keys through a band, counted among those of a part.

    Parameters
    ----------
    key : int array
        Keys, less the column of row 0's diagonal.
    left, right : int or None
        Reach of a row before and behind its diagonal; None leaves that side open.
    rows : tuple of (start, stop)
        Runs of rows that the part takes, in ascending order.

    Returns
    -------
    first, last : int array or int
        The first row, and the row behind the last.

    Examples
    --------
    Causal, four rows and keys: key j is seen from row j on.

    >>> import numpy as np
    >>> rows_of_band(np.arange(4), None, 0, ((0, 4),))
    (array([0, 1, 2, 3]), 4)
    """
    first = 0 if right is None else kept_before(key - min(right, _OPEN), rows)
    return first, length_of(rows) if left is None else kept_before(key + (min(left, _OPEN) + 1), rows)
