"""Sums over keys for every row, on the CPU: tiles of exponents as matrix products, threads over row tiles.

An exponent is a squared distance times a scale, which is in the points already.  Up to DIRECT_DIM coordinates it is as
good as from differences of coordinates, at a fraction of the time: points, relative to their mean, are split in parts
with few enough digits that products of these are exact, and rests.  Products of float32 points that lie too far apart
for that are taken in float64.  Points too near one another even for that are subtracted.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu import threads
from cuattn.cpu.arithmetic import BASE_2
from cuattn.cpu.blocks import SMALL_PRODUCT
from cuattn.io_model.sizes import cdiv
from cuattn.masks.intervals import FULL, SKIP
from cuattn.pairwise.functions import KernelFunction, least, power_of_2
from cuattn.pairwise.pairs import DIRECT_DIM, Pairs, Sums, Wanted

_ROWS, _KEYS = 512, 256  # of a tile: it fits a core's share of the second cache
_FEWEST = 64  # rows of a small product
_IN_ORDER = 16  # rows and columns of a product, in whose multiples BLAS adds terms in the order that they come in
_MOST_COLUMNS = 16  # of sums that each row tile has of all points, and that repay computing kernel values once
_WIDE_DIM = 16  # coordinates of float32 points whose exponents repay being float64 where those are then in range
_NANOSECONDS = 1.0  # of a pair
_NEAR = 2.0**-10  # of the points' extent: distances of many coordinates that are taken anew
_LOST = 2.0**-21  # of the square of a distance from the centre, what float32 products lose
_WORTH_TELLING = 0.01
_DIGITS = {np.dtype(np.float32): 11, np.dtype(np.float64): 22}  # of the coarse parts, in bits
_LOG2_E = math.log2(math.e)

Index = tuple[int, ...]


class Close(NamedTuple):
    """Rows and keys of pairs whose points are near one another, and the points' differences."""

    rows: ndarray
    keys: ndarray
    differences: ndarray


