"""Functions of scores and of visibility that models use, as formulas that NumPy and PyTorch both read.

A formula is written once, in the operators and functions that both libraries share: cuattn traces it with NumPy,
FlexAttention compiles it with PyTorch, the reference evaluates it.  Arrays come as arguments behind the indices, so
that the same formula serves fixed ones, which a function captures, and learned ones, which are passed and
differentiated.
"""

import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from bench.mask_samples import samples

SEED = 17
CAP = 30.0  # softcap, as Gemma 2 has it for its logits
BUCKETS, FURTHEST = 32, 128  # T5's relative positions
KERNEL, TILE = 13, 8  # NATTEN's neighbourhood, and the side of its tiles
BLOCK = 128  # of random blocks
DISTANCES = 20  # Graphormer's largest distance in a graph
PAD = 2 * KERNEL - 1
NOTHING: Mapping = MappingProxyType({})


class Formula(NamedTuple):
    """One function of scores, of visibility, or both.

    Attributes
    ----------
    score : callable, optional
        ``score(s, b, h, i, j, **arrays, **given) -> s``.
    visible : callable, optional
        ``visible(b, h, i, j, **given) -> bool``.
    arrays : mapping of str to str
        Float arrays and their axes, each a letter: batch, heads, i (queries), j (keys), r (i - j), u (T5's buckets),
        x (offsets in an image), g (distances in a graph), or 1.
    size : float
        Standard deviation of their elements.
    given : mapping of str to array
        Integer and boolean arrays.
    option : str
        How cuattn says it: ``"score"``, ``"softcap"`` or ``"bias"``.
    """

    score: Callable | None = None
    visible: Callable | None = None
    arrays: Mapping[str, str] = NOTHING
    size: float = 1.0
    given: Mapping[str, np.ndarray] = NOTHING
    option: str = "score"

    def shapes(self, case):
        """Return the shapes of the float arrays."""
        lengths = {"b": case.batch, "h": case.heads, "i": case.n_queries, "j": case.n_keys, "u": BUCKETS, "x": PAD}
        lengths |= {"r": case.n_queries + case.n_keys - 1, "g": DISTANCES, "1": 1}
        return {name: tuple(lengths[axis] for axis in axes) for name, axes in self.arrays.items()}


def _random(*about):
    return np.random.default_rng((SEED, *about))


def _whole(xp, x):
    return x.astype(np.int32) if xp is np else x.to(xp.int32)


def identity(case, xp):
    """Return the score as it is."""
    return Formula(lambda s, b, h, i, j: s)


def alibi(case, xp):
    """ALiBi: a slope per head, 2^(-8 (h + 1) / H)."""
    rate = -8.0 / case.heads
    return Formula(lambda s, b, h, i, j: s + xp.exp2(rate * (h + 1)) * (j - i))


def slopes(case, xp):
    """ALiBi with learned slopes."""
    return Formula(lambda s, b, h, i, j, slope: s + slope[h] * (j - i), arrays={"slope": "h"}, size=0.01)


def softcap(case, xp):
    """Cap the scores by the keyword for it."""
    return softcap_function(case, xp)._replace(option="softcap")


def softcap_function(case, xp):
    """Cap the scores by a function."""
    return Formula(lambda s, b, h, i, j: CAP * xp.tanh(s / CAP))


def softcap_rational(case, xp):
    """Cap the scores by a rational function near tanh."""

    def score(s, b, h, i, j):
        x = xp.clip(s / CAP, -3.0, 3.0)
        return CAP * x * (27.0 + x * x) / (27.0 + 9.0 * x * x)

    return Formula(score)


def relative(case, xp):
    """Relative positions: a number per head and distance."""
    last = case.n_keys - 1
    return Formula(lambda s, b, h, i, j, table: s + table[h, i - j + last], arrays={"table": "hr"})


def t5(case, xp):
    """T5's buckets of distances, exact near by and logarithmic further away, half of them for each side."""
    side = BUCKETS // 2
    exact = side // 2
    rate = (side - exact) / math.log(FURTHEST / exact)

    def score(s, b, h, i, j, table):
        distance = abs(i - j)
        far = exact + _whole(xp, xp.log(xp.clip(distance, 1, None) / exact) * rate + 1e-4)  # buckets begin at powers
        bucket = xp.where(distance < exact, distance, xp.clip(far, None, side - 1))
        return s + table[bucket + xp.where(j > i, side, 0), h]

    return Formula(score, arrays={"table": "uh"})


