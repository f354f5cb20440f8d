"""The papers' machine, whose HBM is reached through counted accesses alone, and what the algorithms share on it."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cuattn.errors import ShapeError
from cuattn.io_model import block_sizes
from cuattn.io_model.sizes import halved
from cuattn.rng import RNGState


class Counts(NamedTuple):
    """What an algorithm moved and held, in elements.

    Attributes
    ----------
    reads, writes : int
        Elements moved from and to HBM; filling an array with an initial value counts as writing it.
    extra : int
        Elements of HBM allocated beyond the inputs and the outputs.
    sram : int
        On-chip buffers: the largest tile of each array, summed; the largest such sum over the kernels.

    See Also
    --------
    HBM : Counts them.

    Examples
    --------
    >>> HBM().counts.total
    0
    """

    reads: int
    writes: int
    extra: int
    sram: int

    @property
    def total(self) -> int:
        """Reads and writes together: the papers' "HBM accesses"."""
        return self.reads + self.writes


class HBM:
    """Named arrays, handed out as tiles; every access is counted.

    The arrays are private: an algorithm can neither read an element without :meth:`load` nor change one without
    :meth:`store`, so its counts cannot be wrong by omission.

    Parameters
    ----------
    dtype : dtype, default float64
        Type of the arrays, and so of the arithmetic.

    See Also
    --------
    Counts : What it has counted.

    Examples
    --------
    >>> hbm = HBM()
    >>> hbm.place("Q", np.ones((6, 2)))
    >>> Q_1 = hbm.load(slice(0, 4), "Q")
    >>> hbm.allocate((6, 2), "O")
    >>> hbm.store(slice(0, 4), O=3 * Q_1)
    >>> hbm.counts
    Counts(reads=8, writes=8, extra=12, sram=8)
    """

    def __init__(self, dtype: DTypeLike = np.float64) -> None:
        self.dtype: np.dtype = np.dtype(dtype)
        self._arrays: dict[str, np.ndarray] = {}
        self._buffers: dict[str, int] = {}
        self._reads = self._writes = self._extra = self._sram = 0

    def place(
        self, name: str, array: ArrayLike, dtype: DTypeLike | None = None, shape: tuple[int, ...] | None = None
    ) -> None:
        """Put a copy of a caller's array, of this shape, into HBM, where it is when the algorithm starts; no access."""
        if shape not in (None, np.shape(array)):
            raise ShapeError(f"{name} has shape {np.shape(array)}: expected {shape}")
        self._arrays[name] = np.array(array, dtype or self.dtype)

    def allocate(
        self, shape: Any, *names: str, fill: Any = None, dtype: DTypeLike | None = None, output: bool = False
    ) -> None:
        """Reserve arrays; with `fill`, write their initial value.  An `output` is not extra memory."""
        for name in names:
            array = self._arrays[name] = np.empty(shape, dtype or self.dtype)
            self._extra += 0 if output else array.size
            if fill is not None:
                self.store(..., **{name: fill})

    def load(self, index: Any, *names: str) -> Any:
        """Read a tile of each array from HBM into its on-chip buffer and return them (copies); of one, itself."""
        tiles = [self.on_chip(name, np.array(self._arrays[name][index])) for name in names]
        self._reads += sum(tile.size for tile in tiles)
        return tiles if len(tiles) > 1 else tiles[0]

    def store(self, index: Any, **tiles: Any) -> None:
        """Write tiles from the chip to their place in the arrays of these names in HBM."""
        for name, tile in tiles.items():
            place = self._arrays[name][index]
            place[...] = tile
            self._writes += place.size

    def on_chip(self, name: str, array: np.ndarray) -> np.ndarray:
        """Note that an array computed on the chip occupies the buffer `name`, and return it."""
        self._buffers[name] = max(self._buffers.get(name, 0), array.size)
        self._sram = max(self._sram, sum(self._buffers.values()))
        return array

    def end_kernel(self) -> None:
        """Free the on-chip buffers, as between two kernels."""
        self._buffers.clear()

    def take(self, *names: str) -> list[np.ndarray]:
        """Return arrays to the caller, who gets them in HBM; not an access."""
        return [self._arrays.pop(name) for name in names]

    @property
    def counts(self) -> Counts:
        """The accesses so far."""
        return Counts(self._reads, self._writes, self._extra, self._sram)


class Forward(NamedTuple):
    """O (N, d), the row sums l and row maxima m (N,), the random state (None without dropout), and the accesses.

    An empty row, one without any visible key, has O = 0, l = 0 and m = -inf.

    See Also
    --------
    flash_forward : Returns one.

    Examples
    --------
    >>> from cuattn import reference
    >>> x = np.ones((8, 2))
    >>> reference.flash_forward(x, x, x, 16).l[0]
    np.float64(8.0)
    """

    o: np.ndarray
    l: np.ndarray
    m: np.ndarray
    rng_state: RNGState | None
    counts: Counts


