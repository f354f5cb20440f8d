"""Block sizes of the papers, and what the models of this package return and take."""

from typing import NamedTuple

import numpy as np

from cuattn.errors import ArgumentError, ShapeError, as_integer

MASK_VECTORS = 4  # LTS, LTE, UTS, UTE
_ALIGNMENT = 256  # bytes


class Traffic(NamedTuple):
    """Elements moved between HBM and the chip.

    See Also
    --------
    cuattn.reference.Counts : What an algorithm counted.

    Examples
    --------
    >>> Traffic(reads=3, writes=1).total
    4
    """

    reads: int
    writes: int

    @property
    def total(self) -> int:
        """Reads and writes together: the papers' "HBM accesses"."""
        return self.reads + self.writes


class Blocks(NamedTuple):
    """Block sizes B_r (rows of Q) and B_c (rows of K, V), and the numbers of blocks T_r and T_c.

    See Also
    --------
    block_sizes : Makes them.

    Examples
    --------
    >>> block_sizes(8, 2, 16)
    Blocks(b_r=2, b_c=2, t_r=4, t_c=4)
    """

    b_r: int
    b_c: int
    t_r: int
    t_c: int


class Tiles(NamedTuple):
    """What FlashMask does with each tile: three boolean arrays of shape (T_r, T_c).

    `visited` tiles are not skipped; in a visited tile, `lower` says that the first interval (LTS, LTE) must be
    tested element by element, `upper` the same of the second (UTS, UTE).

    See Also
    --------
    flashmask_forward : Counts what they cost.

    Examples
    --------
    >>> from cuattn import masks, reference
    >>> x = np.ones((8, 2))
    >>> reference.flashmask_forward(x, x, x, masks.causal(8), 16).tiles.visited.sum()
    np.int64(10)
    """

    visited: np.ndarray
    lower: np.ndarray
    upper: np.ndarray


def block_sizes(n: int, d: int, m: int, square: bool = False) -> Blocks:
    """Return the papers' block sizes, B_c = ceil(M / 4d) and B_r = min(ceil(M / 4d), d).

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    square : bool, default False
        Take B_r = B_c, the first change of the lecture's last part.

    Returns
    -------
    Blocks
        B_r, B_c and the numbers of blocks T_r and T_c.

    Raises
    ------
    ArgumentError
        When `n` or `d` is not positive or `m` is outside the theorems' range d <= M <= N d.

    See Also
    --------
    flash_forward : Accesses with these blocks.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.block_sizes(1024, 64, 32768)
    Blocks(b_r=64, b_c=128, t_r=16, t_c=8)
    """
    n, d = _size("n", n), _size("d", d)
    if as_integer(m) is None:
        raise ArgumentError(f"M = {m!r}: expected a whole number of elements")
    m = int(m)
    if not d <= m <= n * d:
        raise ArgumentError(f"M = {m}: expected d <= M <= N d, here {d} <= M <= {n * d}")
    b_c = cdiv(m, 4 * d)
    b_r = b_c if square else min(b_c, d)
    return Blocks(b_r, b_c, cdiv(n, b_r), cdiv(n, b_c))


def halved(d, m):
    """Return the memory for what has tangents, which take as much again: of one row at least."""
    return max(m // 2, min(d, m))


def cdiv(a, b):
    """Return ceil(a / b) of integers: how many blocks of b hold a elements.

    Parameters
    ----------
    a, b : int or ndarray of int
        Elements in all and in one block, b > 0.

    Returns
    -------
    int or ndarray of int
        Exact for integers of any size, which ``math.ceil(a / b)`` is not.

    Examples
    --------
    >>> cdiv(10, 4), cdiv(8, 4), cdiv(0, 4)
    (3, 2, 0)
    """
    return -(-a // b)


def align_up(size):
    """Return a number of bytes rounded up to where the next piece of shared memory on a GPU begins."""
    return cdiv(size, _ALIGNMENT) * _ALIGNMENT


def block_lengths(n, block):
    """Return the lengths of the blocks that n elements are divided into: all `block` but perhaps the last."""
    return np.minimum(block, n - np.arange(0, n, block))


def tile_array(name, array, sizes):
    array = np.asarray(array).astype(bool)
    if array.shape != (sizes.t_r, sizes.t_c):
        raise ShapeError(f"{name} has shape {array.shape}: expected (T_r, T_c) = {(sizes.t_r, sizes.t_c)}")
    return array


def _size(name, value):
    size = as_integer(value)
    if size is None or size < 1:
        raise ArgumentError(f"{name} = {value!r}: expected a positive whole number")
    return size
