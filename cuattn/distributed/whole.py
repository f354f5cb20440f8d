"""What is said of the whole problem, and what of it holds for a part: masks cut, indices that stay global."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from cuattn import dispatch, masks
from cuattn.distributed.arrays import part
from cuattn.masks.base import Mask
from cuattn.masks.constructors import kept_band
from cuattn.masks.runs import Runs, length_of
from cuattn.problem import Origin, check_band
from cuattn.rng import RNGState


@dataclass
class Whole:
    """A problem that ranks compute together.

    Attributes
    ----------
    n_queries, n_keys : int
        Lengths.
    leading : tuple of int
        Axes before them, query heads last.
    origin : Origin
        Its own place: batch, head and heads.
    mask : Mask, callable, boolean array or None
        Global.
    state : RNGState or None
        Of dropout.
    options : dict of str to object
        The other keyword arguments of every part.
    """

    n_queries: int
    n_keys: int
    leading: tuple[int, ...]
    origin: Origin
    mask: Any = None
    state: RNGState | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def of_heads(self, start: int, stop: int) -> Whole:
        """Return what is said of some heads."""
        mask = self.mask
        if isinstance(mask, Mask):
            mask = _mask_of_heads(mask, start, stop)
        elif hasattr(mask, "shape") and mask.ndim > 2 and mask.shape[-3] > 1:
            mask = mask[..., start:stop, :, :]
        origin = replace(self.origin, head=self.origin.head + start)
        return replace(self, leading=(*self.leading[:-1], stop - start), mask=mask, origin=origin)

    def part(self, rows: Runs, keys: Runs) -> dict[str, Any]:
        """Return the keyword arguments of a part that consists of some rows and keys."""
        lengths = {"n_queries": self.n_queries, "n_keys": self.n_keys}
        origin = replace(self.origin, row=_starts(rows), key=_starts(keys), **lengths)
        found = {**self.options, "mask": self._cut(rows, keys), "origin": origin}
        mask, by_index = found["mask"], self.state is not None or found["score"] is not None
        if origin.has_runs and not by_index and (mask is None or isinstance(mask, Mask)):
            # A mask says all, and its calls are found at once.
            band = dispatch.band_mask(found["is_causal"], found["window"], origin, length_of(rows), length_of(keys))
            every = [each for each in (mask, band) if each is not None]
            whole = _every(*every) if len(every) > 1 else next(iter(every), None)
            found |= {"mask": whole, "is_causal": False, "window": None, "origin": None}
        return found

    def bias(self, arrays: dict[str, Any], keys: Runs) -> Any:
        """Return what the bias among a rank's arrays, one of its rows or one without rows, has for some keys."""
        bias = arrays.get("bias", arrays.get("key_bias"))
        return bias if bias is None or bias.shape[-1] == 1 else part(bias, ((0, self.n_keys),), keys, -1)

    def _cut(self, rows: Runs, keys: Runs) -> Any:
        mask = self.mask
        if isinstance(mask, Mask):
            return _restricted(mask, self.n_queries, self.n_keys, rows, keys)
        if mask is None or callable(mask):
            return mask
        for axis, n, runs in ((-2, self.n_queries, rows), (-1, self.n_keys, keys)):
            if mask.shape[axis] > 1:
                mask = part(mask, ((0, n),), runs, axis)
        return mask

    @cached_property
    def visible(self) -> Mask | None:
        """A mask on the host that hides what the mask, causality and window do, as far as they can be known there."""
        known = [] if self.mask is None else [self._known()]
        options = self.options
        band = check_band(options["is_causal"], options["window"], self.n_queries, self.n_keys)
        if band is not None:
            known.append(kept_band(self.n_queries, self.n_keys, band.left, band.right, band.offset))
        known = [mask for mask in known if mask is not None]
        return masks.AllOf(known) if len(known) > 1 else next(iter(known), None)

    def _known(self) -> Mask | None:
        mask = self.mask
        if callable(mask):
            from cuattn.scoring import visible
            from cuattn.tracing import Frozen

            bound = visible(mask)
            shapes = [(*self.leading, n, 1) for n in (self.n_queries, self.n_keys, self.n_keys)]
            return dispatch.function_mask(bound, *shapes, self.origin) if isinstance(bound, Frozen) else None
        if not isinstance(mask, Mask):
            mask = masks.BooleanMask(mask)
        return None if mask.on_device else mask.bind(self.n_queries, self.n_keys)


@lru_cache(maxsize=256)  # kept, since a mask holds tables on a GPU
def _restricted(mask: Mask, n_queries: int, n_keys: int, rows: Runs, keys: Runs) -> Mask:
    return mask.bind(n_queries, n_keys).restrict(rows, keys)


@lru_cache(maxsize=64)  # likewise
def _mask_of_heads(mask: Mask, start: int, stop: int) -> Mask:
    return mask.heads(start, stop)


_every = lru_cache(maxsize=64)(lambda *parts: masks.AllOf(parts))  # likewise


def _starts(runs: Runs) -> int | tuple[tuple[int, int], ...]:
    """Return where the runs of a part begin, as an origin names them.

    >>> _starts(((0, 2), (6, 8))), _starts(((6, 8),))
    (((0, 0), (2, 6)), 6)
    """
    found, at = [], 0
    for start, stop in runs:
        found.append((at, start))
        at += stop - start
    return tuple(found) if len(found) > 1 else found[0][1] if found else 0
