"""The arithmetic of all ways through the backend: exponentials, products that select, derivatives of scores.

Exponentials are of base 2 where NumPy vectorises that, which takes half the time of base e.  A product of queries and
keys is a natural score.  Exponentials are relative to a reference per row: 0, as long as the row's highest score is
within WINDOW of it, else a score near the highest.  Which it is follows from the row's own scores alone, so its bits
depend neither on tiles nor on neighbours.
"""

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

import numpy as np
from numpy import ndarray

# Exponentials are within 2^-32 .. 2^32 of each row's reference.  float32 has 2^-126 .. 2^128: a row of 2^24 keys sums
# to 2^56, and its output stays below the largest number with values up to 2^71; values down to 2^-70 keep all bits.
WINDOW = 22.0
SUM = np.dtype(np.float64)  # of gradients in which many terms nearly cancel
_LANES = 16  # elements of whole registers; between lines, lest these share a cache's sets
_FEW = 16  # keys of which lines by eighths, or by fours, would be short


def _exp2_is_vectorised() -> bool:
    try:
        from numpy.lib.introspect import opt_func_info

        targets = opt_func_info(func_name="^exp2$", signature="float(32|64)").get("exp2", {})
    except (ImportError, AttributeError):  # older NumPy: stay with exp, which is vectorised nearly everywhere
        return False
    return bool(targets) and all(not target["current"].startswith("baseline") for target in targets.values())


BASE_2 = _exp2_is_vectorised()
_LOG2_E = float(1 / np.log(np.longdouble(2)))


def exponential(s: ndarray) -> ndarray:
    """Return exp of an array, with the bits of :func:`exponentiate`."""
    return exponentiate(np.array(s))


def exponentiate(s: ndarray) -> ndarray:
    """Replace numbers by their exponentials, and return the array."""
    if not BASE_2:
        return np.exp(s, s)
    np.multiply(s, _LOG2_E, s)
    return np.exp2(s, s)


def lowest(dtype: np.dtype) -> float:
    """Return a number whose exponential is next to nothing and still a normal number; smaller results are slow."""
    return math.ceil(math.log(np.finfo(dtype).tiny)) + 1.0


def relative(s: ndarray) -> ndarray:
    """Replace scores of any size, relative to their references, by exponentials; 0 for the lowest and for -inf."""
    floor = lowest(s.dtype)
    s.clip(floor, np.inf, out=s)  # what is less may be subnormal, or is -inf: both are slow (and so is maximum)
    exponentiate(s)
    # Takes nothing from a weight that counts: it is less than half a unit in the last place of 2^-100.
    return np.subtract(s, exponential(np.full(16, floor, s.dtype))[0], out=s)


def exponentials(s: ndarray, reference: ndarray | None, *, bounded: bool) -> ndarray:
    """Replace scores by exponentials relative to references, None for 0; `bounded` ones are not far from 0."""
    if reference is not None:
        s -= reference
    return exponentiate(s) if bounded and reference is None else relative(s)


def longest_of(vectors: ndarray, dtype: np.dtype | None = None) -> float:
    """Return the length of the longest of some vectors, or a little more; not finite where one is not.

    What rounding may have taken from sums of squares, and underflow from squares, is made up for.
    """
    if not vectors.size:
        return 0.0
    # Of another dtype einsum converts a little at a time.
    squares = np.einsum("...i,...i->...", vectors, vectors, dtype=dtype, casting="unsafe")
    lost = vectors.shape[-1] * float(np.finfo(squares.dtype).tiny)
    return math.sqrt(1.001 * float(np.maximum.reduce(squares, None)) + lost)


def is_finite(*arrays: ndarray) -> bool:
    """Whether all numbers are finite, and their squares' sum, which takes less time than a look at each."""
    return all(math.isfinite(np.vdot(array, array)) for array in arrays)


def is_for_blas(array: ndarray) -> bool:
    """Whether matmul hands matrices (..., n, m) to BLAS as they are; others it multiplies in loops, to other bits."""
    *_, step, item = array.strides
    fits = item == array.itemsize and step >= array.shape[-1] * item and not step % item
    return fits and array.flags.aligned


