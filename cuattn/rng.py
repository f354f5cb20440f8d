"""Dropout's random numbers: the contract between every backend, kernel, tile size and shard.

Whether dropout keeps an element of the attention matrix is a pure function of the random state and of the
element's place.  Nothing else enters: not the tile size, not the kernel, not the order of the loops.  So the
CPU, the GPU, the forward and the backward pass agree bit for bit, and no mask is ever stored.  This page defines
that function completely.

**The element.** `i` is the query row, `j` the key column and `b` the flat index of the matrix: C order over the
broadcast leading axes, the query head last, ``b = batch * heads + head``.  All three are indices of the whole
problem; a shard adds the place of its first element.

**The state.** ``RNGState(seed, offset)``: `seed` is a 64-bit and `offset` a 32-bit unsigned integer.  A fresh
state has a random seed and offset 0.

**The draw**, a 16-bit unsigned integer::

    x[0], x[1], x[2], x[3] = Philox4x32-7(counter = (j & ~9, i & ~8, b, offset),
                                          key     = (seed & 0xffffffff, seed >> 32))
    w    = 2 * bit3(j) + bit3(i)                              # bit3(a) = (a >> 3) & 1
    draw = (x[w] >> 16) if j is odd else (x[w] & 0xffff)

``j & ~9`` clears bits 0 and 3, ``i & ~8`` clears bit 3, so that one call serves the eight elements
{i, i ^ 8} x {j, j ^ 1, j ^ 8, j ^ 9}: those which one lane of a tensor-core fragment holds.

**Philox4x32-R** (Salmon et al.) takes R rounds, all arithmetic modulo 2**32.  A round maps (x, k) to::

    (hi(x[2] * 0xCD9E8D57) ^ x[1] ^ k[0],  lo(x[2] * 0xCD9E8D57),
     hi(x[0] * 0xD2511F53) ^ x[3] ^ k[1],  lo(x[0] * 0xD2511F53))

where ``hi`` and ``lo`` are the halves of the 64-bit product, and after each round ``k[0] += 0x9E3779B9`` and
``k[1] += 0xBB67AE85``.  Seven rounds are the fewest that pass BigCrush.

**The decision.** With ``T = round(dropout_p * 65536)`` (ties to even), the element is kept when ``draw >= T``,
and a kept value is scaled by ``65536 / (65536 - T)``: the expectation is exact for the probability that was
really used, T / 65536.

**Limits.** 0 <= seed < 2**64; offset, b, i and j lie in [0, 2**32); 0 <= T < 65536 (T = 65536 would keep
nothing and divide by zero).  The kernels need the rows and keys of a shard to begin at multiples of 16, each run of
them where there are several; the definition does not.

**Vectors.** seed 0x0123456789abcdef, offset 5, b 3: draw(0, 0) = 0x2443, (0, 1) = 0x18e9, (0, 8) = 0x03b0,
(8, 0) = 0x93ad, (9, 9) = 0x4603, (1000, 131071) = 0xdedb.

References
----------
J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cuattn.errors import ArgumentError, DtypeError, as_integer, as_real

__all__ = [
    "BLOCK",
    "LEVELS",
    "ROUNDS",
    "RNGState",
    "draws",
    "keep",
    "keep_blocks",
    "philox4x32",
    "recorded",
    "resolve",
    "round_keys",
    "threshold",
]

ROUNDS = 7
LEVELS = 65536  # a draw has 16 bits
BLOCK = 16  # rows and keys of the block whose 256 elements 32 calls cover

_MULTIPLIER_0, _MULTIPLIER_2 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class RNGState(NamedTuple):
    """The state of dropout's random numbers.

    Attributes
    ----------
    seed : int
        The key, 0 <= seed < 2**64.
    offset : int
        One word of the counter, 0 <= offset < 2**32: states with equal seeds and different offsets draw
        independently.  On the GPU it may be a 0-d array of 32- or 64-bit integers on the device, of which the kernel
        reads the low word, so that a replayed graph can advance it.

    See Also
    --------
    resolve : Makes one of a seed or a generator.

    Examples
    --------
    >>> RNGState(42).key
    (42, 0)
    """

    seed: int
    offset: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The two words of Philox's key, the lower one first."""
        return self.seed & 0xFFFFFFFF, self.seed >> 32


