"""Draw a score function: a random expression of s, indices, numbers and arrays, read in all kinds of places."""

from __future__ import annotations

import numpy as np

__all__ = ["draw"]

_REACH, _KINDS = 20, 5
_NAMES = ("heads", "table", "rows", "keys", "marks", "pairs", "kinds", "number", "count")
_LEAVES = (
    "heads[b % 2, h]", f"table[h, np.clip(i - j, -{_REACH}, {_REACH}) + {_REACH}]", "rows[i]", "keys[j]",
    "marks[kinds[j]]", "marks[(i + 3 * j - count) % 5]", "number", "0.75", "(j - i) / 64", "np.abs(i - j) * 0.125",
    "h / 2", "marks[-2]", "pairs[h, j, i]",
)  # fmt: skip
_OPERATIONS = (
    "{} + {}", "{} - {}", "{} * {}", "np.maximum({}, {})", "np.where(i < j, {}, {})", "{} / (1.5 + np.abs({}))",
    "np.where({} > 0.1, {}, -0.5)", "np.tanh({})", "np.sin({})", "np.exp(-np.abs({}))", "np.sqrt(1 + np.square({}))",
    "-{}", "np.hypot({}, 1 + {})",
)  # fmt: skip
_ROOTS = (
    "s + {}", "s + {} - {}", "s + pairs[h, j, i]", "s * (1 + 0.5 * np.tanh({}))", "8 * np.tanh(s / 8) + {}",
    "np.where((i + j) % 3 > 0, s, s / 2 + {})",
    "np.where((j - i) % (4 + h) < 3, s + {}, -np.inf)", "np.where(keys[j] > -1, s + {}, -np.inf)", "s",
)  # fmt: skip


def draw(problem, fixed, rng):
    """Give a problem a score function and its arguments."""
    *lead, n_queries, n_keys = problem.shape
    heads = lead[-1] if lead else 1
    text = _filled(fixed, str(fixed.choice(_ROOTS)), 2)
    function = eval(f"lambda s, b, h, i, j, {', '.join(_NAMES)}: {text}", {"np": np})
    function.__name__ = text
    dtype = problem.dtype if fixed.random() < 0.5 else np.dtype("f4")
    shapes = (2, heads), (heads, 2 * _REACH + 1), (n_queries,), (n_keys,), (_KINDS,), (heads, n_keys, n_queries)
    floats = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    kinds = rng.integers(-_KINDS, _KINDS, n_keys).astype(np.int32)
    problem.options |= {"score": function, "score_args": (*floats, kinds, float(rng.normal()), _KINDS)}
    problem.features |= {"score", f"score {text.split('(')[0].split(' ')[0]}"}


def _filled(rng, template, depth):
    """Return a template with random expressions in its places."""
    parts = [_LEAVES[rng.integers(len(_LEAVES))] if depth == 0 or rng.random() < 0.3 else
             "(" + _filled(rng, _OPERATIONS[rng.integers(len(_OPERATIONS))], depth - 1) + ")"
             for _ in range(template.count("{}"))]  # fmt: skip
    return template.format(*parts)
