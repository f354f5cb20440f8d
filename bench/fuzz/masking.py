"""Draw a mask of any kind and, by other means, the dense matrix of what it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import cuattn
from cuattn import masks
from tests.masks import predicates
from tests.oracle import visible_band

if TYPE_CHECKING:
    from bench.fuzz.problems import Problem

__all__ = ["draw"]


def draw(problem: Problem, rng: np.random.Generator) -> None:
    """Give a problem its mask, causality and window, and what they leave visible."""
    n_queries, n_keys = problem.q.shape[-2], problem.k.shape[-2]
    kind = problem.variant.mask
    if kind != "none":
        problem.mask, problem.visible, name = _MAKERS[kind](rng, problem.lead, n_queries, n_keys)
        problem.features.add(f"mask {name}")
    seen = _band(problem, rng, n_queries, n_keys)
    if seen is not None:
        problem.visible = seen if problem.visible is None else problem.visible & seen


def _band(problem: Problem, rng: np.random.Generator, n_queries: int, n_keys: int) -> np.ndarray | None:
    """Draw is_causal and window; return what they show, (Nq, Nk)."""
    kind = problem.variant.band
    if kind == "none":
        return None
    align = str(rng.choice(("top_left", "bottom_right")))
    left, right = (int(rng.integers(0, 2 + n_keys // 2)) for _ in "lr")
    if kind == "causal":
        plain = n_queries == n_keys and rng.random() < 0.5
        problem.options["is_causal"] = True if plain else align
        window = (left, None) if rng.random() < 0.2 else (left, right) if rng.random() < 0.1 else None
        if window is not None:
            problem.options["window"] = window
        left, right = None if window is None else left, 0
        align = "top_left" if plain else align
    else:
        window = {"left": (left, None), "right": (None, right), "window": (left, right)}[kind]
        if n_queries != n_keys or rng.random() < 0.5:
            problem.options["window"] = (*window, align)
        else:
            problem.options["window"], align = window, "top_left"
        left, right = window
    problem.features.add(f"band {kind}")
    if n_queries != n_keys:
        problem.features.add(align)
    return visible_band(n_queries, n_keys, left, right, n_keys - n_queries if align == "bottom_right" else 0)


def _leading(rng: np.random.Generator, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Draw leading axes that broadcast to `lead`."""
    if rng.random() < 0.4:
        return ()
    shape = tuple(1 if rng.random() < 0.4 else n for n in lead)
    return shape[rng.integers(0, len(shape) + 1) if rng.random() < 0.3 else 0 :]


def _boolean(rng: np.random.Generator, lead: tuple[int, ...], n_queries: int, n_keys: int) -> tuple[Any, ...]:
    inner = ((n_queries, n_keys), (1, n_keys), (n_queries, 1), (1, 1))[rng.choice(4, p=(0.7, 0.15, 0.1, 0.05))]
    mask = rng.random((*_leading(rng, lead), *inner)) < rng.choice((0.05, 0.5, 0.9))
    if rng.random() < 0.3:
        mask &= rng.random((*mask.shape[:-2], 1, mask.shape[-1])) < 0.7
    return mask, np.broadcast_to(mask, (*mask.shape[:-2], n_queries, n_keys)), "boolean"


def _column(rng: np.random.Generator, lead: tuple[int, ...], n_queries: int, n_keys: int) -> tuple[Any, ...]:
    shape = (*_leading(rng, lead), n_keys)
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