def round_keys(key: Sequence[Any], rounds: int = ROUNDS) -> list[tuple[Any, Any]]:
    """Return the key of each round of Philox4x32.

    Parameters
    ----------
    key : sequence of 2 int or ndarray of uint64
        The words of the key, lowest first, each below 2**32.
    rounds : int, default 7
        Number of rounds.

    Returns
    -------
    list of (int, int) or of (ndarray, ndarray)
        The words (k[0], k[1]) that each round takes, in the type of `key`.

    See Also
    --------
    philox4x32 : Uses them.

    Examples
    --------
    >>> [(hex(low), hex(high)) for low, high in round_keys(RNGState(42).key, 2)]
    [('0x2a', '0x0'), ('0x9e3779e3', '0xbb67ae85')]
    """
    low, high = key
    return [((low + r * _WEYL_0) & 0xFFFFFFFF, (high + r * _WEYL_1) & 0xFFFFFFFF) for r in range(rounds)]


def philox4x32(counter: Sequence[Any], key: Sequence[Any], rounds: int = 10) -> np.ndarray:
    """Apply the Philox4x32 bijection to a 128-bit counter, or to arrays of counters.

    Parameters
    ----------
    counter : sequence of 4 array_like of int
        The words of the counter, lowest first, each taken modulo 2**32; they broadcast against each other.
    key : sequence of 2 array_like of int
        The words of the key, lowest first; they broadcast with the counter.
    rounds : int, default 10
        Number of rounds; dropout uses 7.

    Returns
    -------
    ndarray, (4, ...), uint32
        The four output words; the other axes are those of the broadcast counter and key.

    See Also
    --------
    draws : The 16-bit numbers that are made of it.

    Examples
    --------
    >>> [f"{word:08x}" for word in philox4x32((0, 0, 0, 0), (0, 0)).tolist()]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    # Words live in 64 bits so that a product is one multiplication.  Only what the rounds have mixed takes the
    # broadcast shape: with a column of rows and a row of keys, the first two rounds cost next to nothing.
    x0, x1, x2, x3, *key = (np.asarray(word, dtype=np.uint64) & _LOW for word in (*counter, *key))
    for k0, k1 in round_keys(key, rounds):
        product_0, product_2 = x0 * _MULTIPLIER_0, x2 * _MULTIPLIER_2
        x0, x1 = (product_2 >> _HALF) ^ (x1 ^ k0), product_2 & _LOW
        x2, x3 = (product_0 >> _HALF) ^ (x3 ^ k1), product_0 & _LOW
    return np.array(np.broadcast_arrays(x0, x1, x2, x3), np.uint32)


def threshold(dropout_p: float) -> int:
    """Convert a dropout probability to the threshold T that draws are compared with.

    Parameters
    ----------
    dropout_p : float
        Probability of dropping an element, 0 <= dropout_p < 1.

    Returns
    -------
    int
        ``round(dropout_p * 65536)``, ties to even, in [0, 65535].  0 means that there is no dropout, also when
        a probability below 2**-17 was asked for.

    Raises
    ------
    ArgumentError
        When `dropout_p` is outside [0, 1) or not a number, or so close to 1 that T would be 65536.
    DtypeError
        When `dropout_p` is not a real number.

    See Also
    --------
    keep : Decides by it.

    Examples
    --------
    >>> threshold(0.1), threshold(0.0), threshold(0.5)
    (6554, 0, 32768)
    """
    p = as_real("dropout_p", dropout_p)
    if not 0.0 <= p < 1.0:
        raise ArgumentError(f"dropout_p = {dropout_p!r}: expected 0 <= dropout_p < 1")
    level = round(p * LEVELS)
    if level == LEVELS:
        raise ArgumentError(f"dropout_p = {dropout_p!r} would drop everything: expected dropout_p < 1 - 2**-17")
    return level


def draws(state: RNGState, b: int, rows: tuple[int, int], keys: tuple[int, int]) -> np.ndarray:
    """Draw the 16-bit numbers of a tile of elements.

    Parameters
    ----------
    state : RNGState
        Seed and offset.
    b : int
        Flat index of the matrix (batch * heads + head) in the whole problem.
    rows, keys : (int, int)
        Ranges (start, stop) of query rows and of key columns, as indices in the whole problem.  Any range is
        allowed; the work is that of the smallest range of whole blocks of 16 around it.

    Returns
    -------
    ndarray, (stop - start of rows, stop - start of keys), uint16
        The draw of each element, as the module's contract defines it.

    Raises
    ------
    ArgumentError
        When an index is outside [0, 2**32).

    See Also
    --------
    keep : Compares them with a threshold.

    Examples
    --------
    >>> draws(RNGState(42), 0, (0, 2), (0, 4))
    array([[49562, 37579, 24177, 47116],
           [ 3573, 32026, 17201, 20192]], dtype=uint16)
    """
    blocks, crop = _around(rows, keys)
    return _unfold(_words(state, b, *blocks))[crop]


def keep(state: RNGState, T: int, b: int, row_range: tuple[int, int], key_range: tuple[int, int]) -> np.ndarray:
    """Decide which elements of a tile dropout keeps.

    Parameters
    ----------
    state : RNGState
        Seed and offset.
    T : int
        The threshold, from :func:`threshold`; an element is kept when its draw is at least T.
    b, row_range, key_range : int, (int, int), (int, int)
        The tile, as in :func:`draws`.

    Returns
    -------
    ndarray, (rows, keys), bool
        True where the element stays (and is scaled by 65536 / (65536 - T)).

    Raises
    ------
    ArgumentError
        When T is outside [0, 65536) or an index is outside [0, 2**32).

    See Also
    --------
    keep_blocks : Of blocks from anywhere.
    threshold : Of a probability.

    Examples
    --------
    >>> keep(RNGState(42), threshold(0.5), 0, (0, 2), (0, 4)).astype(int)
    array([[1, 1, 0, 1],
           [0, 0, 0, 0]])
    """
    blocks, crop = _around(row_range, key_range)
    return keep_blocks(state, T, b, *blocks)[crop]


def keep_blocks(state: RNGState, T: int, b: int, row_blocks: Any, key_blocks: Any) -> np.ndarray:
    """Decide which elements of a tile made of blocks from anywhere in the whole problem dropout keeps.

    Parameters
    ----------
    state, T, b : RNGState, int, int
        As in :func:`keep`.
    row_blocks, key_blocks : array_like of int, (I,), (J,)
        The index in the whole problem of the first of each 16 rows, and of each 16 keys; multiples of 16.

    Returns
    -------
    ndarray, (16 I, 16 J), bool
        True where the element stays.

    Raises
    ------
    ArgumentError
        When T is outside [0, 65536), an index is outside [0, 2**32) or a block does not begin at a multiple of 16.

    See Also
    --------
    keep : Of one range of rows and keys.

    Examples
    --------
    The keys of a shard that holds the first and the last quarter of 128:

    >>> shard = keep_blocks(RNGState(42), threshold(0.5), 0, [0], [0, 16, 96, 112])
    >>> whole = keep(RNGState(42), threshold(0.5), 0, (0, 16), (0, 128))
    >>> bool((shard == np.hstack([whole[:, :32], whole[:, 96:]])).all())
    True
    """
    if not 0 <= T < LEVELS:
        raise ArgumentError(f"T = {T!r}: expected a threshold with 0 <= T < {LEVELS}")
    starts = []
    for name, blocks in (("row_blocks", row_blocks), ("key_blocks", key_blocks)):
        start = np.asarray(blocks, dtype=np.int64)
        if start.ndim != 1 or (start != start & 0xFFFFFFF0).any():
            raise ArgumentError(f"{name}: expected one axis of multiples of {BLOCK} in [0, 2**32), got {blocks!r:.200}")
        starts.append(start)
    words = _words(state, b, *starts)
    return _unfold(words >= np.uint16(T))  # comparing before unfolding moves bytes instead of 16-bit words


def recorded(state: Any, name: str = "fwd.rng_state") -> RNGState:
    """Check a random state that a forward is said to have used, so that a backward can draw the same again.

    Parameters
    ----------
    state : RNGState | (int, int) | int
        A state, a pair like one, or a seed.  Nothing else tells what the forward drew.
    name : str
        What messages call it.

    Returns
    -------
    RNGState
        As :func:`resolve` returns it.

    Raises
    ------
    ArgumentError
        When the seed is outside [0, 2**64) or the offset outside [0, 2**32).
    DtypeError
        When `state` is none of the above: a generator or None would draw other numbers than the forward did.

    See Also
    --------
    resolve : Takes what users give.

    Examples
    --------
    >>> recorded((7, 1))
    RNGState(seed=7, offset=1)
    """
    if state is None or isinstance(state, np.random.Generator):
        raise DtypeError(f"{name} has type {type(state).__name__}: expected the RNGState that the forward returned")
    if type(state) in (tuple, list) and len(state) == 2:
        state = RNGState(*state)
    return _checked(name, state, "an RNGState")


def resolve(rng: Any) -> RNGState:
    """Turn what a caller may pass as `rng` into a state.

    Parameters
    ----------
    rng : int | RNGState | numpy.random.Generator | None
        A seed; a state; a generator, from which one 64-bit seed is drawn; or None for a fresh random seed.

    Returns
    -------
    RNGState
        Python integers, within the limits; an offset that is a 0-d integer array on a device stays as it is.

    Raises
    ------
    ArgumentError
        When the seed is outside [0, 2**64) or the offset outside [0, 2**32).
    DtypeError
        When `rng` is none of the above.

    See Also
    --------
    RNGState : What it returns.

    Examples
    --------
    >>> resolve(7)
    RNGState(seed=7, offset=0)
    """
    if rng is None:
        return RNGState(secrets.randbits(64))
    if isinstance(rng, np.random.Generator):
        return RNGState(int(rng.integers(2**64, dtype=np.uint64)))
    return _checked("rng", rng, "an int, an RNGState, a numpy.random.Generator or None")


def _checked(name, state, expected):
    """Return a seed or a state as a state of Python integers within the limits."""
    if not isinstance(state, RNGState):
        return RNGState(_integer(name, state, 64, expected))
    seed, offset = _integer(f"{name}.seed", state.seed, 64), state.offset
    return RNGState(seed, offset if _is_device_scalar(name, offset) else _integer(f"{name}.offset", offset, 32))


def _integer(name, value, bits, expected="an int"):
    number = as_integer(value)
    if number is None:
        raise DtypeError(f"{name} has type {type(value).__name__}: expected {expected}")
    if not 0 <= number < 1 << bits:
        raise ArgumentError(f"{name} = {number}: expected 0 <= {name} < 2**{bits}")
    return number


def _is_device_scalar(name, value):
    # Asking a device array for its value would synchronise; its shape and type are host metadata.
    interface = getattr(value, "__cuda_array_interface__", None)
    if interface is None:
        return False
    shape, kind = interface["shape"], interface["typestr"][1:]
    if shape != () or kind not in ("i4", "i8", "u4", "u8"):
        raise DtypeError(
            f"{name}.offset is a device array of shape {shape} and type {kind!r}: expected one 32- or 64-bit integer"
        )
    return True


def _around(rows, keys):
    """Return the starts of the blocks of 16 around a tile's rows and keys, and the index of the tile in them."""
    starts, crop = [], ()
    for name, (start, stop) in (("rows", rows), ("keys", keys)):
        if not 0 <= start <= stop <= 1 << 32:
            raise ArgumentError(f"{name} = ({start}, {stop}): expected 0 <= start <= stop <= 2**32")
        first = start - start % BLOCK
        starts.append(np.arange(first, stop, BLOCK))
        crop += (slice(start - first, stop - first),)
    return starts, crop


