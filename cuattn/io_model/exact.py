"""Exact reads and writes of each algorithm in :mod:`cuattn.reference`, ceilings included."""

from typing import Any

from cuattn.io_model.sizes import MASK_VECTORS, Tiles, Traffic, block_lengths, block_sizes, halved, tile_array

_STATE_WORDS = 2  # the random state saved for the backward pass: seed and offset
_MASK_BOUNDS = 8  # minimum and maximum of each vector over a block of keys


def standard_forward(n: int, d: int, m: int | None = None) -> Traffic:
    """Count the accesses of Algorithm 0, standard attention.

    Parameters
    ----------
    n, d : int
        Sequence length and head dimension.
    m : int, optional
        On-chip memory in elements.  Then matrices are multiplied tile by tile, and the operand that streams past is
        read T_c times.  None: every kernel reads each input once and writes each output once, as the proof of
        Theorem 2 counts.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.standard_forward : Counts them as it computes.
    theorem_2_standard : The paper's expression.

    Notes
    -----
    S = Q K^T reads K once, Q T_c times and writes N^2; the softmax reads and writes N^2; O = P V reads N^2, V T_c
    times and writes O: 4 N^2 + 2 N d + 2 T_c N d in all.  That is Theta(N d + N^2) for M >= d^2, the range in
    which the papers' GPUs work; for a smaller M the matrix product itself needs more.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.standard_forward(1024, 64).total == 4 * 1024**2 + 4 * 1024 * 64
    True
    """
    t_c = 1 if m is None else block_sizes(n, d, m).t_c
    return Traffic(reads=2 * n * n + n * d + 2 * t_c * n * d, writes=2 * n * n + n * d)


def standard_backward(n: int, d: int, m: int | None = None) -> Traffic:
    """Count the accesses of Algorithm 3, standard attention's backward: 7 N^2 + 4 N d + 4 T_c N d.

    Parameters
    ----------
    n, d : int
        Sequence length and head dimension.
    m : int, optional
        As in :func:`standard_forward`.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.standard_backward : Counts them as it computes.

    Notes
    -----
    dV = P^T dO, dQ = dS K and dK = dS^T Q each read N^2 and one operand T_c times, and write N d; dP = dO V^T reads V
    once, dO T_c times and writes N^2; dS reads 2 N^2 and writes N^2.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.standard_backward(1024, 64).total == 7 * 1024**2 + 8 * 1024 * 64
    True
    """
    t_c = 1 if m is None else block_sizes(n, d, m).t_c
    return Traffic(reads=5 * n * n + n * d + 4 * t_c * n * d, writes=2 * n * n + 3 * n * d)


def flash_forward(n: int, d: int, m: int, dropout: bool = False, mask: bool = False, blocks: Any = None) -> Traffic:
    """Count the accesses of Algorithms 1, 2 and 5, FlashAttention's forward.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    dropout : bool
        The random state is saved to HBM (2 words).
    mask : bool
        A dense mask lies in HBM and is read once (a masking function computed on chip costs nothing).  Not together
        with `blocks`.
    blocks : array_like, (T_r, T_c), bool, optional
        The block sparsity mask of Algorithm 5.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flash_forward : Counts them as it computes.
    theorem_2_flash : The paper's expression.

    Notes
    -----
    Reads: K, V once, and T_c passes over Q, O, l, m.  Writes: O, l, m once to initialise and T_c times.  In all
    T_c (3 N d + 4 N) + 3 N d + 2 N.  With `blocks`, the passes are over the rows of nonzero blocks only, and there is
    one read per block of the mask.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import io_model
    >>> io_model.flash_forward(1024, 64, 32768)
    Traffic(reads=1196032, writes=608256)
    >>> io_model.flash_forward(1024, 64, 32768, blocks=np.eye(16, 8))
    Traffic(reads=197760, writes=101376)
    """
    rows, flags = _rows_visited(n, d, m, blocks)
    reads = 2 * n * d + rows * (2 * d + 2) + flags + n * n * bool(mask)
    writes = n * d + 2 * n + rows * (d + 2) + _STATE_WORDS * bool(dropout)
    return Traffic(reads, writes)


