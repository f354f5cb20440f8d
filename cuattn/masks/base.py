"""What every mask is: one protocol for whoever reads it, immutable, comparable, picklable, on the host or on one GPU.

A backend is handed a tuple of masks, which hold together, bound to its problem's lengths (:meth:`Mask.bind`); it never
asks what kind a mask is.  The CPU walks a mask by tiles of its own size::

    parts = join((*masks, band))             # masks.intervals: all masks of intervals become one, which is quicker
    instance = mask.instance((batch, head))  # equal for matrices under the same mask: a key for what is remembered
    mask.states(instance, rows, keys, t, t + 16)         # of 16 row tiles; the minimum over the parts holds
    mask.patterns(instance, rows, keys, row_tiles, key_tiles)  # a key for each of these tiles, or None
    mask.hidden(instance, row_slice, key_slice)          # any part as booleans; parts combine by |
"""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np

from cuattn.errors import MaskError
from cuattn.io_model.sizes import cdiv
from cuattn.masks import checks
from cuattn.masks.cuda_half import CudaHalf, Generated, Source
from cuattn.masks.draw import Drawable
from cuattn.masks.immutable import Immutable
from cuattn.masks.runs import Runs, as_runs

Self = TypeVar("Self", bound="Mask")

Instance = tuple[int, ...]
"""Index into a mask's own leading axes: one of its matrices."""

KINDS: "dict[str, type[Mask]]" = {}
"""The classes of masks by the name of their kind."""


