"""Calls that are bound to the arrays of a chunk once: most chunks come again with every stack of row tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from cuattn.cpu.views import Chunk

__all__ = ["Call", "Steps"]

_MOST = 256  # chunks, as stacks see them, that a thread remembers

Call = Callable[[], object]
Step = TypeVar("Step")


class Steps(Generic[Step]):
    """What to do with a chunk, made by a function and kept by what is visible of it."""

    def __init__(self, bind: Callable[[Chunk], Step]) -> None:
        self._bind = bind
        self._steps: dict[tuple, Step] = {}

    def __call__(self, chunk: Chunk) -> Step:
        """Return what to do with a chunk."""
        step = self._steps.get(chunk.runs)
        if step is None:
            if len(self._steps) >= _MOST:
                self._steps.clear()
            step = self._steps[chunk.runs] = self._bind(chunk)
        return step
