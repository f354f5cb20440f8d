"""Sums over keys for every row, on the CPU: tiles of squared distances as matrix products, threads over row tiles.

Up to DIRECT_DIM coordinates products are taken in float64, of points relative to their mean; of float64 points each is
split in a part with few enough digits that its products are exact, and a rest.  Both are as good as differences of
coordinates, at a fraction of the time.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy import ndarray

from cuattn.cpu import threads
from cuattn.io_model.sizes import cdiv
from cuattn.masks.intervals import FULL, SKIP
from cuattn.pairwise.functions import FUNCTIONS, KernelFunction, least, power_of_2
from cuattn.pairwise.pairs import DIRECT_DIM, Pairs, Sums, Wanted

_ROWS, _KEYS = 256, 256  # of a tile: with its products in float64 it fits a core's share of the second cache
_NANOSECONDS = 1.0  # of a pair
_LOST = 2.0**-21  # of the square of a distance from the centre, what float32 products lose
_WORTH_TELLING = 0.01
_DIGITS = 22  # of the coarse parts, in bits
_LOG2_E = math.log2(math.e)

Index = tuple[int, ...]


class _Turns:
    """No item waits for another."""

    def abort(self) -> None:
        """Wake nobody."""


class Rows:
    """A walk over tiles of rows and keys.

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
        self.turns, self.lost = _Turns(), 0.0
        self.sizes = [cdiv(self._rows, _ROWS)] * math.prod(self.batch)

    def run(self, wanted: Wanted) -> Sums:
        """Return the sums that are wanted."""
        shape, self._wanted = (*self.batch, self._rows), wanted
        columns = 0 if wanted.v is None else wanted.v.shape[-1]
        self._results = Sums(
            np.zeros((*shape, columns)) if wanted.sums else None,
            np.full(shape, -np.inf) if wanted.logs else None,
            np.zeros((*shape, self._dim)) if wanted.slopes else None,
            np.zeros(shape) if wanted.slopes else None,
        )
        self._finite = wanted.v is None or bool(np.isfinite(wanted.v).all())
        if 0 not in (*shape, self._keys):
            pairs = math.prod(shape) * self._keys
            threads.run(self, lambda: self._tile, threads.useful(sum(self.sizes), _NANOSECONDS * pairs))
        return self._results

    def item(self, group: int, number: int) -> tuple[Index, int]:
        """Return a row tile of one of the batch's matrices."""
        index = tuple(map(int, np.unravel_index(group, self.batch))) if self.batch else ()
        if index not in self._operands:
            found = operands(self._x[index], self._y[index], self._exact)
            self.lost = max(self.lost, _LOST * (found.reach / 2) ** 2 * self._factor)
            if self._wanted.logs:
                found = found.with_logs(self._wanted.key_log[index] * _LOG2_E, self._scale)
            self._operands[index] = found
        return index, number

    def _tile(self, item: tuple[Index, int]) -> None:
        """Sum over all keys for a tile of rows."""
        index, tile = item
        left, right, centre, reach, logs, span = self._operands[index]
        bounded = reach**2 * self._scale + span < 0.9 * -least(self._dtype)
        rows = slice(tile * _ROWS, min((tile + 1) * _ROWS, self._rows))
        instances = [mask.instance(index) for mask in self._masks]
        states = self._states(instances, tile)
        sums = _LogSum(rows.stop - rows.start, self._dtype, bounded) if self._wanted.logs else None
        products = np.empty((_ROWS, _KEYS), left.dtype)
        for number in range(cdiv(self._keys, _KEYS)):
            if states is not None and states[number] == SKIP:
                continue
            keys = slice(number * _KEYS, min((number + 1) * _KEYS, self._keys))
            hidden = None if states is None or states[number] == FULL else self._hidden(instances, rows, keys)
            own = products.ravel()[: (rows.stop - rows.start) * (keys.stop - keys.start)]
            own = own.reshape(rows.stop - rows.start, -1)
            np.matmul(left[rows], right[:, keys], out=own)
            s = np.multiply(own, -self._scale, dtype=self._dtype, casting="same_kind")
            if sums is not None:
                sums.add(s, hidden)
            else:
                self._add((*index, rows), (*index, keys), s, hidden, centre, bounded)
        if sums is not None:
            self._results.logs[index][rows] = (sums.total() + logs) / _LOG2_E

    def _add(self, rows: tuple, keys: tuple, s: ndarray, hidden: Any, centre: ndarray, bounded: bool) -> None:
        """Add what one tile has to sums and slopes."""
        wanted, results = self._wanted, self._results
        if hidden is not None:
            np.copyto(s, 0, where=hidden)
        w = s / s.dtype.type(-self._function.base) if wanted.slopes else None
        if wanted.row_log is not None:
            bounded = False
            s += wanted.key_log[keys] * s.dtype.type(_LOG2_E)
            s += (wanted.row_log[rows] * s.dtype.type(_LOG2_E))[:, None]
        k, slope = self._function.evaluate(s, wanted.slopes, bounded)
        if hidden is not None:
            np.copyto(k, 0, where=hidden)
        v = wanted.v[keys]
        if wanted.sums:
            results.sums[rows] += product(k, v, hidden if not self._finite else None)
        if wanted.slopes:
            weights = np.matmul(wanted.u[rows], v.T)
            weights *= slope
            if hidden is not None:
                np.copyto(weights, 0, where=hidden)
            results.moments[rows] += np.einsum("ij,ij->i", weights, w)
            weights = weights.astype(centre.dtype, copy=False)
            x, y = (self._x[rows] - centre), (self._y[keys] - centre)
            if hidden is not None:
                y = np.where(np.isfinite(y), y, 0)
            results.directions[rows] += x * weights.sum(-1, keepdims=True) - weights @ y

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
    """The base-2 logarithm of a sum of powers of 2, row by row, from tiles: the sum l relative to 2^m.

    Of `bounded` exponents, at most 0 and not far from it, m stays 0.
    """

    def __init__(self, rows: int, dtype: np.dtype, bounded: bool) -> None:
        self._m, self._l, self._bounded = np.full(rows, 0 if bounded else -np.inf, dtype), np.zeros(rows), bounded

    def add(self, s: ndarray, hidden: Any) -> None:
        """Add 2^s of a tile."""
        if not self._bounded:
            if hidden is not None:
                np.copyto(s, -np.inf, where=hidden)
            m = np.maximum(self._m, s.max(-1))
            reference = np.where(np.isfinite(m), m, 0)
            s -= reference[:, None]
            self._l *= np.exp2(self._m - reference, dtype=np.float64)
            self._m = m
        powers = power_of_2(s, self._bounded)
        if self._bounded and hidden is not None:
            np.copyto(powers, 0, where=hidden)
        self._l += powers @ np.ones(s.shape[1], s.dtype)

    def total(self) -> ndarray:
        """Return the logarithm."""
        return self._m + np.log2(self._l)