def _block(rng: np.random.Generator, lead: tuple[int, ...], n_queries: int, n_keys: int) -> tuple[Any, ...]:
    block_m, block_n = (int(rng.choice((1, 5, 16, 64, 128))) for _ in "mn")
    shape = (*_leading(rng, lead), -(-n_queries // block_m), -(-n_keys // block_n))
    blocks = rng.random(shape) < rng.choice((0.2, 0.6))
    dense = np.repeat(np.repeat(blocks, block_m, -2), block_n, -1)[..., :n_queries, :n_keys]
    return cuattn.BlockMask(blocks, block_m, block_n), dense, "block"


def _constructor(rng: np.random.Generator, lead: tuple[int, ...], n_queries: int, n_keys: int) -> tuple[Any, ...]:
    if n_queries != n_keys:
        name = str(rng.choice(("full", "causal")))
        if name == "full":
            return masks.full(n_queries, n_keys), np.ones((n_queries, n_keys), bool), name
        align = str(rng.choice(("top_left", "bottom_right")))
        offset = n_keys - n_queries if align == "bottom_right" else 0
        return masks.causal(n_queries, n_keys, align), np.tri(n_queries, n_keys, offset, bool), name
    n = n_queries
    name = str(rng.choice(sorted(_ARGUMENTS)))
    arguments = _ARGUMENTS[name](rng, n)
    mask = getattr(masks, name)(*arguments)
    if name == "random_eviction":
        return mask, ~((mask.lts[None] <= np.arange(n)[:, None]) | (np.arange(n)[:, None] < mask.ute[None])), name
    i, j = np.arange(n)[:, None], np.arange(n)[None]
    needs_n = name in ("full", "causal")
    seen = getattr(predicates, name)(i, j, *((n,) if needs_n else arguments))
    return mask, np.broadcast_to(seen, (n, n)), name


def _both(rng: np.random.Generator, lead: tuple[int, ...], n_queries: int, n_keys: int) -> tuple[Any, ...]:
    """Combine several masks, at most one of each kind but ColumnMasks."""
    kinds = ["column", str(rng.choice(("column", "constructor", "boolean", "block")))]
    if rng.random() < 0.4:
        kinds.append("block" if kinds[1] == "boolean" else "boolean")
    parts = [_MAKERS[kind](rng, lead, n_queries, n_keys) for kind in rng.permutation(kinds)]
    mask, seen, _ = parts[0]
    for other, more, _ in parts[1:]:
        mask = mask & other if not isinstance(mask, np.ndarray) else other & mask
        seen = seen & more
    return mask, seen, "and"


def _lengths(rng: np.random.Generator, n: int) -> list[int]:
    """Draw lengths, some 0, that add up to n."""
    cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 6)))
    return np.diff([0, *cuts, n]).tolist()


def _questions(rng: np.random.Generator, n: int) -> list[tuple[int, list[int]]]:
    documents = []
    for length in _lengths(rng, n):
        question, *answers = _lengths(rng, length)
        documents.append((question, answers))
    return documents


def _spans(rng: np.random.Generator, n: int) -> list[tuple[int, int]]:
    starts = rng.integers(0, n + 1, rng.integers(0, 4)).tolist()
    return [(start, int(rng.integers(0, n - start + 1))) for start in starts]


_ARGUMENTS = {
    "full": lambda rng, n: (n,),
    "causal": lambda rng, n: (n,),
    "sliding_window": lambda rng, n: (n, int(rng.integers(0, n + 3))),
    "causal_document": lambda rng, n: (_lengths(rng, n),),
    "document": lambda rng, n: (_lengths(rng, n),),
    "share_question": lambda rng, n: (_questions(rng, n),),
    "global_sliding_window": lambda rng, n: (n, int(rng.integers(0, n + 3)), int(rng.integers(0, n + 3))),
    "causal_blockwise": lambda rng, n: (_lengths(rng, n),),
    "prefix_lm_causal": lambda rng, n: (n, int(rng.integers(0, n + 1))),
    "prefix_lm_document": lambda rng, n: ([(int(rng.integers(0, x + 1)), x) for x in _lengths(rng, n)],),
    "qk_sparse": lambda rng, n: (n, _spans(rng, n)),
    "hash_sparse": lambda rng, n: (_lengths(rng, n),),
    "random_eviction": lambda rng, n: (n, int(rng.integers(0, n + 3)), int(rng.integers(0, 2**32))),
    "eviction": lambda rng, n: (rng.integers(0, n + 1, n).tolist(),),
}

_MAKERS = {"boolean": _boolean, "column": _column, "block": _block, "constructor": _constructor, "and": _both}
