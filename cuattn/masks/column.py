"""ColumnMask: two hidden row intervals per key column, the FlashMask paper's representation."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from cuattn.errors import DtypeError, MaskError, shown
from cuattn.masks import checks, convert
from cuattn.masks.base import Mask
from cuattn.masks.cuda_half import CudaHalf, Source, column_kernels, column_tables, source_of
from cuattn.masks.device import namespace, pack
from cuattn.masks.intervals import IntervalMask, join
from cuattn.masks.runs import Reach, indices, kept_before, length_of, taken


class ColumnMask(IntervalMask):
    """A mask of two row intervals per key: row i may not see key j if lts[j] <= i < lte[j] or uts[j] <= i < ute[j].

    The names say lower and upper triangle, start and end; but the two may lie anywhere and overlap, and
    ``start >= end`` is an empty interval.  A mask takes 16 bytes per key.

    Parameters
    ----------
    lts, lte, uts, ute : array_like of int, (..., n_keys)
        Interval bounds, 0 <= bound <= n_queries, all on the host or all on one GPU (any array library).  The
        leading axes broadcast among the four and, later, to the problem's (..., heads): query heads, so repeat
        vectors that were made per key head.  They are copied and stored as int32.
    n_queries : int
        Number of query rows.

    Attributes
    ----------
    lts, lte, uts, ute : int32 array, (..., n_keys)
        The bounds, read-only; NumPy arrays or, on a GPU (`on_device`, `device`), CuPy arrays.
    n_queries, n_keys, leading : int, int, tuple of int
        Shape of the matrix that is masked and of the axes before it.

    Raises
    ------
    MaskError
        A bound on the host lies outside [0, n_queries], or the shapes do not fit.  Bounds on a GPU are never read
        back, but clamped.
    DtypeError
        A vector is not of integers, or the vectors lie in different places.

    See Also
    --------
    from_function : Makes one of a Python function that is one.
    causal_document : A constructor; the others stand beside it.
    BlockMask : Whole blocks.

    Notes
    -----
    Masks are immutable and, on the host, pickle and compare by content.

    References
    ----------
    G. Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", section 4.1.

    Examples
    --------
    Causal attention within two documents of two tokens each:

    >>> from cuattn.masks import ColumnMask
    >>> mask = ColumnMask(lts=[2, 2, 4, 4], lte=[4, 4, 4, 4], uts=[0, 0, 0, 0], ute=[0, 1, 2, 3], n_queries=4)
    >>> mask
    <ColumnMask 4 queries x 4 keys on the host>
    >>> mask.dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """

    kind = "column"
    _names = ("lts", "lte", "uts", "ute")
    cuda: ClassVar[CudaHalf | None] = CudaHalf(1, 4, "column", None, column_tables, column_kernels)
    lts: Any
    lte: Any
    uts: Any
    ute: Any

    def __init__(self, lts: Any, lte: Any, uts: Any, ute: Any, *, n_queries: int) -> None:
        n_queries = checks.integer("n_queries", n_queries)
        vectors = checks.vectors(dict(zip(self._names, (lts, lte, uts, ute), strict=True)))
        for name, vector in vectors.items():
            checks.in_range(name, vector, n_queries)
        self._settle(pack(list(vectors.values()), n_queries), n_queries)

    @classmethod
    def _of(cls, n_queries: int, lts: Any = None, lte: Any = None, uts: Any = 0, ute: Any = 0) -> "ColumnMask":
        """Build a mask from trusted integer vectors or scalars that broadcast to (..., n_keys); hide nothing else."""
        vectors = [n_queries if bound is None else bound for bound in (lts, lte, uts, ute)]
        return cls._wrap(pack(vectors, n_queries), n_queries)

    @cached_property
    def reach(self) -> Reach | None:
        """For backends: the band that this mask is, or None where it is none or where that is not known.

        ``(left, right)`` says that row i sees key j if ``i - left <= j <= i + right``; None leaves that side open.
        On Hopper such a mask (`full`, `causal`, `sliding_window`, a single document ...) costs no more than
        ``is_causal`` or ``window``.  It is known of host masks and their copies on a GPU, not of vectors from a GPU.

        Examples
        --------
        >>> from cuattn.masks import causal, causal_document, sliding_window
        >>> sliding_window(8, 3).reach, causal(4, 6).reach, causal_document([3, 5]).reach
        ((2, 0), (None, 2), None)
        """
        if self.on_device:
            return None
        found = (convert.find_reach(self._bounds(instance), self.n_queries) for instance in np.ndindex(*self.leading))
        first = next(found, None)
        return first if first and all(reach == first for reach in found) else None

    def __repr__(self) -> str:
        leading = f"{self.leading} x " if self.leading else ""
        return f"<ColumnMask {leading}{self.n_queries} queries x {self.n_keys} keys {self._where}>"

    @classmethod
    def stack(cls, masks: Sequence[Any]) -> "ColumnMask":
        """Join masks of one shape along new leading axes.

        Parameters
        ----------
        masks : sequence of ColumnMask, or nested sequences of them
            At least one; each level of nesting becomes an axis.

        Returns
        -------
        ColumnMask

        Examples
        --------
        One mask per batch element, for all heads: the axis of heads has length 1.

        >>> from cuattn.masks import ColumnMask, causal_document
        >>> ColumnMask.stack([[causal_document([3, 5])], [causal_document([8])]])
        <ColumnMask (2, 1) x 8 queries x 8 keys on the host>
        """
        parts = [mask if isinstance(mask, ColumnMask) else cls.stack(mask) for mask in checks.sequence("masks", masks)]
        if not parts:
            raise MaskError("masks is empty: expected at least one mask")
        first = parts[0]
        for part in parts:
            if part.on_device:
                raise DtypeError(f"masks holds {part!r}: expected masks on the host")
            if (part.n_queries, part._array.shape) != (first.n_queries, first._array.shape):
                raise MaskError(f"masks holds {first!r} and {part!r}: expected one shape")
        return cls._wrap(np.stack([part._array for part in parts], axis=1), first.n_queries)

    @classmethod
    def from_dense(cls, mask: Any) -> "ColumnMask":
        """Convert a boolean matrix in which each column hides at most two intervals of rows.

        Parameters
        ----------
        mask : array_like of bool, (..., n_queries, n_keys)
            True = attend.

        Returns
        -------
        ColumnMask
            On the host, or on the GPU where `mask` is (which then waits for the check).

        Raises
        ------
        MaskError
            A column hides more than two intervals; the message names the first.

        Examples
        --------
        >>> import numpy as np
        >>> from cuattn.masks import ColumnMask, causal
        >>> ColumnMask.from_dense(np.tri(5, dtype=bool)) == causal(5)
        True
        """
        visible = checks.booleans("mask", mask)
        n_queries = checks.integer("mask.shape[-2]", visible.shape[-2])
        return cls._of(n_queries, *convert.from_dense(visible))

    @classmethod
    def from_startend_row_indices(cls, idx: Any, is_causal: bool, n_queries: int) -> "ColumnMask":
        """Convert FlashMask's tensor of row indices.

        Parameters
        ----------
        idx : array_like of int, (..., n_keys, 1 | 2 | 4)
            FlashMask has the leading axes (batch, heads).  The last axis holds, causal: LTS or LTS, LTE; not
            causal: LTS, UTE or LTS, LTE, UTS, UTE.  What is missing is 0 for a start and n_queries for an end.
        is_causal : bool
            Hide also the keys after the diagonal, which ends at the bottom right.
        n_queries : int
            Number of query rows.

        Returns
        -------
        ColumnMask

        Raises
        ------
        MaskError
            The last axis does not fit `is_causal`, or an index lies outside [0, n_queries].

        Examples
        --------
        >>> from cuattn.masks import ColumnMask, causal_document
        >>> ColumnMask.from_startend_row_indices([[2], [2], [4], [4]], True, 4) == causal_document([2, 2])
        True
        """
        n_queries = checks.integer("n_queries", n_queries)
        if not isinstance(is_causal, bool | np.bool_):
            raise DtypeError(f"is_causal = {shown(is_causal)}: expected a bool")
        idx = checks.integers("idx", idx)
        names = {1: ("lts",), 2: ("lts", "lte")} if is_causal else {2: ("lts", "ute"), 4: cls._names}
        if idx.ndim < 2 or idx.shape[-1] not in names:
            expected = f"(..., n_keys, {' or '.join(map(str, names))}), {'' if is_causal else 'not '}causal"
            raise MaskError(f"idx has shape {idx.shape}: expected {expected}")
        checks.in_range("idx", idx, n_queries)
        xp, (n_keys, columns) = namespace(idx), idx.shape[-2:]
        given = {name: idx[..., column] for column, name in enumerate(names[columns])}
        if is_causal:
            given["ute"] = xp.clip(xp.arange(n_keys, dtype=xp.int64) - n_keys + n_queries, 0, n_queries)
        return cls._of(n_queries, **given)

    def to_startend_row_indices(self) -> Any:
        """Return FlashMask's tensor of row indices, to be used without its causal flag.

        Returns
        -------
        int32 array, (batch, heads, n_keys, 4)
            LTS, LTE, UTS, UTE; an axis that the mask lacks has length 1, and one leading axis is the heads.  More
            than two are a MaskError.

        Examples
        --------
        >>> from cuattn.masks import causal
        >>> causal(4).to_startend_row_indices().shape
        (1, 1, 4, 4)
        """
        if len(self.leading) > 2:
            raise MaskError(f"leading axes {self.leading}: expected at most (batch, heads)")
        with self._scope() as xp:
            bounds = xp.stack(list(self._array), axis=-1)
            return bounds.reshape(*(1,) * (2 - len(self.leading)), *bounds.shape)

    def rows(self) -> "ColumnMask":
        """Return the mask of the transposed problem, in which the queries are keys, in O(n_queries + n_keys).

        Returns
        -------
        ColumnMask
            With n_keys rows and n_queries columns, on the host: its `dense()` is this one's with the last two axes
            swapped.

        Raises
        ------
        MaskError
            A row hides more than two intervals of keys; the message names the first.

        Examples
        --------
        >>> from cuattn.masks import causal
        >>> causal(3).rows().dense().astype(int)
        array([[1, 1, 1],
               [0, 1, 1],
               [0, 0, 1]])
        """
        return self._of(self.n_keys, *convert.transpose(self.to_host()._array, self.n_queries))

    def source(self) -> Source:
        return source_of(namespace(self._array).moveaxis(self._array, 0, -2))

    def joined(self, other: Mask) -> Mask | None:
        found = convert.runs(join((self, other))[0]._array, self.n_queries)
        two = (found[0] <= 2).all()
        return self._of(self.n_queries, *convert.assign(*found, self.n_queries)) if two else None

    def _restrict(self, rows, keys):
        return self._of(length_of(rows), *kept_before(taken(self._array, indices(keys), -1), rows))

    def _heads(self, part):
        return self._wrap(self._array[..., part, :].copy(), *self._parameters)
