"""Draw a mask of any kind and, by other means, the dense matrix of what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import cuattn
from cuattn import masks
from tests.masks import predicates
from tests.oracle import visible_band

if TYPE_CHECKING:
    pass

__all__ = ["draw", "pick"]

MASKS = {"none": 0.4, "boolean": 0.12, "column": 0.14, "constructor": 0.14, "block": 0.1, "and": 0.1}
BANDS = {"none": 0.55, "causal": 0.2, "left": 0.05, "right": 0.05, "window": 0.15}


def pick(rng, shares):
    """Draw a key of a table of shares."""
    return list(shares)[rng.choice(len(shares), p=list(shares.values()))]


def draw(problem, fixed, rng):
    """Give a problem its mask, causality and window, and what they leave visible."""
    kind, band = pick(fixed, MASKS), pick(fixed, BANDS)
    kinds = _parts(fixed) if kind == "and" else [kind] if kind != "none" else []
    seen = []
    for part in kinds:
        mask, shown, name = _MAKERS[part](rng, *problem.shape)
        if problem.mask is not None:
            mask = mask & problem.mask if isinstance(problem.mask, np.ndarray) else problem.mask & mask
        problem.mask = mask
        seen.append(shown)
        problem.features.add("mask and" if kind == "and" else f"mask {name}")
    if band != "none":
        seen.append(_band(problem, band, rng))
    for shown in seen:
        problem.visible = shown if problem.visible is None else problem.visible & shown


def _parts(fixed):
    """Draw several kinds of masks, at most one that is no ColumnMask of each."""
    kinds = ["column", str(fixed.choice(("column", "constructor", "boolean", "block")))]
    if fixed.random() < 0.4:
        kinds.append("block" if kinds[1] == "boolean" else "boolean")
    return fixed.permutation(kinds).tolist()


def _band(problem, kind, rng):
    """Draw is_causal and window; return what they show, (Nq, Nk)."""
    n_queries, n_keys = problem.shape[-2:]
    align = str(rng.choice(("top_left", "bottom_right")))
    left, right = (int(rng.integers(0, 2 + n_keys // 2)) for _ in range(2))
    sides = {"left": (left, None), "right": (None, right), "window": (left, right)}
    unsaid = n_queries == n_keys and rng.random() < 0.5
    window = sides.get(kind) or sides.get(str(rng.choice(("left", "window", "none"), p=(0.2, 0.1, 0.7))))
    if kind == "causal":
        problem.options["is_causal"] = True if unsaid else align
    if window is not None:
        problem.options["window"] = window if unsaid or kind == "causal" else (*window, align)
    left, right = window or (None, None)
    problem.features.add(f"band {kind}")
    if n_queries != n_keys:
        problem.features.add(align)
    offset = n_keys - n_queries if align == "bottom_right" else 0
    return visible_band(n_queries, n_keys, left, 0 if kind == "causal" else right, offset)


def _leading(rng, lead):
    """Draw leading axes that broadcast to `lead`."""
    if rng.random() < 0.4:
        return ()
    shape = tuple(1 if rng.random() < 0.4 else n for n in lead)
    return shape[rng.integers(0, len(shape) + 1) if rng.random() < 0.3 else 0 :]


def _boolean(rng, *shape):
    *lead, n_queries, n_keys = shape
    inner = ((n_queries, n_keys), (1, n_keys), (n_queries, 1), (1, 1))[rng.choice(4, p=(0.7, 0.15, 0.1, 0.05))]
    mask = rng.random((*_leading(rng, tuple(lead)), *inner)) < rng.choice((0.05, 0.5, 0.9))
    if rng.random() < 0.3:
        mask &= rng.random((*mask.shape[:-2], 1, mask.shape[-1])) < 0.7
    return mask, np.broadcast_to(mask, (*mask.shape[:-2], n_queries, n_keys)), "boolean"


def _column(rng, *shape):
    *lead, n_queries, n_keys = shape
    shape = (*_leading(rng, tuple(lead)), n_keys)
    bounds = rng.integers(0, n_queries + 1, (4, *shape), np.int32)
    style = rng.integers(5)
    if style == 1:
        bounds[1], bounds[2] = n_queries, 0
    elif style == 2:
        bounds.sort(axis=0)
    elif style == 3:
        bounds[0], bounds[1] = n_queries, 0
    elif style == 4:
        bounds[:, rng.random(shape) < 0.3] = np.array([0, n_queries, 0, 0])[:, None]
    i = np.arange(n_queries)[:, None]
    lts, lte, uts, ute = bounds[..., None, :]
    mask = cuattn.ColumnMask(*bounds, n_queries=n_queries)
    return mask, ~(((lts <= i) & (i < lte)) | ((uts <= i) & (i < ute))), "column"


def _block(rng, *shape):
    *lead, n_queries, n_keys = shape
    block_m, block_n = (int(rng.choice((1, 5, 16, 64, 128))) for _ in range(2))
    shape = (*_leading(rng, tuple(lead)), -(-n_queries // block_m), -(-n_keys // block_n))
    blocks = rng.random(shape) < rng.choice((0.2, 0.6))
    dense = blocks.repeat(block_m, -2).repeat(block_n, -1)[..., :n_queries, :n_keys]
    return cuattn.BlockMask(blocks, block_m, block_n), dense, "block"


def _constructor(rng, *shape):
    *_, n, n_keys = shape
    i, j = np.arange(n)[:, None], np.arange(n_keys)[None]
    name = str(rng.choice(["causal", "full", *(_ARGUMENTS if n == n_keys else ())]))
    if name == "full":
        return masks.full(n, n_keys), np.ones((n, n_keys), bool), name
    if name == "causal":
        align = str(rng.choice(("top_left", "bottom_right")))
        offset = n_keys - n if align == "bottom_right" else 0
        return masks.causal(n, n_keys, align), j <= i + offset, name
    arguments = _ARGUMENTS[name](rng, n)
    mask = getattr(masks, name)(*arguments)
    if name == "random_eviction":
        return mask, ~((mask.lts[None] <= i) | (i < mask.ute[None])), name
    return mask, np.broadcast_to(getattr(predicates, name)(i, j, *arguments), (n, n)), name


def _lengths(rng, n):
    """Draw lengths, some 0, that add up to n."""
    cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 6)))
    return np.diff([0, *cuts, n]).tolist()


def _up_to(rng, n):
    return int(rng.integers(0, n + 1))


_ARGUMENTS = {
    "sliding_window": lambda rng, n: (n, _up_to(rng, n + 2)),
    "causal_document": lambda rng, n: (_lengths(rng, n),),
    "document": lambda rng, n: (_lengths(rng, n),),
    "share_question": lambda rng, n: (
        [(question, answers) for question, *answers in (_lengths(rng, length) for length in _lengths(rng, n))],
    ),
    "global_sliding_window": lambda rng, n: (n, _up_to(rng, n + 2), _up_to(rng, n + 2)),
    "causal_blockwise": lambda rng, n: (_lengths(rng, n),),
    "prefix_lm_causal": lambda rng, n: (n, _up_to(rng, n)),
    "prefix_lm_document": lambda rng, n: ([(_up_to(rng, length), length) for length in _lengths(rng, n)],),
    "qk_sparse": lambda rng, n: (
        n,
        [(start, _up_to(rng, n - start)) for start in rng.integers(0, n + 1, rng.integers(0, 4)).tolist()],
    ),
    "hash_sparse": lambda rng, n: (_lengths(rng, n),),
    "random_eviction": lambda rng, n: (n, _up_to(rng, n + 2), int(rng.integers(0, 2**32))),
    "eviction": lambda rng, n: (rng.integers(0, n + 1, n).tolist(),),
}
_MAKERS = {"boolean": _boolean, "column": _column, "block": _block, "constructor": _constructor}
