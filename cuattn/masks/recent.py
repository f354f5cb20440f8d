"""A small memory of what was made last, for tables that belong to a mask."""

from collections.abc import Hashable
from threading import Lock
from typing import Any

__all__ = ["Recent"]


class Recent:
    """Values by key, at most `limit` of them: the one asked for longest ago goes first.  Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._items: dict[Hashable, Any] = {}
        self._limit, self._lock = limit, Lock()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Any:
        """Return the value of a key, or None."""
        with self._lock:
            value = self._items.pop(key, None)
            if value is not None:
                self._items[key] = value  # now the youngest
        return value

    def keep(self, key: Hashable, value: Any) -> Any:
        """Return the value that is kept for a key: this one, unless another thread was faster."""
        with self._lock:
            value = self._items.setdefault(key, value)
            gone = [self._items.pop(next(iter(self._items))) for _ in range(len(self._items) - self._limit)]
        del gone  # outside of the lock: what goes may free memory on a GPU
        return value
