"""The masks and score modifications of attention-gym as functions for cuattn, each beside its own NumPy formula.

A recipe is a function of (b, h, i, j) or (s, b, h, i, j), and a formula that makes the same matrix in another way:
(batch, heads, n, n), of booleans, or of float64 from scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

BATCH, HEADS, N = 2, 4, 64
_RNG = np.random.default_rng(11)
B, H, I, J = np.ogrid[:BATCH, :HEADS, :N, :N]


class Recipe(NamedTuple):
    """A function, its arguments and its formula; whether it is a mask, and whether intervals per key say it."""

    function: Callable[..., Any]
    formula: Callable[..., np.ndarray]
    args: tuple = ()
    columns: bool = False


def _tri(n=N):
    return np.tril(np.ones((n, n), bool))


def _blocks(*sizes):
    return np.repeat(np.arange(len(sizes)), sizes)


# Masks.


def causal():
    return Recipe(lambda b, h, i, j: i >= j, _tri, columns=True)


def sliding_window(window=9):
    return Recipe(
        lambda b, h, i, j: (i >= j) & (i - j <= window),
        lambda: _tri() & np.triu(np.ones((N, N), bool), -window),
        columns=True,
    )


def dilated_sliding_window(window=5, dilation=3):
    def formula():
        return np.array(
            [[any(i - j == k * dilation for k in range(-window, window + 1)) for j in range(N)] for i in range(N)]
        )

    return Recipe(lambda b, h, i, j: (abs(i - j) <= window * dilation) & ((i - j) % dilation == 0), formula)


def prefix_lm(prefix=20):
    return Recipe(
        lambda b, h, i, j: (j < prefix) | (i >= j),
        lambda: np.concatenate([np.ones((N, prefix), bool), _tri()[:, prefix:]], 1),
        columns=True,
    )


def document(inner=None):
    """Attend within documents, causally; positions are counted anew in each document for the inner mask."""
    ids = np.stack([_blocks(10, 22, 32), _blocks(1, 40, 23)])
    starts = np.stack([np.concatenate([[0], np.flatnonzero(np.diff(x)) + 1])[x] for x in ids])
    inner = inner or (lambda b, h, i, j: i >= j)

    def visible(b, h, i, j):
        return (ids[b, i] == ids[b, j]) & inner(b, h, i - starts[b, i], j - starts[b, j])

    def formula():
        return np.stack([np.equal.outer(x, x) & _tri() for x in ids])[:, None]

    return Recipe(visible, formula, columns=True)


def shared_prefix(length=16, branches=4):
    """Several continuations of one prefix, which do not see each other."""
    group = np.concatenate([np.zeros(length, int), 1 + _blocks(*[(N - length) // branches] * branches)])
    return Recipe(
        lambda b, h, i, j: (i >= j) & ((j < length) | (group[i] == group[j])),
        lambda: _tri() & ((group[None] == 0) | (group[:, None] == group[None])),
        columns=True,
    )


def natten(width=8, kernel=5):
    """Neighbourhoods in two dimensions, shifted into the image at its edges."""
    half = kernel // 2

    def visible(b, h, i, j):
        centre_x = np.clip(i // width, half, N // width - 1 - half)
        centre_y = np.clip(i % width, half, width - 1 - half)
        return (abs(centre_x - j // width) <= half) & (abs(centre_y - j % width) <= half)

    def formula():
        def near(n):
            start = np.clip(np.arange(n) - half, 0, n - kernel)
            return (np.arange(n)[None] >= start[:, None]) & (np.arange(n)[None] < start[:, None] + kernel)

        return np.kron(near(N // width), np.ones((width, width), bool)) & np.tile(near(width), (N // width, N // width))

    return Recipe(visible, formula)


def tiled_natten(width=8, kernel=5, tile=4):
    """The same neighbourhoods with pixels ordered by tiles, so that neighbours stay near each other."""

    def place(x):
        per_row = width // tile
        t, inside = x // tile**2, x % tile**2
        return t // per_row * tile + inside // tile, t % per_row * tile + inside % tile

    def visible(b, h, i, j):
        half = kernel // 2
        (ix, iy), (jx, jy) = place(i), place(j)
        return (abs(np.clip(ix, half, width - 1 - half) - jx) <= half) & (
            abs(np.clip(iy, half, width - 1 - half) - jy) <= half
        )

    def formula():
        x, y = place(np.arange(N))
        plain = natten(width, kernel).formula()
        return plain[np.ix_(x * width + y, x * width + y)]

    return Recipe(visible, formula)


def sliding_tile(grid=(4, 4, 4), tile=2, window=3):
    """STA: each tile of a video sees a window of tiles around it, in three dimensions."""
    _, height, width = grid
    per_tile = tile**3

    def visible(b, h, i, j):
        ti, tj = i // per_tile, j // per_tile
        ny, nx = height // tile, width // tile
        near = True
        for q, k in ((ti // (ny * nx), tj // (ny * nx)), (ti // nx % ny, tj // nx % ny), (ti % nx, tj % nx)):
            near = near & (abs(q - k) <= window // 2)
        return near

    def formula():
        t = np.stack(np.unravel_index(np.arange(N) // per_tile, tuple(n // tile for n in grid)))
        return (abs(t[:, :, None] - t[:, None]) <= window // 2).all(0)

    return Recipe(visible, formula)


def flamingo():
    """Cross attention from text to images: a token sees the eight tokens of the image that it follows."""
    image = np.sort(_RNG.integers(-1, N // 8, (BATCH, N)), axis=1)
    starts, ends = np.where(image < 0, 0, image * 8), np.where(image < 0, 0, image * 8 + 8)
    return Recipe(
        lambda b, h, i, j: (j >= starts[b, i]) & (j < ends[b, i]),
        lambda: (image[:, None, :, None] == J // 8) & np.ones((1, HEADS, 1, 1), bool),
        columns=True,
    )


def transfusion():
    """Causal text with images that see themselves in full."""
    spans = np.array([[(5, 12), (30, 20)], [(0, 3), (40, 24)]])

    def visible(b, h, i, j):
        shown = i >= j
        for k in range(2):
            start, length = spans[b, k, 0], spans[b, k, 1]
            inside = [(x >= start) & (x < start + length) for x in (i, j)]
            shown = shown | (inside[0] & inside[1])
        return shown

    def formula():
        shown = np.broadcast_to(_tri(), (BATCH, 1, N, N)).copy()
        for b in range(BATCH):
            for start, length in spans[b]:
                shown[b, 0, start : start + length, start : start + length] = True
        return shown

    return Recipe(visible, formula, columns=True)


def global_and_window(window=4, n_global=3):
    return Recipe(
        lambda b, h, i, j: (abs(i - j) <= window) | (i < n_global) | (j < n_global),
        lambda: (abs(I - J) <= window) | (np.minimum(I, J) < n_global),
        columns=True,
    )


def random_blocks(block=8):
    kept = _RNG.random((HEADS, N // block, N // block)) < 0.4
    return Recipe(
        lambda b, h, i, j: kept[h, i // block, j // block], lambda: kept.repeat(block, 1).repeat(block, 2)[None]
    )


def block_diffusion(block=8):
    """Noisy tokens, in front, see their own block and clean tokens of earlier blocks; those are causal by block."""
    half = N // 2

    def visible(b, h, i, j):
        clean_i, clean_j = i >= half, j >= half
        block_i, block_j = np.where(clean_i, i - half, i) // block, np.where(clean_j, j - half, j) // block
        own = (block_i == block_j) & (clean_i == clean_j)
        return own | (clean_j & ~clean_i & (block_i > block_j)) | (clean_i & clean_j & (block_i >= block_j))

    def formula():
        order = np.arange(half) // block
        top = [np.equal.outer(order, order), np.greater.outer(order, order)]
        return np.block([top, [np.zeros((half, half), bool), np.greater_equal.outer(order, order)]])

    return Recipe(visible, formula)


def causal_blocks(block=16):
    return Recipe(
        lambda b, h, i, j: i // block >= j // block,
        lambda: np.kron(_tri(N // block), np.ones((block, block), bool)),
        columns=True,
    )


def padding():
    lengths = np.array([N - 9, 17])
    return Recipe(
        lambda b, h, i, j: (j < lengths[b]) & (i < lengths[b]),
        lambda: np.maximum(I, J) < lengths[:, None, None, None],
        columns=True,
    )


def all_heads_differ():
    windows = np.array([1, 5, 20, 64])
    return Recipe(
        lambda b, h, i, j: abs(i - j) < windows[h], lambda: np.abs(I - J) < windows[None, :, None, None], columns=True
    )


# Scores.


def alibi():
    return Recipe(
        lambda s, b, h, i, j: s + 2.0 ** (-8 * (h + 1) / HEADS) * (j - i),
        lambda s: s + np.exp2(-8.0 / HEADS * np.arange(1, HEADS + 1))[:, None, None] * (J - I),
    )


def learned_alibi():
    slopes = _RNG.normal(size=HEADS)
    return Recipe(
        lambda s, b, h, i, j, slope: s + slope[h] * (j - i), lambda s: s + slopes[:, None, None] * (J - I), (slopes,)
    )


def softcap(cap=20.0):
    return Recipe(lambda s, b, h, i, j: cap * np.tanh(s / cap), lambda s: cap * np.tanh(s / cap))


def approximate_softcap(cap=4.0):
    """A rational function for tanh, which costs fewer instructions."""

    def score(s, b, h, i, j):
        x = np.clip(s / cap, -3, 3)
        return cap * x * (27 + x * x) / (27 + 9 * x * x)

    def formula(s):
        x = np.clip(s / cap, -3, 3)
        return cap * np.polyval([1, 0, 27, 0], x) / np.polyval([9, 0, 27], x)

    return Recipe(score, formula)


def relative_table():
    table = _RNG.normal(size=(HEADS, 2 * N - 1))
    return Recipe(
        lambda s, b, h, i, j, t: s + t[h, i - j + N - 1],
        lambda s: s + table[:, (np.arange(N)[:, None] - np.arange(N)) + N - 1],
        (table,),
    )


def t5_buckets(buckets=32, furthest=40):
    """T5's relative positions: exact up to a quarter of the buckets, then logarithmic."""
    table = _RNG.normal(size=(buckets, HEADS))

    def score(s, b, h, i, j, t):
        half = buckets // 2
        distance, exact = abs(j - i), half // 2
        ratio = np.log(np.maximum(distance, 1) / exact) / np.log(furthest / exact) * (half - exact)
        far = np.minimum(exact + np.floor(ratio + 1e-4).astype(int), half - 1)
        return s + t[np.where(j > i, half, 0) + np.where(distance < exact, distance, far), h]

    def formula(s):
        half, exact = buckets // 2, buckets // 4
        distance = np.abs(np.arange(N)[None] - np.arange(N)[:, None])
        far = [
            min(half - 1, exact + int(np.log(max(x, 1) / exact) / np.log(furthest / exact) * (half - exact) + 1e-4))
            for x in range(N)
        ]
        index = np.where(distance < exact, distance, np.array(far)[distance]) + half * (
            np.arange(N)[None] > np.arange(N)[:, None]
        )
        return s + table[index].transpose(2, 0, 1)

    return Recipe(score, formula, (table,))