class Mask(Immutable, Drawable):
    """What every mask can tell.

    A new kind of mask needs `kind`, `leading`, `n_queries`, `n_keys`, `hidden` and `states`, and calls `_settle` with
    its array and parameters when it is built; `_restrict` where parts of it are taken; everything else follows from
    these, if slowly.
    """

    kind: ClassVar[str]
    """The name by which a problem knows this kind of mask: "column", "block", "boolean", "function"."""

    cuda: ClassVar[CudaHalf | None] = None
    """How kernels take this kind of mask; None: not at all."""

    elements: ClassVar[CudaHalf | None] = None
    """How they take it in place of a boolean mask: with its elements computed ahead; None: not at all."""

    n_queries: int
    n_keys: int

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "kind" in cls.__dict__:
            KINDS[cls.kind] = cls

    borrowed: bool = False
    """Whether the mask is of a caller's arrays, who may change them after a call: nothing made of it may be kept."""

    unowned: bool = False
    """Whether the mask is a caller's array itself: an operand of the call."""

    leading: tuple[int, ...]
    """Shape of the axes before queries and keys; they broadcast to a problem's (..., heads)."""

    @abstractmethod
    def hidden(self, instance: Instance, rows: slice, keys: slice) -> Any:
        """Return which elements of a part are hidden, where the mask is: for backends.

        Parameters
        ----------
        instance : tuple of int
            Which of the mask's matrices.
        rows, keys : slice
            From and to rows in [0, n_queries] and keys in [0, n_keys].

        Returns
        -------
        bool array, (keys, rows)
            Or one that broadcasts to it.
        """

    # For backends: a mask's place in a problem.

    @property
    def parts(self) -> "tuple[Mask, ...]":
        """The masks that hold together in this one: for all but `AllOf` the mask itself."""
        return (self,)

    @cached_property
    def layout(self) -> tuple[Hashable, ...]:
        """All of the mask that a launch depends on: kind, shape, parameters and band, but not what else is hidden."""
        array = self._array
        return (self.kind, array is not None and (array.shape, array.strides), self.reach, *self._parameters)

    def fits(self, n_queries: int, n_keys: int) -> bool:
        """Return whether this is a mask of an (n_queries, n_keys) matrix."""
        return (self.n_queries, self.n_keys) == (n_queries, n_keys)

    def bind(self: Self, n_queries: int | None = None, n_keys: int | None = None) -> Self:
        """Return this mask of a matrix whose lengths are known, where the mask itself leaves them open.

        Parameters
        ----------
        n_queries, n_keys : int, optional
            Lengths, by default the mask's own.

        Raises
        ------
        MaskError
            It is not a mask of such a matrix.
        """
        n_queries = self.n_queries if n_queries is None else checks.integer("n_queries", n_queries)
        n_keys = self.n_keys if n_keys is None else checks.integer("n_keys", n_keys)
        if not self.fits(n_queries, n_keys):
            raise MaskError(f"n_queries = {n_queries}, n_keys = {n_keys}: expected lengths that fit {self!r}")
        return self if (n_queries, n_keys) == (self.n_queries, self.n_keys) else self._bound(n_queries, n_keys)

    def _bound(self: Self, n_queries: int, n_keys: int) -> Self:
        raise NotImplementedError(f"{type(self).__name__}.fits accepts lengths that are not the mask's own")

    def instance(self, index: Sequence[int]) -> Instance:
        """Return which of the mask's matrices belongs to an index into a problem's (*batch, heads)."""
        own = index[len(index) - len(self.leading) :]
        return tuple([0 if n == 1 else i for i, n in zip(own, self.leading, strict=True)])

    def source(self) -> Source:
        """Return where the mask's numbers lie on a GPU, for kinds that have a `cuda` half."""
        raise NotImplementedError(f"{type(self).__name__}.source")

    generated: Mapping[str, Generated] = MappingProxyType({})
    """The texts that kernels are compiled with, of a mask that is a function, by what they are for."""

    fields: Mapping[str, int] = MappingProxyType({})
    """Fields of ``Params`` and ``MaskParams`` beside those of `source`."""

    def arrays_on(self, device: int) -> tuple[Any, ...]:
        """Return what kernels read of the mask on a GPU, written before what its current stream does next."""
        twin = self.to_device(device)
        twin._wait()
        return (twin._array,)

    # For backends: what one instance hides, by tiles.

    @abstractmethod
    def states(self, instance: Instance, block_m: int, block_n: int, start: int, stop: int) -> Any:
        """Return the states of row tiles start to stop, int8 (stop - start, Tc), as in `tile_states`."""

    def patterns(
        self, instance: Instance, block_m: int, block_n: int, row_tiles: np.ndarray, key_tiles: np.ndarray
    ) -> Sequence[Hashable] | None:
        """Return one key per tile, of which equal ones imply equal element masks; None where that takes long to tell.

        The keys hold for whole tiles, and for instances, tile sizes and masks that are the same.
        """
        return None

    # For everybody.

    __array_ufunc__ = None  # ``array & mask`` is this class's affair

    def as_columns(self, n_queries: int, n_keys: int) -> "Mask":
        """Return the `ColumnMask` of these lengths that the mask is, if it is one on the host; else the mask itself."""
        return self

    def joined(self, other: "Mask") -> "Mask | None":
        """Return one mask on the host that says what this one and another of its kind do; None where there is none."""
        return None

    def __and__(self, other: Any) -> "Mask":
        """Return the mask of what both show: of another mask, or of a boolean array."""
        from cuattn.masks.combine import both

        return both(self, other) if isinstance(other, Mask) or hasattr(other, "dtype") else NotImplemented

    __rand__ = __and__

    def dense(self, n_queries: int | None = None, n_keys: int | None = None) -> Any:
        """Return the mask as a boolean matrix, O(n_queries * n_keys).

        Parameters
        ----------
        n_queries, n_keys : int, optional
            Lengths, for masks that leave them open (see `bind`).

        Returns
        -------
        bool array, (..., n_queries, n_keys)
            True = attend; on the GPU that holds the mask, else on the host.

        Examples
        --------
        >>> from cuattn.masks import sliding_window
        >>> sliding_window(4, 2).dense().astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [0, 1, 1, 0],
               [0, 0, 1, 1]])
        """
        mask = self.bind(n_queries, n_keys)
        rows, keys = slice(0, mask.n_queries), slice(0, mask.n_keys)
        return mask._stack(lambda instance: ~mask.hidden(instance, rows, keys).T, (rows.stop, keys.stop), bool)

    def tile_states(self, block_m: int, block_n: int, n_queries: int | None = None, n_keys: int | None = None) -> Any:
        """Classify the tiles of the matrix.

        Parameters
        ----------
        block_m, block_n : int
            Rows and keys of a tile, >= 1.
        n_queries, n_keys : int, optional
            Lengths, for masks that leave them open (see `bind`).

        Returns
        -------
        int8 array, (..., Tr, Tc)
            With Tr = ceil(n_queries / block_m), Tc = ceil(n_keys / block_n): 0 = skip, nothing is visible; 1 =
            partial, elements must be tested; 2 = full, everything is visible.  A tile may be called partial that
            is in truth full or empty, never the reverse.

        References
        ----------
        FlashMask, equation 4; the union of the two intervals is recognised only for keys that no row may see.

        Examples
        --------
        >>> from cuattn.masks import causal
        >>> causal(8).tile_states(4, 4)
        array([[1, 0],
               [2, 1]], dtype=int8)
        """
        tile, mask = checks.tile(block_m, block_n), self.bind(n_queries, n_keys)
        shape = cdiv(mask.n_queries, tile[0]), cdiv(mask.n_keys, tile[1])
        return mask._stack(lambda instance: mask.states(instance, *tile, 0, shape[0]), shape, np.int8)

    def block_sparsity(
        self, block_m: int = 128, block_n: int = 128, n_queries: int | None = None, n_keys: int | None = None
    ) -> float:
        """Return the share of tiles that are skipped, the paper's rho, over all leading axes.

        Parameters
        ----------
        block_m, block_n : int, optional
            Rows and keys of a tile.
        n_queries, n_keys : int, optional
            Lengths, for masks that leave them open (see `bind`).

        Returns
        -------
        float
            In [0, 1]; 0 if there are no tiles.  From a GPU numbers are read back.

        Examples
        --------
        >>> from cuattn.masks import causal
        >>> causal(1024).block_sparsity()
        0.4375
        """
        states = self.tile_states(block_m, block_n, n_queries, n_keys)
        with self._scope():
            return int((states == 0).sum()) / max(states.size, 1)

    def _stack(self, of: Callable[[Instance], Any], shape: tuple[int, ...], dtype: Any) -> Any:
        """Join what a function returns of each instance along the leading axes."""
        with self._scope() as xp:
            joined = xp.empty((*self.leading, *shape), dtype)
            for instance in np.ndindex(*self.leading):
                joined[instance] = of(instance)
        return joined

    def restrict(self, rows: Any = slice(None), keys: Any = slice(None)) -> "Mask":
        """Return the mask of a part of the matrix, whose rows and keys are counted anew from 0.

        Parameters
        ----------
        rows, keys : slice, or sequence of (start, stop), optional
            What the part takes: neighbours, or runs of them in ascending order.

        Returns
        -------
        mask
            A ColumnMask of a ColumnMask, in O(n_keys).

        Raises
        ------
        MaskError
            The runs are not ascending or leave the matrix.

        Examples
        --------
        >>> from cuattn.masks import causal
        >>> causal(6).restrict(rows=[(0, 1), (5, 6)], keys=slice(4, 6)).dense().astype(int)
        array([[0, 0],
               [1, 1]])
        """
        rows, keys = as_runs("rows", rows, self.n_queries), as_runs("keys", keys, self.n_keys)
        with self._scope():
            return self._restrict(rows, keys)

    def _restrict(self, rows: Runs, keys: Runs) -> "Mask":
        raise NotImplementedError(f"{type(self).__name__}._restrict")

    def heads(self, start: int, stop: int) -> "Mask":
        """Return the mask of some query heads, the last of the leading axes; itself if all heads share it.

        Parameters
        ----------
        start, stop : int
            From and to heads.

        Examples
        --------
        >>> from cuattn.masks import ColumnMask, causal, full
        >>> ColumnMask.stack([full(8), causal(8)]).heads(1, 2)
        <ColumnMask (1,) x 8 queries x 8 keys on the host>
        """
        if self.leading[-1:] in ((), (1,)):
            return self
        with self._scope():
            return self._heads(slice(start, stop))

    def _heads(self, part: slice) -> "Mask":
        raise NotImplementedError(f"{type(self).__name__}._heads")
