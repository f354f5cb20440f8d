"""The recipes of the guide ``cuattn/tracing/README.md``, each beside a NumPy formula of its own.

A formula makes the same matrix in another way: (batch, heads, n, n), of booleans, or of float64 from scores.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import cuattn.tracing

GUIDE = Path(cuattn.tracing.__file__).with_name("README.md")


def guide() -> Any:
    """Return what the guide's blocks define, run one after the other."""
    scope: dict[str, Any] = {}
    for index, block in enumerate(re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.M | re.S)):
        exec(compile(block, f"{GUIDE.name}, block {index}", "exec"), scope)
    return scope


_SCOPE = guide()
g = type("Guide", (), {name: staticmethod(x) if inspect.isfunction(x) else x for name, x in _SCOPE.items()})
BATCH, HEADS, N = g.batch, g.heads, g.n
B, H, I, J = np.ogrid[:BATCH, :HEADS, :N, :N]


class Recipe(NamedTuple):
    """A function of the guide, its further arguments and its formula; whether intervals per key say it."""

    name: str
    function: Callable[..., Any]
    args: tuple
    formula: Callable[..., np.ndarray]
    columns: bool


# Masks.


def _tri(n=N):
    return np.tril(np.ones((n, n), bool))


def _same(x, inner=True):
    return (x[:, None, :, None] == x[:, None, None]) & inner


def _blocks(blocks, size):
    return np.kron(blocks, np.ones((size, size), bool))


def _dilated_sliding_window():
    steps = range(1 - g.window, g.window)
    return np.array([[any(i - j == k * g.dilation for k in steps) for j in range(N)] for i in range(N)])


def _document_prefix():
    shown = np.zeros((BATCH, 1, N, N), bool)
    for b in range(BATCH):
        for start, length in zip(*np.unique(g.ids[b], return_index=True, return_counts=True)[1:], strict=True):
            part = slice(start, start + length)
            shown[b, 0, part, part] = _tri(length)
            shown[b, 0, part, start : min(start + g.prefix, start + length)] = True
    return shown