def product(weights: ndarray, data: ndarray, out: ndarray, *, careful: bool) -> ndarray:
    """Compute weights @ data, where something may not be a finite number with care for what is hidden."""
    if careful:
        return selecting_product(weights, data, out)
    if weights.shape[-1] == 1:  # matmul would multiply without BLAS
        return np.einsum("...ki,...id->...kd", weights, data, out=out)
    return np.matmul(weights, data, out)


def selecting_product(weights: ndarray, data: ndarray, out: ndarray) -> ndarray:
    """Compute weights @ data, where a weight of 0 takes nothing: not NaN, either, of infinite data or of NaN."""
    bad = ~np.isfinite(data)
    np.matmul(weights, np.where(bad, 0, data), out=out)
    if bad.any():
        signs = np.sign(weights)
        count = np.matmul(np.abs(signs), bad.astype(out.dtype))
        net = np.matmul(signs, np.where(bad & ~np.isnan(data), np.sign(data), 0))
        out += np.where(count == 0, 0, np.where(np.abs(net) == count, np.copysign(np.inf, net), np.nan))
    return out


def highest(s: ndarray, room: ndarray) -> ndarray:
    """Return the maxima of (..., keys, rows) over the keys, by eighths or halves, as long lines are quick to reduce.

    `room` has one axis and as many elements as s, and is overwritten.
    """
    *lead, keys, rows = s.shape
    if rows == 1:
        return np.maximum.reduce(s, -2)
    while keys > 1:
        parts = 8 if keys > _FEW and keys % 8 == 0 else 2
        last, odd, keys = s[..., -1, :], keys % parts, keys // parts
        size = math.prod(lead) * keys * rows
        some, room = room[:size].reshape(*lead, keys, rows), room[size:]
        if parts == 8:
            np.maximum.reduce(s.reshape(*lead, parts, keys, rows), -3, out=some)
        else:
            np.maximum(s[..., :keys, :], s[..., keys : 2 * keys, :], out=some)
        if odd:
            np.maximum(some[..., 0, :], last, out=some[..., 0, :])
        s = some
    return s[..., 0, :].copy()


def wider(dtype: np.dtype) -> type:
    """Return the type of l while it is summed: sums of equal numbers have more digits than these."""
    return np.float64 if dtype == np.float32 else np.longdouble


