"""The papers' own expressions: what stands inside their Theta, and the lecture's forms with constants."""

from cuattn.io_model.sizes import MASK_VECTORS, cdiv


def theorem_2_standard(n: int, d: int) -> int:
    """Return N d + N^2: standard attention's HBM accesses are Theta of it, forward (Theorem 2) and backward (5).

    Parameters
    ----------
    n, d : int
        Sequence length and head dimension.

    Returns
    -------
    int
        The expression, without the constant that Theta hides.

    See Also
    --------
    standard_forward : The exact count.
    theorem_2_flash : With tiling.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.theorem_2_standard(1024, 64)
    1114112
    """
    return n * d + n * n


def theorem_2_flash(n: int, d: int, m: int) -> float:
    """Return N^2 d^2 / M: FlashAttention's HBM accesses are Theta of it, forward (Theorem 2) and backward (5).

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.

    Returns
    -------
    float
        The expression, without the constant that Theta hides.

    See Also
    --------
    flash_forward : The exact count.
    theorem_2_standard : Without tiling.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.theorem_2_flash(1024, 64, 32768)
    131072.0
    """
    return n * n * d * d / m


def proposition_4(n: int, d: int, m: int, s: float) -> float:
    """Return N d + s N^2 d^2 / M: block-sparse FlashAttention's accesses are Theta of it (Proposition 4).

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    s : float
        Share of nonzero blocks in the block mask.

    Returns
    -------
    float
        The expression, without the constant that Theta hides.

    See Also
    --------
    theorem_2_flash : Without a block mask.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.proposition_4(1024, 64, 32768, 0.25)
    98304.0
    """
    return n * d + s * theorem_2_flash(n, d, m)


def lecture_forward(n: int, d: int, m: int, s: float = 1) -> float:
    """Return the lecture's s (12 N^2 d^2 / M + 16 N^2 d / M) + 3 N d for Algorithm 1 (outer loop over K, V) and 5.

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.
    s : float, default 1
        Share of nonzero blocks in the block mask of Algorithm 5; 1 without a mask.

    Returns
    -------
    float
        Elements read and written.

    See Also
    --------
    lecture_swapped_forward : With the loops swapped.
    flash_forward : The exact count.

    Notes
    -----
    One inner iteration reads Q_i, O_i, l_i, m_i and writes O_i, l_i, m_i: (3 d + 4) B_r.  T_r of them make one
    pass, (3 d + 4) N, and the outer loop makes T_c = 4 N d / M passes: 12 N^2 d^2 / M + 16 N^2 d / M.  Outside
    the inner loop the slides count 3 d B_c per pass and do not name its parts.  K_j and V_j are two; the third,
    N d over all passes, is the initialisation of O.  That of l and m (2 N) is left out, so that, where nothing is
    rounded up, ``flash_forward(n, d, m).total == lecture_forward(n, d, m) + 2 * n``.

    With a block mask the inner loop's work is done for a share s of its iterations; K and V are read and O is
    initialised whatever the mask is.  Exactly there is also one read per block of the mask.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.lecture_forward(1024, 64, 32768), io_model.flash_forward(1024, 64, 32768).total
    (1802240.0, 1804288)
    >>> io_model.lecture_forward(1024, 64, 32768, 0.5)
    999424.0
    """
    return s * (12 * n * n * d * d / m + 16 * n * n * d / m) + 3 * n * d


def lecture_swapped_forward(n: int, d: int, m: int) -> float:
    """Return the lecture's 8 N^2 d^2 / M + 3 N d + 2 N for the swapped loops (outer loop over Q, O on chip).

    Parameters
    ----------
    n, d, m : int
        Sequence length, head dimension and on-chip memory in elements, d <= m <= n d.

    Returns
    -------
    float
        Elements read and written.

    See Also
    --------
    lecture_forward : The paper's order of loops.
    swapped_forward : The exact count.

    Notes
    -----
    One inner iteration reads K_j and V_j: 2 d B_c.  T_c of them make one pass, 2 N d, and with B_r = B_c the
    outer loop makes T_r = 4 N d / M passes: 8 N^2 d^2 / M.  (With Algorithm 1's B_r = min(B_c, d), T_r would
    not fall below N / d and the term would not fall below 2 N^2.)  Outside the inner loop, Q is read and O, l and
    m are written once: 2 N d + 2 N.  The slides' third N d is again unnamed and again fits the initialisation of O in
    HBM.  A tile of O that starts on chip needs none, so that, where nothing is rounded up,
    ``swapped_forward(n, d, m).total == lecture_swapped_forward(n, d, m) - n * d``.

    Examples
    --------
    >>> from cuattn import io_model
    >>> io_model.lecture_swapped_forward(1024, 64, 32768), io_model.swapped_forward(1024, 64, 32768).total
    (1247232.0, 1181696)
    """
    return 8 * n * n * d * d / m + 3 * n * d + 2 * n


def flashmask_vectors(n: int, b_r: int) -> int:
    """Return 4 T_r N: the most that FlashMask's forward reads of its four mask vectors (section 4.3).

    Every block of B_r rows reads the vectors of all keys: less than the N^2 of a dense mask by the factor B_r / 4.
    The backward reads each vector once per key (appendix A.1), 4 N: that is T_r = 1, or b_r = n.

    Parameters
    ----------
    n : int
        Sequence length.
    b_r : int
        Rows of a block of queries.

    Returns
    -------
    int
        Elements read, when every tile is partial.

    See Also
    --------
    flashmask_forward : Accesses of the whole algorithm.

    Examples
    --------
    >>> from cuattn import io_model
    >>> 1024 * 1024 / io_model.flashmask_vectors(1024, 128)
    32.0
    """
    return MASK_VECTORS * cdiv(n, b_r) * n