class Backward(NamedTuple):
    """The gradients dQ, dK, dV (N, d), and the accesses.

    See Also
    --------
    flash_backward : Returns one.

    Examples
    --------
    >>> from cuattn import reference
    >>> x = np.ones((8, 2))
    >>> reference.flash_backward(x, x, x, x, reference.flash_forward(x, x, x, 16), 16).dv[0].round(3)
    array([1., 1.])
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    counts: Counts


def start(M, dtype, *, square=False, tangents=False, **arrays):
    """Put Q, K, V, ... into HBM, all of one shape (N, d); with tangents, blocks are those of half the memory.

    Returns
    -------
    hbm : HBM
    n, d : int
    rows, keys : list of slice
        The blocks of B_r rows and of B_c keys, :func:`cuattn.io_model.block_sizes`; the last may be shorter.
    """
    hbm = HBM(dtype)
    shape = np.shape(arrays["Q"])
    if len(shape) != 2 or 0 in shape:
        raise ShapeError(f"Q has shape {shape}: expected (N, d) with N, d >= 1")
    for name, array in arrays.items():
        hbm.place(name, array, shape=shape)
    n, d = shape
    sizes = block_sizes(n, d, halved(d, M) if tangents else M, square)
    return hbm, n, d, blocks(n, sizes.b_r), blocks(n, sizes.b_c)


def blocks(n, size):
    """Return the blocks of `size` that n elements are divided into; the last may be shorter."""
    return [slice(first, min(first + size, n)) for first in range(0, n, size)]


def exp_minus(x, m):
    """Return e^(x - m) of numbers or rows; with m = -inf, where nothing was visible, all of x is too, and gives 0."""
    return np.exp((x.T - np.where(m == -np.inf, 0, m)).T)


def softmax_tile(S):
    """Return m~ = rowmax(S), P~ = exp(S - m~) and l~ = rowsum(P~) of a tile.

    In a row that is masked throughout, m~ = -inf and P~ = 0 (the papers leave that row undefined).
    """
    m = S.max(axis=1)
    P = exp_minus(S, m)
    return m, P, P.sum(axis=1)


def reciprocal(l):
    """Return 1 / l, 0 where l = 0: an empty row's output is 0."""
    return np.divide(1, l, out=np.zeros_like(l), where=l != 0)


def empty_rows(hbm, Q_i):
    """Return O_i, l_i and m_i of a block of queries on the chip, before any key."""
    O_i, l_i = np.zeros_like(Q_i), np.zeros_like(Q_i[:, 0])
    return hbm.on_chip("O", O_i), hbm.on_chip("l", l_i), hbm.on_chip("m", l_i - np.inf)


def backward_blocks(hbm, keys):
    """Walk over the blocks of keys as a backward does: yield j, the block, and K_j, V_j, dK_j, dV_j on the chip."""
    for j, columns in enumerate(keys):  # Alg. 4 l. 6; FlashMask Alg. 2 l. 8
        K_j, V_j = hbm.load(columns, "K", "V")  # Alg. 4 l. 7; FlashMask Alg. 2 l. 9
        dK_j, dV_j = (hbm.on_chip(name, np.zeros_like(K_j)) for name in ("dK", "dV"))  # l. 8; l. 10
        yield j, columns, K_j, V_j, dK_j, dV_j
        hbm.store(columns, dK=dK_j, dV=dV_j)  # Alg. 4 l. 24; FlashMask Alg. 2 l. 36


def add_gradients(hbm, scale, P_ij, D_i, dO_i, Q_i, dQ_i, K_j, V_j, dK_j, dV_j, Z_ij=1):
    """Return dQ_i after a tile, and add to dK_j and dV_j in place; Z_ij is dropout's factor."""
    dV_j += (P_ij * Z_ij).T @ dO_i  # Alg. 4 l. 15-16; FlashMask Alg. 2 l. 29
    dP_ij = hbm.on_chip("dP", dO_i @ V_j.T) * Z_ij  # Alg. 4 l. 17-18; FlashMask Alg. 2 l. 30
    dS_ij = P_ij * (dP_ij - D_i[:, None])  # Alg. 4 l. 20; FlashMask Alg. 2 l. 31
    dK_j += scale * (dS_ij.T @ Q_i)  # Alg. 4 l. 22; FlashMask Alg. 2 l. 34
    return dQ_i + scale * (dS_ij @ K_j)  # Alg. 4 l. 21; FlashMask Alg. 2 l. 32
