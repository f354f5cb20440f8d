"""Sums that several threads add to, in an order that does not depend on the threads.

Whoever adds holds a number; it waits until all lower numbers have added.  Nobody waits for ever: work is handed
out in the order of the numbers, so the lowest number that has not added yet is always being computed.
"""

from __future__ import annotations

import threading

__all__ = ["Aborted", "Turns"]


class Aborted(Exception):
    """Another thread failed while this one waited for its turn; never seen outside the backend."""


class Turns:
    """Counters of passed turns; one counter is a list element, and the lists belong to the sums."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting = 0
        self._aborted = False

    def wait(self, passed: list[int], index: int, number: int) -> None:
        """Return when `number` turns have passed at a counter."""
        if passed[index] == number:
            return
        with self._changed:
            self._waiting += 1
            self._changed.wait_for(lambda: self._aborted or passed[index] == number)
            self._waiting -= 1
        if self._aborted:
            raise Aborted

    def give(self, passed: list[int], index: int) -> None:
        """Pass a counter on to the next number; only its present owner may."""
        passed[index] += 1
        if self._waiting:  # read after the counter is written: who starts to wait later sees the counter
            with self._changed:
                self._changed.notify_all()

    def abort(self) -> None:
        """Wake everybody who waits, with :class:`Aborted`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