def flash_backward(n: int, d: int, m: int, dropout: bool = False, mask: bool = False, blocks: Any = None) -> Traffic:
    """Count the accesses of Algorithm 4, FlashAttention's backward; with `blocks`, zero blocks are skipped.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    dropout : bool
        The random state is read from HBM (2 words).
    mask : bool
        A dense mask lies in HBM and is read once.  Not together with `blocks`.
    blocks : array_like, (T_r, T_c), bool, optional
        The block sparsity mask.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flash_backward : Counts them as it computes.

    Notes
    -----
    Reads: K, V once, and T_c passes over Q, O, dO, dQ, l, m.  Writes: dQ, dK, dV once to initialise, dQ T_c times,
    dK and dV once.  In all T_c (5 N d + 2 N) + 7 N d, or 20 N^2 d^2 / M + 8 N^2 d / M + 7 N d.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import io_model
    >>> io_model.flash_backward(1024, 64, 32768)
    Traffic(reads=2244608, writes=851968)
    >>> io_model.flash_backward(1024, 64, 32768, blocks=np.eye(16, 8)).total
    623744
    """
    rows, flags = _rows_visited(n, d, m, blocks)
    reads = 2 * n * d + rows * (4 * d + 2) + flags + n * n * bool(mask) + _STATE_WORDS * bool(dropout)
    return Traffic(reads, writes=5 * n * d + rows * d)


def flash_jvp(n: int, d: int, m: int, dropout: bool = False, mask: bool = False, blocks: Any = None) -> Traffic:
    """Count the accesses of Algorithm 2 (5 with `blocks`) with its derivative along tangents of Q, K and V.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements; the blocks are those of m / 2, for there are
        twice the arrays on the chip.
    dropout, mask : bool
        As in :func:`flash_forward`.
    blocks : array_like, (T_r, T_c), bool, optional
        The block sparsity mask.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flash_jvp : Counts them as it computes.

    Notes
    -----
    Each matrix has a tangent beside it, and l and m have that of the logsumexp: T_c (6 N d + 6 N) + 6 N d + 3 N, with
    twice Algorithm 2's T_c, so about four times its accesses.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.flash_jvp(1024, 64, 32768)
    Traffic(reads=4505600, writes=2280448)
    """
    rows, flags = _rows_visited(n, d, halved(d, m), blocks)
    reads = 4 * n * d + rows * (4 * d + 3) + flags + n * n * bool(mask)
    writes = 2 * n * d + 3 * n + rows * (2 * d + 3) + _STATE_WORDS * bool(dropout)
    return Traffic(reads, writes)


def flash_backward_jvp(
    n: int, d: int, m: int, dropout: bool = False, mask: bool = False, blocks: Any = None
) -> Traffic:
    """Count the accesses of Algorithm 4 with its derivative along tangents.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements; the blocks are those of m / 2.
    dropout, mask : bool
        As in :func:`flash_backward`.
    blocks : array_like, (T_r, T_c), bool, optional
        The block sparsity mask.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flash_backward_jvp : Counts them as it computes.

    Notes
    -----
    T_c (10 N d + 3 N) + 14 N d, with twice Algorithm 4's T_c.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.flash_backward_jvp(1024, 64, 32768)
    Traffic(reads=8699904, writes=2752512)
    """
    rows, flags = _rows_visited(n, d, halved(d, m), blocks)
    reads = 4 * n * d + rows * (8 * d + 3) + flags + n * n * bool(mask) + _STATE_WORDS * bool(dropout)
    return Traffic(reads, writes=10 * n * d + rows * 2 * d)


def _rows_visited(n, d, m, blocks):
    """Return how many rows the inner loop visits over all passes, and how many blocks of a mask it asks."""
    sizes = block_sizes(n, d, m)
    if blocks is None:
        return n * sizes.t_c, 0
    blocks = tile_array("blocks", blocks, sizes)
    return int(blocks.sum(1) @ block_lengths(n, sizes.b_r)), blocks.size