def temperature(case, xp):
    """Multiply the scores by a factor per head."""
    return Formula(lambda s, b, h, i, j, logit: s * xp.exp(logit[h]), arrays={"logit": "h"}, size=0.3)


def key_bias(case, xp):
    """Add a number per sequence and key."""
    return Formula(lambda s, b, h, i, j, bias: s + bias[b, j], arrays={"bias": "bj"})


def graphormer(case, xp):
    """Add a learned number per head and distance of two nodes in a graph."""
    shape = case.batch, case.n_queries, case.n_keys
    distance = _random(1).integers(0, DISTANCES, shape, np.int8).astype(np.int32)
    return Formula(
        lambda s, b, h, i, j, table, distance: s + table[distance[b, i, j], h],
        arrays={"table": "gh"},
        given={"distance": distance},
    )


def keys(case, xp):
    """Bias (B, 1, 1, N)."""
    return Formula(lambda s, b, h, i, j, bias: s + bias[b, 0, 0, j], arrays={"bias": "b11j"}, option="bias")


def matrix(case, xp):
    """Bias (1, 1, N, N)."""
    return Formula(lambda s, b, h, i, j, bias: s + bias[0, 0, i, j], arrays={"bias": "11ij"}, option="bias")


def pairs(case, xp):
    """Bias (1, H, N, N)."""
    return Formula(lambda s, b, h, i, j, bias: s + bias[0, h, i, j], arrays={"bias": "1hij"}, option="bias")


def all_pairs(case, xp):
    """Bias (B, H, N, N)."""
    return Formula(lambda s, b, h, i, j, bias: s + bias[b, h, i, j], arrays={"bias": "bhij"}, option="bias")


def document_ids(case, xp):
    """Causal within documents, by a number per token."""
    number = _documents(case)[0]
    return Formula(
        visible=lambda b, h, i, j, number: (number[b, i] == number[b, j]) & (i >= j), given={"number": number}
    )


def document_offsets(case, xp):
    """Causal within documents, by positions in them: a mask of its own in every document."""

    def visible(b, h, i, j, number, start):
        row, key = i - start[b, i], j - start[b, j]
        return (number[b, i] == number[b, j]) & (row >= key)

    return Formula(visible=visible, given=dict(zip(("number", "start"), _documents(case), strict=True)))


def _documents(case):
    """Return the number of every token's document, and the document's first token."""
    number, start = [], []
    for sample in samples("causal_document", case.n_keys, case.batch):
        first = np.cumsum((0, *sample.lengths[:-1]))
        number.append(np.repeat(np.arange(len(first)), sample.lengths))
        start.append(np.repeat(first, sample.lengths))
    return np.array(number, np.int32), np.array(start, np.int32)


def _image(n):
    """Return height and width of an image of n pixels, and the side of a neighbourhood."""
    width = 1 << (math.isqrt(n).bit_length() - 1)
    return n // width, width, min(KERNEL, width - 1)


def _near(case, xp, place):
    """Return which pixels lie in the neighbourhood of others, that of the nearest inner one at the border."""
    height, width, kernel = _image(case.n_keys)
    half = kernel // 2

    def visible(b, h, i, j):
        (row, column), (y, x) = place(i), place(j)
        centre = xp.clip(row, half, height - 1 - half), xp.clip(column, half, width - 1 - half)
        return (abs(centre[0] - y) <= half) & (abs(centre[1] - x) <= half)

    return visible