class Rows:
    """A walk over tiles of rows and keys.

    Where these are the same points, kernel values of a tile beyond the diagonal are those of the tile's mirror image,
    too: each is computed once.

    Parameters
    ----------
    x, y : ndarray, (..., M, d) and (..., N, d)
    function : KernelFunction
    factor : float
        What makes w of a squared distance.
    masks : sequence of Mask
    transposed : bool
        Whether the masks' rows are the keys here.
    exact : bool
        Whether distances are to be as good as sums of squared differences.
    """

    def __init__(
        self,
        x: ndarray,
        y: ndarray,
        function: KernelFunction,
        factor: float,
        masks: Sequence[Any] = (),
        *,
        transposed: bool = False,
        exact: bool = True,
    ) -> None:
        self._x, self._y, self._function, self._factor = x, y, function, factor
        self._masks, self._transposed, self._exact = masks, transposed, exact
        self.batch, (self._rows, self._dim) = x.shape[:-2], x.shape[-2:]
        self._keys, self._dtype, self._scale = y.shape[-2], x.dtype, factor * function.base
        self._operands: dict[Index, Operands] = {}
        self._weights: dict[tuple[str, Index], ndarray | None] = {}  # u and v, times the points' factors
        self.turns, self.lost = threads.Turns(), 0.0
        self.sizes = [cdiv(self._rows, _ROWS)] * math.prod(self.batch)

    def run(self, wanted: Wanted) -> Sums:
        """Return the sums that are wanted."""
        shape, self._wanted = (*self.batch, self._rows), wanted
        columns = 1 if wanted.v is None else wanted.v.shape[-1]
        self._results = Sums(
            np.zeros((*shape, columns)) if wanted.sums or wanted.logs else None,
            np.full(shape, -np.inf) if wanted.logs else None,
            np.zeros((*shape, self._dim)) if wanted.slopes else None,
            np.zeros(shape) if wanted.moments else None,
        )
        self._finite = wanted.v is None or bool(np.isfinite(wanted.v).all())
        alone = not (self._masks or wanted.slopes) and columns <= _MOST_COLUMNS
        self._symmetric = alone and np.array_equal(self._x, self._y)
        if 0 not in (*shape, self._keys):
            pairs = math.prod(shape) * self._keys
            threads.run(self, lambda: self._tile, threads.useful(sum(self.sizes), _NANOSECONDS * pairs))
        for index, found in self._operands.items():
            if self._results.sums is not None:
                self._results.sums[index] *= found.of_rows
            if wanted.logs and found.bounded:
                with np.errstate(divide="ignore"):
                    logs = np.log2(self._results.sums[index][:, 0])
                self._results.logs[index] = (logs + found.greatest) / _LOG2_E
        return self._results

    def item(self, group: int, number: int) -> tuple[Index, int, AbstractContextManager[None]]:
        """Return a row tile of one of the batch's matrices, and its turn at that's sums."""
        index = tuple(map(int, np.unravel_index(group, self.batch))) if self.batch else ()
        if index not in self._operands:
            found = self._operands_of(index)
            for name, factor in (("u", found.of_rows), ("v", found.of_keys)):
                w = getattr(self._wanted, name)
                self._weights[name, index] = factor if w is None else w[index] * factor
            if found.of_keys.dtype == self._dtype:
                self.lost = max(self.lost, _LOST * (found.reach / 2) ** 2 / self._function.base)
            self._operands[index] = found
        return index, number, self.turns.take(group) if self._symmetric else nullcontext()

    def _operands_of(self, index: Index) -> Operands:
        """Return one matrix's operands: of float64 where that spares a soft minimum the references of its rows."""
        logs = self._wanted.key_log[index] * _LOG2_E if self._wanted.logs else None
        x, y = self._x[index], self._y[index]
        options = dict(exact=self._exact, moments=self._wanted.moments)
        found = operands(x, y, self._function, self._scale, logs, **options)
        if logs is None or found.bounded or not BASE_2 or self._dim > _WIDE_DIM:
            return found
        wide = operands(x.astype(np.float64), y.astype(np.float64), self._function, self._scale, logs, **options)
        return wide if wide.bounded else found

    def _tile(self, item: tuple[Index, int, AbstractContextManager[None]]) -> None:
        """Sum over all keys for a tile of rows."""
        index, tile, turn = item
        left, right, centre, _, bounded, greatest, _, of_keys, near = self._operands[index]
        whole = slice(tile * _ROWS, (tile + 1) * _ROWS)
        rows = slice(whole.start, min(whole.stop, self._rows))
        instances = [mask.instance(index) for mask in self._masks]
        states = self._states(instances, tile)
        logs = _LogSum(rows.stop - rows.start, self._dtype) if self._wanted.logs and not bounded else None
        mirrored = self._symmetric and logs is None
        totals = None if self._results.sums is None else self._results.sums[index][rows]
        if mirrored:
            totals = np.zeros((self._rows - rows.start, totals.shape[-1]))
        work = of_keys.dtype
        products, rounded, room = (np.empty((_ROWS, _KEYS), dtype) for dtype in (left.dtype, work, centre.dtype))
        for number in range(rows.start // _KEYS if mirrored else 0, cdiv(self._keys, _KEYS)):
            if states is not None and states[number] == SKIP:
                continue
            keys = slice(number * _KEYS, min((number + 1) * _KEYS, self._keys))
            hidden = None if states is None or states[number] == FULL else self._hidden(instances, rows, keys)
            s = _multiply(left[whole], right[:, keys.start : keys.start + _KEYS], products)
            s = s[: rows.stop - rows.start, : keys.stop - keys.start]
            close = self._differ(index, rows, keys, s, near) if near and s.max() > -near else None
            if logs is None and self.lost > _WORTH_TELLING:
                np.minimum(s, 0, out=s)  # a distance is none less than 0
            if s.dtype != work or not s.flags.c_contiguous:
                wide, s = s, _part(rounded, *s.shape)
                np.copyto(s, wide, casting="same_kind")
            if logs is not None:
                logs.add(s, hidden)
                continue
            k = self._add(index, rows, keys, s, hidden, totals, close, _part(room, *s.shape))
            if mirrored and keys.start >= rows.stop:
                totals[keys.start - rows.start : keys.stop - rows.start] += k.T @ self._weights["v", index][rows]
        if logs is not None:
            self._results.logs[index][rows] = (logs.total() + greatest) / _LOG2_E
        elif mirrored:
            with turn:
                self._results.sums[index][rows.start :] += totals

    def _differ(self, index: Index, rows: slice, keys: slice, s: ndarray, near: float) -> Close:
        """Replace a tile's exponents of points `near` one another by those of differences, which are returned."""
        places = np.nonzero(s > -near)
        of_row, of_key = places
        differences = np.subtract(self._x[index][rows][of_row], self._y[index][keys][of_key], dtype=np.float64)
        s[places] = -self._scale * np.square(differences).sum(-1)
        return Close(*places, differences)

    def _add(
        self,
        index: Index,
        own: slice,
        others: slice,
        s: ndarray,
        hidden: Any,
        totals: ndarray | None,
        close: Close | None,
        room: ndarray,
    ) -> ndarray:
        """Add what one tile has to sums, the rows' `totals`, and slopes; return its kernel values."""
        wanted, bounded, rows, keys = self._wanted, self._operands[index].bounded, (*index, own), (*index, others)
        if hidden is not None:
            np.copyto(s, 0, where=hidden)
        w = s * s.dtype.type(-1 / self._function.base) if wanted.moments else None
        if wanted.row_log is not None:
            bounded = False
            s += wanted.key_log[keys] * s.dtype.type(_LOG2_E)
            s += (wanted.row_log[rows] * s.dtype.type(_LOG2_E))[:, None]
        k, slope = self._function.evaluate(s, wanted.slopes, bounded)
        if hidden is not None:
            np.copyto(k, 0, where=hidden)
        v = self._weights["v", index][others]
        if totals is not None:
            totals[: len(k)] += product(k, v, hidden if not self._finite else None)
        if wanted.slopes:
            u = self._weights["u", index][own]
            for factor in (v.T, u) if v.shape[-1] == 1 else (np.matmul(u, v.T),):  # BLAS is slow on vectors
                slope *= factor
            if hidden is not None:
                np.copyto(slope, 0, where=hidden)
            if wanted.moments:
                self._results.moments[rows] += np.einsum("ij,ij->i", slope, w)
            if close is not None:
                weights = slope[close.rows, close.keys]
                np.add.at(self._results.directions[rows], close.rows, weights[:, None] * close.differences)
                slope[close.rows, close.keys] = 0
            self._pull(index, own, others, slope, room)
        return k

    def _pull(self, index: Index, own: slice, others: slice, weights: ndarray, room: ndarray) -> None:
        """Add the differences of a tile's points, weighed; arrays of its size made anew would be slow to come by."""
        centre = self._operands[index].centre
        x, y = self._x[index][own] - centre, self._y[index][others] - centre
        if self._masks:
            y = np.where(np.isfinite(y), y, 0)
        if weights.dtype != room.dtype:
            np.copyto(room, weights)
            weights = room
        pulled = weights @ np.concatenate([y, np.ones_like(y[:, :1])], -1)
        self._results.directions[index][own] += x * pulled[:, -1:] - pulled[:, :-1]

    def _states(self, instances: Sequence[Any], tile: int) -> ndarray | None:
        """Return the states of a row tile's key tiles; None where nothing is hidden."""
        if not self._masks:
            return None
        states = np.full(cdiv(self._keys, _KEYS), FULL, np.int8)
        for mask, instance in zip(self._masks, instances, strict=True):
            if self._transposed:
                found = mask.states(instance, _KEYS, _ROWS, 0, len(states))[:, tile]
            else:
                found = mask.states(instance, _ROWS, _KEYS, tile, tile + 1)[0]
            np.minimum(states, found, out=states)
        return states

    def _hidden(self, instances: Sequence[Any], rows: slice, keys: slice) -> ndarray:
        """Return which pairs of a tile are hidden."""
        hidden = np.zeros((rows.stop - rows.start, keys.stop - keys.start), bool)
        for mask, instance in zip(self._masks, instances, strict=True):
            hidden |= mask.hidden(instance, keys, rows) if self._transposed else mask.hidden(instance, rows, keys).T
        return hidden


class _LogSum:
    """The base-2 logarithm of a sum of powers of 2, row by row, from tiles: the sum l relative to 2^m."""

    def __init__(self, rows: int, dtype: np.dtype) -> None:
        self._m, self._l = np.full(rows, -np.inf, dtype), np.zeros(rows)

    def add(self, s: ndarray, hidden: Any) -> None:
        """Add 2^s of a tile."""
        if hidden is not None:
            np.copyto(s, -np.inf, where=hidden)
        m = np.maximum(self._m, s.max(-1))
        reference = np.where(np.isfinite(m), m, 0)
        s -= reference[:, None]
        self._l *= np.exp2(self._m - reference, dtype=np.float64)
        self._m = m
        self._l += power_of_2(s, False) @ np.ones_like(s[0])

    def total(self) -> ndarray:
        """Return the logarithm."""
        return self._m + np.log2(self._l)


def _multiply(left: ndarray, right: ndarray, tile: ndarray) -> ndarray:
    """Compute a matrix product in a tile's memory, by as many rows, a power of two, as make a small product."""
    out = _part(tile, len(left), right.shape[1])
    at_once = 1 << (SMALL_PRODUCT // right.size).bit_length() - 1 if right.size <= SMALL_PRODUCT else 1
    if at_once < _FEWEST or len(left) % at_once:
        return np.matmul(left, right, out)
    np.matmul(left.reshape(-1, at_once, len(right)), right, out.reshape(-1, at_once, right.shape[1]))
    return out


def product(k: ndarray, v: ndarray, hidden: Any) -> ndarray:
    """Return k @ v; where `hidden`, v may hold anything."""
    if hidden is None:
        return k @ v
    return np.stack([np.where(hidden, 0, k * column).sum(-1) for column in v.T], -1)


def _part(tile: ndarray, *shape: int) -> ndarray:
    """Return contiguous memory of a tile for so many rows and keys."""
    return tile if shape == tile.shape else tile.ravel()[: math.prod(shape)].reshape(shape)


class Operands(NamedTuple):
    """Matrices whose product has the exponents -scale |x - y|^2 of base 2 of points.

    Attributes
    ----------
    left, right : ndarray, (M, p) and (p, N)
        Or more rows and columns, of 0.
    centre : ndarray
        The points'.
    reach : float
        A bound of distances, times the scale's root.
    bounded : bool
        Whether no power of 2 is out of range.
    greatest : float
        Of the keys' logarithms of base 2, which exponents have then in addition, less this one.
    of_rows, of_keys : ndarray, (M, 1) and (N, 1)
        What powers of 2 are yet to be multiplied by.
    near : float
        Exponents less than this below 0 are not as good as is asked.
    """

    left: ndarray
    right: ndarray
    centre: ndarray
    reach: float
    bounded: bool
    greatest: float
    of_rows: ndarray
    of_keys: ndarray
    near: float


def operands(
    x: ndarray,
    y: ndarray,
    function: KernelFunction,
    scale: float,
    logs: ndarray | None,
    *,
    exact: bool,
    moments: bool,
) -> Operands:
    """Return the operands of a matrix product for points.

    Parameters
    ----------
    x, y : ndarray, (M, d) and (N, d)
    function : KernelFunction
    scale : float
    logs : ndarray or None
        The keys' logarithms of base 2.
    exact : bool
        Whether distances are to be as good as sums of squared differences.
    moments : bool
        Whether exponents themselves are wanted, too.
    """
    work, root = x.dtype, np.sqrt(np.longdouble(scale))
    dtype = np.dtype(np.float64) if exact else work
    x, y = x.astype(np.float64, copy=False), y.astype(np.float64, copy=False)
    there = np.isfinite(y).all(-1)
    centre = (y if there.all() else y[there] if there.any() else np.zeros_like(y[:1])).mean(0).astype(dtype)
    reach = float(root) * sum(math.sqrt(_largest(np.square(p - centre).sum(-1))) for p in (x, y))
    greatest, span = 0.0, 0.0
    if logs is not None:
        greatest, span = (float(logs.max()), float(np.ptp(logs))) if np.isfinite(logs).all() else (0.0, math.inf)
    bounded = reach**2 + span < 0.9 * -least(work)
    powers = function.score is None  # of 2 are the results, smooth at distance 0
    if exact and bounded and powers:
        dtype = work
    of_rows, of_keys = (np.ones((len(p), 1), work) for p in (x, y))
    few = x.shape[-1] <= DIRECT_DIM
    split = exact and dtype == work and few
    if split:
        unit = 2.0 ** (math.frexp(reach)[1] - _DIGITS[dtype])
        wider = np.longdouble if work == np.float64 else np.float64
        left, right, rests = _split(*[(p - centre.astype(wider)) * root.astype(wider) for p in (x, y)], unit)
        if powers and bounded and not moments:
            of_rows, of_keys = (np.exp2(-np.where(np.isfinite(rest), rest, 0)).astype(work) for rest in rests)
        else:
            left, right = [*left, -rests[0], -of_rows], [*right, of_keys, rests[1]]
    else:
        left, right = _expanded(*[((p - centre) * float(root)).astype(dtype) for p in (x, y)])
    if logs is not None and bounded:
        of_keys = np.exp2(logs - greatest, dtype=work)[:, None] * of_keys
    elif logs is not None:
        right.append((logs - greatest)[:, None])
        left.append(np.ones_like(left[1]))
    # What products lose of squares, in units of a result: of greater ones roots and their inverses lose less.
    lost = (2.0**-72 if split else 2.0**-52) * reach**2 / float(np.finfo(work).eps)
    if function.sharp:
        near = max(lost, lost**2) if few else min(lost, (_NEAR * reach) ** 2)
    else:
        near = -least(work) if few and logs is None and lost > 1 else 0.0
    left, right = (np.concatenate(columns, -1, dtype=dtype, casting="same_kind") for columns in (left, right))
    if split:  # coarse parts cancel before rests are added
        left, right = (np.pad(p, ((0, -len(p) % _IN_ORDER), (0, 0))) for p in (left, right))
    return Operands(left, np.ascontiguousarray(right.T), centre, reach, bounded, greatest, of_rows, of_keys, near)


def _largest(numbers: ndarray) -> float:
    """Return the greatest of those that are finite."""
    return float(numbers.max(initial=0, where=np.isfinite(numbers)))


def _expanded(x: ndarray, y: ndarray) -> tuple[list[ndarray], list[ndarray]]:
    """2 x.y - |x|^2 - |y|^2."""
    one, other = (np.ones_like(p[:, :1]) for p in (x, y))
    return [2 * x, -_squares(x), -one], [y, other, _squares(y)]


def _split(x: ndarray, y: ndarray, unit: float) -> tuple[list[ndarray], list[ndarray], list[ndarray]]:
    """Return the same of points a + b, the a multiples of a unit: first -|a - a'|^2, exact, then what has b and b'.

    What is to be subtracted for each point comes by itself.
    """
    (a, b), (c, d) = _coarse(x, unit), _coarse(y, unit)
    left, right = _expanded(a, c)
    rests = [2 * (p * q).sum(-1, keepdims=True) + _squares(q) for p, q in ((a, b), (c, d))]
    return [*left, 2 * a, 2 * b], [*right, d, c + d], rests


def _coarse(p: ndarray, unit: float) -> tuple[ndarray, ndarray]:
    """Return the nearest multiples of a unit, and what is left."""
    coarse = np.round(p.astype(np.float64) / unit) * unit
    return coarse, (p - coarse).astype(np.float64)


def _squares(x: ndarray) -> ndarray:
    return np.einsum("...i,...i->...", x, x)[..., None]


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums over keys for the rows of a call's points, whose roles change with `transposed`."""
    x, y = (pairs.spread(name) for name in ("yx" if transposed else "xy"))
    function = pairs.function
    exact = pairs.is_direct or pairs.work == np.float64 or function.sharp
    cast = [None if part is None else part.astype(pairs.work, copy=False) for part in wanted[:4]]
    walk = Rows(x, y, function, pairs.factor, pairs.masks, transposed=transposed, exact=exact)
    found = walk.run(Wanted(*cast, *wanted[4:]))
    if not exact and walk.lost / function.weight > _WORTH_TELLING:
        warnings.warn(
            f"float32 products leave an error of up to {walk.lost / function.weight:.1g} in kernels of points that lie "
            'so far apart, measured by the bandwidth; expected precision="float64", or at most 8 coordinates',
            RuntimeWarning,
            stacklevel=4,
        )
    return found
