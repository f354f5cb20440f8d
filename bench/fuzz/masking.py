"""Draw a mask of any kind and, by other means, the dense matrix of what it shows."""

from __future__ import annotations

import inspect
import math

import numpy as np

import cuattn
from cuattn import masks
from tests.masks import predicates
from tests.oracle import visible_band, visible_outside

__all__ = ["MAKERS", "broadcastable", "draw", "pick"]

# What may be drawn, and how often; combinations hold at most one that is no ColumnMask of each kind.
MASKS = {
    (): 0.4, ("boolean",): 0.12, ("column",): 0.14, ("constructor",): 0.14, ("block",): 0.1,
    ("column", "column"): 0.02, ("constructor", "column"): 0.02, ("column", "boolean"): 0.02,
    ("block", "column"): 0.02, ("column", "block", "boolean"): 0.02,
}  # fmt: skip
BANDS = {
    "": 0.55, "causal": 0.14, "causal left": 0.04, "causal window": 0.02, "left": 0.05, "right": 0.05, "window": 0.15,
}  # fmt: skip


def pick(rng, shares):
    """Draw a key of a table of shares."""
    return list(shares)[rng.choice(len(shares), p=list(shares.values()))]


def draw(problem, fixed, rng, hopper):
    """Give a problem its mask, causality and window, and what they leave visible."""
    kinds, band = pick(fixed, MASKS), pick(fixed, BANDS)
    if fixed is rng and rng.random() < 0.08:  # on a GPU, whose problems share features, each would be compiled
        kinds = "function", *kinds[:1]
    if hopper:
        kinds = kinds[:1]
    seen = [_band(problem, band, rng)] if band else []
    for kind in kinds:
        mask, shown, name = MAKERS[kind](rng, *problem.shape)
        problem.mask = mask if problem.mask is None else problem.mask & mask
        problem.features.add("mask and" if len(kinds) > 1 else f"mask {name}")
        seen.append(shown)
    for shown in seen:
        problem.visible = shown if problem.visible is None else problem.visible & shown