def key_bias():
    bias = _RNG.normal(size=(BATCH, N))
    return Recipe(lambda s, b, h, i, j, x: s + x[b, j], lambda s: s + bias[:, None, None], (bias,))


def pair_bias():
    bias = _RNG.normal(size=(HEADS, N, N))
    return Recipe(lambda s, b, h, i, j, x: s + x[h, i, j], lambda s: s + bias, (bias,))


def temperature():
    logits = _RNG.normal(size=HEADS)
    return Recipe(lambda s, b, h, i, j, x: s * np.exp(x[h]), lambda s: s * np.exp(logits)[:, None, None], (logits,))


def graphormer():
    """A bias by the distance of two nodes in a graph, learned per head."""
    distance, table = _RNG.integers(0, 6, (BATCH, N, N)).astype(np.int8), _RNG.normal(size=(6, HEADS))
    return Recipe(
        lambda s, b, h, i, j, d, t: s + t[d[b, i, j], h],
        lambda s: s + table[distance].transpose(0, 3, 1, 2),
        (distance, table),
    )


def natten_with_bias(width=8, kernel=5):
    table = _RNG.normal(size=(HEADS, 2 * width - 1, 2 * width - 1))
    inside = natten(width, kernel)

    def score(s, b, h, i, j, t):
        bias = t[h, i // width - j // width + width - 1, i % width - j % width + width - 1]
        return np.where(inside.function(b, h, i, j), s + bias, -np.inf)

    def formula(s):
        x, y = np.divmod(np.arange(N), width)
        bias = table[:, np.subtract.outer(x, x) + width - 1, np.subtract.outer(y, y) + width - 1]
        return np.where(inside.formula(), s + bias, -np.inf)

    return Recipe(score, formula, (table,))


def window_and_alibi(window=9):
    return Recipe(
        lambda s, b, h, i, j: np.where((i >= j) & (i - j < window), s - 0.5**h * (i - j), -np.inf),
        lambda s: np.where(
            _tri() & (window > I - J), s - np.array([1, 0.5, 0.25, 0.125])[:, None, None] * (I - J), -np.inf
        ),
    )


def gated():
    """A score that an activation bends: no mask, not additive, smooth."""
    return Recipe(lambda s, b, h, i, j: s / (1 + np.exp(-s)), lambda s: s - s / (1 + np.exp(s)))


MASKS = (
    causal,
    sliding_window,
    dilated_sliding_window,
    prefix_lm,
    document,
    shared_prefix,
    natten,
    tiled_natten,
    sliding_tile,
    flamingo,
    transfusion,
    global_and_window,
    random_blocks,
    block_diffusion,
    causal_blocks,
    padding,
    all_heads_differ,
)
SCORES = (
    alibi,
    learned_alibi,
    softcap,
    approximate_softcap,
    relative_table,
    t5_buckets,
    key_bias,
    pair_bias,
    temperature,
    graphormer,
    natten_with_bias,
    window_and_alibi,
    gated,
)