def swapped_forward(n: int, d: int, m: int) -> Traffic:
    """Count the accesses of the lecture's forward with swapped loops, B_r = B_c: 2 T_r N d + 2 N d + 2 N.

    See :func:`lecture_swapped_forward` for the derivation.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.swapped_forward : Counts them as it computes.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.swapped_forward(1024, 64, 32768)
    Traffic(reads=1114112, writes=67584)
    """
    t_r = block_sizes(n, d, m, square=True).t_r
    return Traffic(reads=n * d + 2 * t_r * n * d, writes=n * d + 2 * n)


def rabe_staats_forward(n: int, d: int, m: int) -> Traffic:
    """Count the accesses of Rabe and Staats' chunked forward, with the chunks that FlashAttention would take.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.rabe_staats_forward : Counts them as it computes.

    Notes
    -----
    Q is read once, K and V T_r times.  The summary of each pair of chunks (a temporary output with its l and m:
    B_r (d + 2)) is written and read once, T_c N (d + 2) each way, and O is written once.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.rabe_staats_forward(1024, 64, 32768)
    Traffic(reads=2703360, writes=606208)
    """
    sizes = block_sizes(n, d, m)
    summaries = sizes.t_c * n * (d + 2)
    return Traffic(reads=n * d + 2 * sizes.t_r * n * d + summaries, writes=summaries + n * d)


def flashmask_forward(n: int, d: int, m: int, tiles: Tiles) -> Traffic:
    """Count the accesses of FlashMask's Algorithm 1.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    tiles : Tiles
        Which tiles are visited, and which need which interval's element test.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flashmask_forward : Counts them as it computes.

    Notes
    -----
    Preprocessing reads the four vectors and writes their eight bounds per block of keys.  Each row block reads Q_i
    and, per key block, 4 bounds to see whether it is skipped; a visited tile reads the other 4 bounds, K_j and V_j, and
    two mask vectors for each interval that needs the element test.  O and L are written once.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import io_model
    >>> whole, none = np.ones((16, 8), bool), np.zeros((16, 8), bool)
    >>> io_model.flashmask_forward(1024, 64, 32768, io_model.Tiles(whole, none, none))
    Traffic(reads=2167808, writes=66624)
    """
    sizes = block_sizes(n, d, m)
    visited, lower, upper = (tile_array(f"tiles.{name}", x, sizes) for name, x in tiles._asdict().items())
    keys = block_lengths(n, sizes.b_c)
    reads = MASK_VECTORS * n + n * d + _MASK_BOUNDS // 2 * (visited.size + int(visited.sum()))
    reads += 2 * d * int(visited.sum(0) @ keys) + 2 * int((lower.sum(0) + upper.sum(0)) @ keys)
    return Traffic(reads, writes=_MASK_BOUNDS * sizes.t_c + n * d + n)


def flashmask_backward(n: int, d: int, m: int, tiles: Tiles) -> Traffic:
    """Count the accesses of FlashMask's Algorithm 2.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    tiles : Tiles
        Which tiles are visited; the vectors are read once per key block, whatever its tiles need.

    Returns
    -------
    Traffic
        Elements read and written.

    See Also
    --------
    cuattn.reference.flashmask_backward : Counts them as it computes.

    Notes
    -----
    dQ is initialised; D = rowsum(dO o O) reads 2 N d and writes N; preprocessing is the forward's.  Each key block
    reads K_j, V_j, its four mask vectors and eight bounds and writes dK_j, dV_j.  A visited tile reads
    Q_i, O_i, dO_i, dQ_i, L_i, D_i, then dQ_i again to update it, and writes dQ_i: (6 d + 2) B_r.

    Examples
    --------
    >>> import numpy as np
    >>> from cuattn import io_model
    >>> whole, none = np.ones((16, 8), bool), np.zeros((16, 8), bool)
    >>> io_model.flashmask_backward(1024, 64, 32768, io_model.Tiles(whole, none, none)).total
    3630208
    """
    sizes = block_sizes(n, d, m)
    visits = int(tile_array("tiles.visited", tiles.visited, sizes).sum(1) @ block_lengths(n, sizes.b_r))
    reads = 4 * n * d + 2 * MASK_VECTORS * n + _MASK_BOUNDS * sizes.t_c + visits * (5 * d + 2)
    writes = 3 * n * d + n + _MASK_BOUNDS * sizes.t_c + visits * d
    return Traffic(reads, writes)