def _band(problem, kind, rng):
    """Draw is_causal and window; return what they show, (Nq, Nk)."""
    n_queries, n_keys = problem.shape[-2:]
    align, causal = str(rng.choice(("top_left", "bottom_right"))), "causal" in kind
    unsaid = n_queries == n_keys and rng.random() < 0.5
    left, right = (
        int(rng.integers(0, 2 + n_keys // 2)) if "window" in kind or side in kind else None
        for side in ("left", "right")
    )
    if causal:
        problem.options["is_causal"] = True if unsaid else align
    if kind != "causal":
        problem.options["window"] = (left, right) if unsaid or causal else (left, right, align)
    problem.features |= {f"band {kind.split()[0]}", *([align] if n_queries != n_keys else ())}
    offset = n_keys - n_queries if align == "bottom_right" else 0
    return visible_band(n_queries, n_keys, left, 0 if causal else right, offset)


def broadcastable(rng, lead):
    """Draw leading axes that broadcast to `lead`."""
    shape = tuple(1 if rng.random() < 0.5 else n for n in lead)
    return shape[rng.integers(0, len(shape) + 1) if rng.random() < 0.4 else 0 :]


def _boolean(rng, *shape):
    *lead, n_queries, n_keys = shape
    inner = ((n_queries, n_keys), (1, n_keys), (n_queries, 1), (1, 1))[rng.choice(4, p=(0.7, 0.15, 0.1, 0.05))]
    mask = rng.random((*broadcastable(rng, lead), *inner)) < rng.choice((0.05, 0.5, 0.9))
    if rng.random() < 0.3:
        mask &= rng.random((*mask.shape[:-2], 1, mask.shape[-1])) < 0.7
    return mask, np.broadcast_to(mask, (*mask.shape[:-2], n_queries, n_keys)), "boolean"


def _column(rng, *shape):
    *lead, n_queries, n_keys = shape
    shape = (*broadcastable(rng, lead), n_keys)
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
    return cuattn.ColumnMask(*bounds, n_queries=n_queries), visible_outside(bounds, n_queries), "column"


def _block(rng, *shape):
    *lead, n_queries, n_keys = shape
    block_m, block_n = (int(rng.choice((1, 5, 16, 64, 128))) for _ in range(2))
    shape = (*broadcastable(rng, lead), -(-n_queries // block_m), -(-n_keys // block_n))
    blocks = rng.random(shape) < rng.choice((0.2, 0.6))
    dense = blocks.repeat(block_m, -2).repeat(block_n, -1)[..., :n_queries, :n_keys]
    return cuattn.BlockMask(blocks, block_m, block_n), dense, "block"


def _constructor(rng, *shape):
    *_, n, n_keys = shape
    name = str(rng.choice([*masks.CONSTRUCTORS] if n == n_keys else ("causal", "full")))
    drawn = _arguments(rng, n, n_keys, name)
    mask = _call(getattr(masks, name), drawn)
    if name == "random_eviction":
        seen = (drawn["i"] < mask.lts[None]) & (drawn["i"] >= mask.ute[None])
    else:
        seen = _call(getattr(predicates, name), drawn)
    return mask, np.broadcast_to(seen, (n, n_keys)), name


def _function(rng, *shape):
    *lead, n_queries, n_keys = shape
    batch, heads = lead[:-1], math.prod(lead[-1:])
    ids, (step, width) = rng.integers(0, 4, n_queries + n_keys + 1), rng.integers(1, 9, 2).tolist()
    places = 1e9 + rng.random(n_queries + n_keys)
    visible = (
        lambda b, h, i, j: (i - j + h) % step < width,
        lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i + (b + h) * width),
        lambda b, h, i, j: ids[abs(i - j)] * ids[j // step] < width,
        lambda b, h, i, j: (j < width) | (ids[i] <= ids[j]),
        lambda b, h, i, j: abs(places[i] - places[n_queries + j]) * 0.1 * step < 0.2,
    )[rng.integers(0 if lead else 2, 5)]
    mask = masks.from_function(visible, n_queries, n_keys, batch=tuple(batch), heads=heads)
    shape = math.prod(batch), heads, n_queries, n_keys
    dense = np.broadcast_to(visible(*np.ogrid[tuple(map(slice, shape))]), shape)
    return mask, dense.reshape(*lead, n_queries, n_keys), "function"


def _call(function, drawn):
    return function(**{name: drawn[name] for name in inspect.signature(function).parameters})


def _arguments(rng, n, n_keys, name):
    """Draw what constructors and their predicates take, by the names of the parameters."""
    lengths, align = _lengths(rng, n), str(rng.choice(("top_left", "bottom_right")))
    window, n_global, start = rng.integers(0, n + 3, 3).tolist()
    prefix, first = rng.integers(0, n + 1, 2).tolist()
    if name == "share_question":
        documents = [(question, answers) for question, *answers in (_lengths(rng, length) for length in lengths)]
    else:
        documents = [(int(rng.integers(0, length + 1)), length) for length in lengths]
    offset = n_keys - n if name == "causal" and align == "bottom_right" else 0
    return {
        "i": np.arange(n)[:, None] + offset, "j": np.arange(n_keys)[None], "n": n, "n_queries": n, "n_keys": n_keys,
        "align": align, "lengths": lengths, "bucket_lengths": lengths, "documents": documents, "window": window,
        "n_global": n_global, "prefix": prefix, "start": start, "rng": int(rng.integers(2**32)),
        "evicted_at": rng.integers(0, n + 1, n).tolist(),
        "spans": [(first, n - first), (prefix, (n - prefix) // 2)][: rng.integers(0, 3)],
    }  # fmt: skip


def _lengths(rng, n):
    """Draw lengths, some 0, that add up to n."""
    cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 6)))
    return np.diff([0, *cuts, n]).tolist()


MAKERS = {"boolean": _boolean, "column": _column, "block": _block, "constructor": _constructor, "function": _function}
"""By kind, what draws a mask of scores of a shape: ``make(rng, *shape)`` returns it, the matrix, and its name."""
