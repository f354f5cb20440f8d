"""Masks that hold together: ``a & b``."""

from collections.abc import Iterable, Sequence
from functools import cached_property, reduce
from itertools import product
from operator import or_
from typing import Any

import numpy as np

from cuattn.errors import MaskError
from cuattn.masks import checks
from cuattn.masks.base import Instance, Mask
from cuattn.masks.cells import BooleanMask
from cuattn.masks.device import namespace
from cuattn.masks.intervals import join


class AllOf(Mask):
    """Several masks that hold together: visible is what all of them show.

    ``a & b`` makes one where no single mask says the same.

    Parameters
    ----------
    parts : sequence of mask or bool array
        At least one; those of an `AllOf` among them become its own.  Their lengths agree and their leading axes
        broadcast.

    Attributes
    ----------
    parts : tuple of mask
    leading : tuple of int
        Shape that the parts' leading axes have together.

    Raises
    ------
    MaskError
        The lengths differ or the leading axes do not broadcast.

    See Also
    --------
    ColumnMask : Two intervals a key, which the AND of two often is.
    BooleanMask : Element by element.

    Notes
    -----
    A GPU takes any number of column masks up to four, and at most one mask of each other kind.

    Examples
    --------
    >>> from cuattn.masks import AllOf, BlockMask, causal
    >>> mask = causal(4) & BlockMask([[True, False], [False, True]], 2, 2)
    >>> mask
    <AllOf (<ColumnMask 4 queries x 4 keys on the host> & <BlockMask 2 x 2 blocks of 2 x 2 on the host>)>
    >>> mask.dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """

    kind = "all"
    parts: tuple[Mask, ...] = ()
    _parameter_names = ("parts",)

    def __init__(self, parts: Sequence[Any]) -> None:
        given = [part if isinstance(part, Mask) else BooleanMask(part) for part in checks.sequence("parts", parts)]
        if not given:
            raise MaskError("parts is empty: expected at least one mask")
        self._settle(None, tuple(part for mask in given for part in mask.parts))

    def _derived(self) -> dict[str, Any]:
        parts = self.parts
        lengths = [sorted({getattr(part, name) for part in parts}, reverse=True) for name in ("n_queries", "n_keys")]
        try:
            leading = np.broadcast_shapes(*(part.leading for part in parts))
            # Where lengths are open, the largest.
            n_queries, n_keys = next(pair for pair in product(*lengths) if all(part.fits(*pair) for part in parts))
        except (ValueError, StopIteration):
            given = " & ".join(map(repr, parts))
            raise MaskError(f"{given}: expected masks of one shape, whose leading axes broadcast") from None
        # It lies where the first part does that is on a GPU.
        array = next((part._array for part in parts if part.on_device), None)
        return {"_array": array, "leading": leading, "n_queries": n_queries, "n_keys": n_keys}

    def _wait(self) -> None:
        for part in self.parts:
            part._wait()

    @cached_property
    def _walk(self) -> tuple[Mask, ...]:
        """The parts as backends walk them: of known lengths, and in one place."""
        bound = self._bound(self.n_queries, self.n_keys)
        return join((bound.to_device() if self.on_device else bound).parts)

    def to_device(self, device: int | None = None) -> "AllOf":
        """Return this mask with all parts on a GPU, see `ColumnMask.to_device`."""
        device = self.device if device is None else device
        return AllOf([part.to_device(device) for part in self.parts])

    def to_host(self) -> "AllOf":
        """Return this mask with all parts on the host; from a GPU this copies and waits."""
        return AllOf([part.to_host() for part in self.parts])

    def __repr__(self) -> str:
        return f"<AllOf ({' & '.join(map(repr, self.parts))})>"

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        return all(part.fits(n_queries, n_keys) for part in self.parts)

    def _bound(self, n_queries, n_keys):
        return AllOf([part.bind(n_queries, n_keys) for part in self.parts])

    def hidden(self, instance: Instance, rows: slice, keys: slice) -> Any:
        return reduce(or_, self._gathered(part.hidden(part.instance(instance), rows, keys) for part in self._walk))

    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        found = (part.states(part.instance(instance), block_m, block_n, start, stop) for part in self._walk)
        return reduce(namespace(self._array).minimum, self._gathered(found))

    def _gathered(self, arrays: Iterable[Any]) -> list[Any]:
        """Return arrays where the mask is: a function is evaluated on the host."""
        xp = namespace(self._array)
        return [xp.asarray(x) if isinstance(x, np.ndarray) else x for x in arrays]

    def _restrict(self, rows, keys):
        return AllOf([part.bind(self.n_queries, self.n_keys).restrict(rows, keys) for part in self.parts])

    def _heads(self, part):
        return AllOf([mask.heads(part.start, part.stop) for mask in self.parts])


def both(a: Any, b: Any) -> Mask:
    """Return what ``a & b`` is: a `ColumnMask` on the host where two intervals a column suffice, else an `AllOf`.

    Parameters
    ----------
    a, b : mask or bool array
        Their lengths agree and their leading axes broadcast.  What lies on a GPU is not read.
    """
    given = AllOf([a, b])
    n_queries, n_keys = given.n_queries, given.n_keys
    is_open = given.fits(n_queries - 1, n_keys) or given.fits(n_queries, n_keys - 1)
    parts: list[Mask] = []
    for part in given.parts:
        part = part if is_open else part.as_columns(n_queries, n_keys)
        for place, other in enumerate(parts):
            together = part.kind == other.kind and not part.on_device and not other.on_device
            if together and (joined := part.joined(other)) is not None:
                parts[place] = joined
                break
        else:
            parts.append(part)
    return parts[0] if len(parts) == 1 else AllOf(parts)