def product(k: ndarray, v: ndarray, hidden: Any) -> ndarray:
    """Return k @ v; where `hidden`, v may hold anything."""
    if hidden is None:
        return k @ v
    return np.stack([np.where(hidden, 0, k * column).sum(-1) for column in v.T], -1)


class Operands(NamedTuple):
    """Matrices whose product has the squared distances of points, the points' centre, and a bound of the distances.

    With logarithms of the keys it has, times the scale of distances, these less the logarithms, but for the greatest.
    """

    left: ndarray
    right: ndarray
    centre: ndarray
    reach: float
    greatest: float = 0.0
    span: float = 0.0

    def with_logs(self, logs: ndarray, scale: float) -> Operands:
        """Return the operands with logarithms of the keys."""
        logs, finite = logs.astype(np.float64), bool(np.isfinite(logs).all())
        greatest, span = (float(logs.max()), float(np.ptp(logs))) if finite else (0.0, math.inf)
        column = np.divide(greatest - logs, scale, dtype=np.float64).astype(self.right.dtype)
        left = np.concatenate([self.left, np.ones_like(self.left[:, :1])], -1)
        return self._replace(left=left, right=np.concatenate([self.right, column[None]]), greatest=greatest, span=span)


def operands(x: ndarray, y: ndarray, exact: bool) -> Operands:
    """Return the operands of a matrix product for points."""
    dtype, splits = np.dtype(np.float64) if exact else x.dtype, x.dtype == np.float64 and x.shape[-1] <= DIRECT_DIM
    x, y = x.astype(dtype, copy=False), y.astype(dtype, copy=False)
    there = np.isfinite(y).all(-1)
    centre = (y if there.all() else y[there] if there.any() else np.zeros_like(y[:1])).mean(0)
    reach = sum(math.sqrt(_largest(np.square(p - centre).sum(-1))) for p in (x, y))
    if not splits:
        return Operands(*_expanded(x - centre, y - centre), centre, reach)
    unit = 2.0 ** (math.frexp(reach)[1] - _DIGITS)
    centre = np.round(centre / unit) * unit
    return Operands(*_split(x, y, centre, unit), centre, reach)


def _largest(numbers: ndarray) -> float:
    """Return the greatest of those that are finite."""
    return float(numbers.max(initial=0, where=np.isfinite(numbers)))


def _expanded(x: ndarray, y: ndarray) -> tuple[ndarray, ndarray]:
    """|x|^2 - 2 x.y + |y|^2."""
    left = np.concatenate([-2 * x, _squares(x), np.ones_like(x[:, :1])], -1)
    right = np.concatenate([y, np.ones_like(y[:, :1]), _squares(y)], -1)
    return left, np.ascontiguousarray(right.T)


def _split(x: ndarray, y: ndarray, centre: ndarray, unit: float) -> tuple[ndarray, ndarray]:
    """Return the same of points a + b, the a multiples of a unit: first |a - a'|^2, exact, then what has b or b'."""
    coarse = [np.round(p / unit) * unit for p in (x, y)]
    (a, c), (b, d) = [p - centre for p in coarse], [p - q for p, q in zip((x, y), coarse, strict=True)]
    left, right = _expanded(a, c)
    rests = [2 * (p * q).sum(-1, keepdims=True) + _squares(q) for p, q in ((a, b), (c, d))]
    more = np.concatenate([rests[0], np.ones_like(rests[0]), -2 * a, -2 * b], -1)
    others = np.concatenate([np.ones_like(rests[1]), rests[1], d, c + d], -1)
    return np.concatenate([left, more], -1), np.concatenate([right, others.T])


def _squares(x: ndarray) -> ndarray:
    return np.einsum("...i,...i->...", x, x)[..., None]


def run(pairs: Pairs, wanted: Wanted, transposed: bool = False) -> Sums:
    """Return sums over keys for the rows of a call's points, whose roles change with `transposed`."""
    x, y = (pairs.spread(name) for name in ("yx" if transposed else "xy"))
    function = pairs.function
    exact = pairs.is_direct or pairs.work == np.float64 or function is FUNCTIONS["laplacian"]
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