def summed(p: ndarray, room: ndarray) -> ndarray:
    """Return the sums of (..., keys, rows) over the keys, in a wider type, where equal numbers sum up exactly.

    Four equal numbers do so in any type, and so do these sums; the few that are left are added up in the wider type.
    `room` has one axis and at least a third as many elements as p, and is overwritten.
    """
    *lead, keys, rows = p.shape
    dtype, left = wider(p.dtype), []
    while keys >= _FEW and rows > 1:
        if keys % 4:
            left.append(p[..., keys - keys % 4 :, :])
        fours, keys = p[..., : keys - keys % 4, :].reshape(*lead, 4, -1), keys // 4
        some, room = room[: fours.size // 4], room[fours.size // 4 :]
        if rows % _LANES:
            np.add.reduce(fours, -2, out=some.reshape(*lead, -1))
        else:  # quicker, with the bits of the above as whole registers are added up
            np.matmul(np.ones((1, 4), p.dtype), fours, some.reshape(*lead, 1, -1))
        p = some.reshape(*lead, keys, rows)
    total = np.add.reduce(p, -2, dtype)
    for x in left:
        total += np.add.reduce(x, -2, dtype)
    return total


def hide(s: ndarray, shown: ndarray, value: float = 0.0) -> None:
    """Set elements to a number, selecting by bit patterns, which is faster than by booleans.

    Being bitwise, it is a selection: what a hidden element holds, NaN or not, is gone.

    Parameters
    ----------
    s : ndarray
    shown : ndarray, broadcastable to that of s, unsigned
        Of each element all bits, or none where it is hidden.
    value : float
        What the hidden ones become.
    """
    bits = s.view(shown.dtype)
    np.bitwise_and(bits, shown, bits)
    if value:
        np.bitwise_or(bits, ~shown & np.array(value, s.dtype).view(shown.dtype), bits)


def visible_bits(hidden: Sequence[ndarray], shape: tuple[int, int], dtype: np.dtype) -> ndarray:
    """Return as bits, see :func:`hide`, what no array of some hides; bool, they broadcast to a shape (keys, rows)."""
    bits = np.broadcast_to(reduce(or_, hidden or [np.False_]), shape).view(np.int8)
    if bits.strides[0] < bits.strides[1]:  # as in a caller's array of (rows, keys)
        bits = transposed(bits.T)
    return np.subtract(bits, 1, dtype=np.int8).astype(dtype)


def reference_of(m: ndarray) -> ndarray | None:
    """Return what rows with these highest scores are relative to; None for 0 throughout."""
    away = np.abs(m)
    if away.max() <= WINDOW:
        return None
    return np.where((away > WINDOW) & (m > -np.inf), m, 0)


def statistics_of(l: ndarray, m: ndarray, reference: ndarray | None) -> dict[str, ndarray]:
    """Return l and m of rows, given l relative to a reference; 0 and -inf where a row is empty."""
    empty = l == 0
    relative_to = exponential(m if reference is None else np.where(empty, 0, m - reference))
    return {"l": np.where(empty, 0, l / relative_to), "m": np.where(empty, -np.inf, m)}


def add_bias(s: ndarray, bias: ndarray, *, careful: bool) -> None:
    """Add a bias to scores; with care it hides even where the score itself is NaN."""
    s += bias
    if careful:
        np.copyto(s, -np.inf, where=bias == -np.inf)


class RowWeights(NamedTuple):
    """What the backward needs to know of rows, from the forward's results, (..., rows) each."""

    empty: ndarray | None  # which rows see nothing; None if there are none
    reference: ndarray | None  # what scores are relative to; None for 0 throughout
    factors: ndarray  # make probabilities of exponentials
    delta: ndarray  # D of algorithm 4, line 19, less dlse
    tdelta: ndarray | None  # its tangent, and
    mean: ndarray | None  # that of lse, the mean of the tangents of scores; None where there are none


def row_weights(rows: Mapping[str, ndarray]) -> RowWeights:
    """Return the weights of rows, given their do, o, l, m and perhaps dlse; and to, tlse and perhaps tdo."""
    l, m = rows["l"], rows["m"]

    def dot(x: str, y: str) -> ndarray:
        return np.vecdot(rows[x], rows[y], dtype=l.dtype, casting="unsafe")

    delta, tdelta, mean = dot("do", "o"), None, None
    if "dlse" in rows:
        delta -= rows["dlse"]
    if "to" in rows:
        tdelta, mean = dot("do", "to"), np.array(rows["tlse"])
        if "tdo" in rows:
            tdelta += dot("tdo", "o")
    empty, reference = None, reference_of(m)
    if reference is not None:  # as where a row is empty
        empty = l == 0
        for x in (delta,) if tdelta is None else (delta, tdelta, mean):
            x[empty] = 0
        m, l = np.where(empty, 0, m - reference), np.where(empty, np.inf, l)
        empty, reference = (x if x.any() else None for x in (empty, reference))
    return RowWeights(empty, reference, 1 / (l * exponential(m)), delta, tdelta, mean)


def differentiate_scores(ds: ndarray, p: ndarray, delta: ndarray, *, careful: bool) -> None:
    """Turn derivatives by probabilities into those by scores: algorithm 4, line 20."""
    np.subtract(ds, delta, ds)
    np.multiply(ds, p, ds)
    if careful:
        ds[p == 0] = 0  # 0 * NaN and 0 * inf


def transposed(x: ndarray) -> ndarray:
    """Return a contiguous copy of (..., n, m) as (..., m, n); rows a power of two apart would share a cache's sets."""
    width = x.shape[-1]
    apart = np.empty((*x.shape[:-1], width + _LANES), x.dtype)[..., :width]
    apart[...] = x
    return np.ascontiguousarray(apart.swapaxes(-1, -2))


def summed_to(part: ndarray, shape: tuple[int, ...], dtype: np.dtype) -> ndarray:
    """Return a part summed over the axes in which a shape of as many has length 1."""
    axes = tuple([axis for axis, n in enumerate(shape) if n == 1 and part.shape[axis] > 1])
    return part.sum(axis=axes, keepdims=True, dtype=dtype) if axes else part