def natten(case, xp):
    """Neighbourhoods of 13 x 13 pixels, pixels in rows."""
    width = _image(case.n_keys)[1]
    return Formula(visible=_near(case, xp, lambda t: (t // width, t % width)))


def natten_tiled(case, xp):
    """The same neighbourhoods, pixels in tiles of 8 x 8."""
    across = _image(case.n_keys)[1] // TILE

    def place(t):
        tile, pixel = t // TILE**2, t % TILE**2
        return tile // across * TILE + pixel // TILE, tile % across * TILE + pixel % TILE

    return Formula(visible=_near(case, xp, place))


def natten_bias(case, xp):
    """Neighbourhoods with a learned number per head and offset."""
    _, width, kernel = _image(case.n_keys)

    def score(s, b, h, i, j, table):
        down, right = i // width - j // width, i % width - j % width
        return s + table[h, xp.clip(down, 1 - kernel, kernel - 1) + KERNEL - 1,
                         xp.clip(right, 1 - kernel, kernel - 1) + KERNEL - 1]  # fmt: skip

    return natten(case, xp)._replace(score=score, arrays={"table": "hxx"})


def prefix(case, xp):
    """Causal, and the first tokens of a sequence for all."""
    length = _random(2).integers(case.n_keys // 4, case.n_keys // 2, case.batch, np.int32)
    return Formula(visible=lambda b, h, i, j, length: (j < length[b]) | (i >= j), given={"length": length})


def transfusion(case, xp):
    """Causal, and everything within an image: four images a sequence."""
    n, random = case.n_keys, _random(3)
    length = random.integers(n // 16, n // 8, (case.batch, 4))
    first = np.arange(4) * (n // 4) + random.integers(0, n // 8, (case.batch, 4))
    token = np.arange(n)
    inside = (token >= first[..., None]) & (token < (first + length)[..., None])  # (B, 4, N)
    image = (inside * np.arange(1, 5)[:, None]).sum(1).astype(np.int32)
    return Formula(
        visible=lambda b, h, i, j, image: (i >= j) | ((image[b, i] == image[b, j]) & (image[b, i] > 0)),
        given={"image": image},
    )


def flamingo(case, xp):
    """Text over images: a row sees the keys of the last image before it."""
    images, each = 8, case.n_keys // 8
    shown = np.sort(_random(4).integers(0, case.n_queries, (case.batch, images - 1)))
    latest = (np.arange(case.n_queries)[:, None] >= shown[:, None]).sum(-1)
    return Formula(
        visible=lambda b, h, i, j, start: (j >= start[b, i]) & (j < start[b, i] + each),
        given={"start": (latest * each).astype(np.int32)},
    )


def dilated(case, xp):
    """Every fourth key within a window on both sides."""
    reach, step = case.n_keys // 16, 4
    return Formula(visible=lambda b, h, i, j: (abs(i - j) <= reach) & ((i - j) % step == 0))


def random_blocks(case, xp):
    """A quarter of all blocks, other ones in every head, and the diagonal."""
    count = -(-case.n_keys // BLOCK)
    kept = (_random(5).random((case.heads, count, count)) < 0.25) | np.eye(count, dtype=bool)
    return Formula(visible=lambda b, h, i, j, kept: kept[h, i // BLOCK, j // BLOCK], given={"kept": kept})


def block_diffusion(case, xp):
    """Noisy blocks before clean ones: own block, clean blocks before it; clean blocks causally."""
    half, block = case.n_keys // 2, max(case.n_keys // 64, 4)

    def visible(b, h, i, j):
        row, key = i % half // block, j % half // block
        noisy = (j < half) & (i < half) & (row == key)
        return noisy | ((j >= half) & ((row > key) | ((i >= half) & (row == key))))

    return Formula(visible=visible)


def global_window(case, xp):
    """A window on both sides, and 64 global tokens."""
    reach = case.n_keys // 16
    return Formula(visible=lambda b, h, i, j: (abs(i - j) <= reach) | (i < 64) | (j < 64))


def _by_name(*makes):
    return {make.__name__: make for make in makes}


MASKS = _by_name(
    document_ids,
    document_offsets,
    natten,
    natten_tiled,
    prefix,
    transfusion,
    flamingo,
    dilated,
    random_blocks,
    block_diffusion,
    global_window,
)
FORMULAS = MASKS | _by_name(
    identity,
    alibi,
    slopes,
    softcap,
    softcap_function,
    softcap_rational,
    relative,
    t5,
    temperature,
    key_bias,
    graphormer,
    keys,
    matrix,
    pairs,
    all_pairs,
    natten_bias,
)


@functools.lru_cache(4)  # some draw large arrays
def formula(case, xp=np):
    """Return the formula that a case names, for NumPy or for PyTorch.

    Examples
    --------
    >>> from bench.cases import Case
    >>> case = Case("t", "forward", 1, 4, 4, 8, 8, 16, score="relative")
    >>> formula(case).shapes(case)
    {'table': (4, 15)}
    """
    return FORMULAS[case.score](case, xp)
