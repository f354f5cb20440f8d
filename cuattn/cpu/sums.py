"""Sums that several items of work add to, in an order that does not depend on the threads.

Every item takes a number at each sum when it is handed out, and adds when all lower numbers have.  Nobody waits for
ever: the first item that has not finished never waits, as all numbers before its own are done.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Hashable

import numpy as np

__all__ = ["Aborted", "OrderedSum", "summed_to", "total_like"]


class Aborted(Exception):
    """Another thread failed while this one waited for its turn; never seen outside the backend."""


class OrderedSum:
    """Turns at adding to the parts of sums; a part is named by any key."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting, self._aborted = 0, False
        self._issued: dict[Hashable, int] = defaultdict(int)
        self._passed: dict[Hashable, int] = defaultdict(int)

    def take_number(self, key: Hashable) -> int:
        """Return the next number at a part; to be called for one item after the other."""
        number = self._issued[key]
        self._issued[key] = number + 1
        return number

    def wait(self, key: Hashable, number: int) -> None:
        """Return when all lower numbers have been released."""
        if self._passed[key] == number:
            return
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._aborted or self._passed[key] == number)
            self._waiting -= 1
        if self._aborted:
            raise Aborted

    def release(self, key: Hashable) -> None:
        """Pass a part on to the next number; only its present owner may."""
        self._passed[key] += 1
        if self._waiting:  # read after the counter is written: who starts to wait later sees the counter
            with self._changed:
                self._changed.notify_all()

    def abort(self) -> None:
        """Wake everybody who waits, with :class:`Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


def total_like(result: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return zeros to sum up a result in a dtype: the result itself where it has that."""
    if result.dtype != dtype:
        return np.zeros(result.shape, dtype)
    result.fill(0)
    return result


def summed_to(part: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a part summed over the axes in which a shape of as many has length 1."""
    axes = tuple([axis for axis, n in enumerate(shape) if n == 1 and part.shape[axis] > 1])
    return part.sum(axis=axes, keepdims=True, dtype=dtype) if axes else part