def _near(n):
    start = np.clip(np.arange(n) - g.kernel // 2, 0, n - g.kernel)
    return (np.arange(n) >= start[:, None]) & (np.arange(n) < start[:, None] + g.kernel)


def _natten(order=g.raster):
    row, column = order(np.arange(N))
    return _near(g.height)[row[:, None], row] & _near(g.width)[column[:, None], column]


def _sliding_tile():
    cubes = (g.frames // g.cube, g.side // g.cube, g.side // g.cube)
    places = np.stack(np.unravel_index(np.arange(N) // g.cube**3, cubes))
    return (abs(places[:, :, None] - places[:, None]) <= 1).all(0)


def _flamingo():
    shown = np.zeros((BATCH, 1, N, N), bool)
    for b, i in np.argwhere(g.image >= 0):
        shown[b, 0, i, 8 * g.image[b, i] : 8 * g.image[b, i] + 8] = True
    return shown


def _transfusion():
    shown = np.broadcast_to(_tri(), (BATCH, 1, N, N)).copy()
    for b in range(BATCH):
        for start, length in g.spans[b]:
            shown[b, 0, start : start + length, start : start + length] = True
    return shown


def _block_diffusion():
    order = np.arange(N // 2) // g.block
    noisy = [np.equal.outer(order, order), np.greater.outer(order, order)]
    return np.block([noisy, [np.zeros((N // 2, N // 2), bool), np.greater_equal.outer(order, order)]])


_MASKS: dict[str, Callable[..., Any]] = {
    "dilated": lambda: _tri() & (np.mod(I - J, np.arange(1, HEADS + 1)[:, None, None]) == 0),
    "causal": _tri,
    "inverse_causal": lambda: _tri().T,
    "sliding_window": lambda: _tri() & np.triu(np.ones((N, N), bool), 1 - g.window),
    "dilated_sliding_window": _dilated_sliding_window,
    "prefix_lm": lambda: np.concatenate([np.ones((N, g.prefix), bool), _tri()[:, g.prefix :]], 1),
    "global_and_window": lambda: (abs(I - J) <= g.window) | (np.minimum(I, J) < g.n_global),
    "causal_blocks": lambda: _blocks(_tri(N // g.block), g.block),
    "checkerboard": lambda: np.tile(np.eye(2, dtype=bool), (N // 2, N // 2)),
    "window_of_head": lambda: np.abs(I - J) < np.array([1, 5, 20, 64])[:, None, None],
    "random_blocks": lambda: np.stack([_blocks(x, g.block) for x in g.keep]),
    "document": lambda: _same(g.ids),
    "document_prefix": _document_prefix,
    "padding": lambda: np.maximum(I, J) < g.lengths[:, None, None, None],
    "shared_prefix": lambda: _tri() & ((J < 16) | np.equal.outer(g.branch, g.branch)),
    "natten": _natten,
    "tiled_natten": lambda: _natten(g.by_tiles),
    "morton_natten": lambda: _natten(g.morton),
    "sliding_tile": _sliding_tile,
    "flamingo": _flamingo,
    "transfusion": _transfusion,
    "block_diffusion": _block_diffusion,
}
_OTHERS = {
    "dilated",
    "dilated_sliding_window",
    "checkerboard",
    "random_blocks",
    "natten",
    "tiled_natten",
    "morton_natten",
    "sliding_tile",
    "block_diffusion",
}

# Scores.

_SLOPES = np.exp2(-8.0 / HEADS * np.arange(1, HEADS + 1))[:, None, None]


def _alibi(s):
    return s - _SLOPES * (I - J)


def _approximate_softcap(s):
    x = np.clip(s / g.cap, -3, 3)
    return g.cap * np.polyval([1, 0, 27, 0], x) / np.polyval([9, 0, 27], x)


def _patch_distance(s):
    places = np.stack(np.divmod(np.arange(N), g.width), 1)
    return s - _SLOPES * np.linalg.norm(places[:, None] - places, axis=-1)


def _natten_with_bias(s):
    x, y = np.divmod(np.arange(N), g.width)
    weight = g.by_offset[:, np.subtract.outer(x, x) + g.height - 1, np.subtract.outer(y, y) + g.width - 1]
    return np.where(_natten(), s + weight, -np.inf)


def _t5(s):
    def bucket(x):
        far = 8 if abs(x) < 8 else min(15, 8 + int(np.log(abs(x) / 8) / np.log(16) * 8))
        return (abs(x) if abs(x) < 8 else far) + 16 * (x > 0)

    index = np.array([[bucket(j - i) for j in range(N)] for i in range(N)])
    return s + g.bucket_weights[index].transpose(2, 0, 1)


_SCORES: dict[str, Callable[..., Any]] = {
    "alibi": _alibi,
    "window_and_alibi": lambda s: np.where(_tri() & (g.window > I - J), _alibi(s), -np.inf),
    "softcap": lambda s: g.cap * np.tanh(s / g.cap),
    "approximate_softcap": _approximate_softcap,
    "gated": lambda s: s - s / (1 + np.exp(s)),
    "alternating": lambda s: s - np.tile(1 - np.eye(2), (N // 2, N // 2)),
    "patch_distance": _patch_distance,
    "learned_alibi": lambda s: s + g.slope[:, None, None] * (J - I),
    "temperature": lambda s: s * np.exp(g.temperatures)[:, None, None],
    "key_bias": lambda s: s + g.key_weights[:, None, None],
    "pair_bias": lambda s: s + g.pair_weights,
    "relative": lambda s: s + g.table[:, np.subtract.outer(np.arange(N), np.arange(N)) + N - 1],
    "graphormer": lambda s: s + g.by_distance[g.hops].transpose(0, 3, 1, 2),
    "natten_with_bias": _natten_with_bias,
    "t5": _t5,
}


def _recipes(first: list[str], formulas: dict[str, Callable[..., Any]]) -> tuple[Recipe, ...]:
    """Return the guide's functions whose parameters begin with some names; further ones are its arrays."""
    found = []
    for name, function in _SCOPE.items():
        names = list(inspect.signature(function).parameters) if inspect.isfunction(function) else []
        if names[: len(first)] == first:
            args = tuple([_SCOPE[x] for x in names[len(first) :]])
            found.append(Recipe(name, function, args, formulas[name], name in formulas and name not in _OTHERS))
    return tuple(found)


MASKS, SCORES = _recipes(["b", "h", "i", "j"], _MASKS), _recipes(["s", "b", "h", "i", "j"], _SCORES)