def _words(state, b, row_blocks, key_blocks):
    """Return the halves of the words of I x J blocks, (4, 8 I, 8 J) of 16 bits."""
    if not 0 <= b < 1 << 32:
        raise ArgumentError(f"b = {b!r}: expected 0 <= b < 2**32")
    # The calls of a block: rows with bit 3 clear, keys with bits 0 and 3 clear.
    i = row_blocks[:, None] + np.arange(8)
    j = key_blocks[:, None] + np.arange(0, 8, 2)
    words = philox4x32((j.reshape(1, -1), i.reshape(-1, 1), b, state.offset), state.key, ROUNDS)
    return words.astype("<u4", copy=False).view("<u2")


def _unfold(words):
    """Put one item per half word at its element's place: (4, 8 I, 8 J) -> (16 I, 16 J) for I x J blocks.

    Word 2 * bit3(j) + bit3(i) of eight calls of a row holds eight neighbouring elements, so whole runs of eight
    are moved, each as one opaque item.
    """
    row_blocks, key_blocks = words.shape[1] // 8, words.shape[2] // 8
    run = np.dtype((np.void, 8 * words.itemsize))
    tile = np.empty((16 * row_blocks, 16 * key_blocks), words.dtype)
    places = tile.view(run).reshape(row_blocks, 2, 8, key_blocks, 2)
    for w in range(4):
        places[:, w & 1, :, :, w >> 1] = words[w].view(run).reshape(row_blocks, 8, key_blocks)
    return tile
