"""Random score and mask functions, as text; and NumPy's computation of them with every result rounded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cuattn.tracing.functions import MASK, SCORE, trace

N_BATCH, N_HEADS, N_QUERIES, N_KEYS = 2, 3, 23, 17
LIMITS = (N_BATCH, N_HEADS, N_QUERIES, N_KEYS)
_RNG = np.random.default_rng(7)
ARRAYS: dict[str, Any] = {
    "heads": _RNG.normal(size=N_HEADS),
    "table": _RNG.normal(size=(N_HEADS, N_QUERIES + N_KEYS)),
    "pair": _RNG.normal(size=(N_QUERIES, N_KEYS)),
    "doc": np.sort(_RNG.integers(0, 5, (N_BATCH, N_QUERIES)), axis=1),
    "odd": _RNG.integers(-9, 9, N_KEYS).astype(np.int16),
    "flag": _RNG.random(N_QUERIES) < 0.6,
}
ARRAYS["first"] = np.stack([np.searchsorted(x, x) for x in ARRAYS["doc"]])
ARRAYS = {name: x.astype(np.float32).astype(float) if x.dtype == float else x for name, x in ARRAYS.items()}

_UNARY = (
    "np.tanh({})",
    "np.sin({})",
    "np.cos({})",
    "-{}",
    "abs({})",
    "{} ** 2",
    "np.exp(-abs({}))",
    "np.arctan({})",
    "np.log1p(abs({}))",
    "np.sqrt(1 + {0} * {0})",
    "np.exp2(np.clip({}, -5, 5))",
    "np.sign({}) * 0.5",
    "np.expm1(np.minimum({}, 2))",
    "np.log(2 + abs({}))",
    "np.cbrt(2 + abs({}))",
    "2.0 ** -abs({})",
    "{} / 3",
    "1.5 * {}",
    "np.square({})",
)
_BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "{} / (1.25 + abs({}))",
    "np.maximum({}, {})",
    "np.minimum({}, {})",
    "np.logaddexp({}, {})",
    "np.hypot({}, {})",
    "np.arctan2({}, 1 + abs({}))",
)
_NUMBERS = (
    "s",
    "s",
    "s",
    "0.75",
    "-1.0",
    "heads[h]",
    "table[h, i - j + 16]",
    "pair[i, j]",
    "(j - i) * 0.125",
    "i / 7",
    "heads[-1]",
)
_INTEGERS = ("i", "j", "h", "b", "i - j", "3", "-2", "doc[b, i]", "odd[j]", "odd[-j]", "doc[b, (i * 5 + j) % 23]")
_WHOLE_UNARY = (
    "{} // 3",
    "{} % 5",
    "abs({})",
    "-{}",
    "{} // -4",
    "{} % -7",
    "{} * 2 + 1",
    "{} & 5",
    "{} >> 1",
    "~{}",
    "{} << 2",
    "np.sign({})",
)
_WHOLE_BINARY = (
    "{} + {}",
    "{} - {}",
    "{} * {}",
    "np.maximum({}, {})",
    "np.minimum({}, {})",
    "{} ^ {}",
    "{} | {}",
    "{} // (1 + abs({}))",
    "{} % (abs({}) + 2)",
)
_COMPARE = ("{} < {}", "{} <= {}", "{} > {}", "{} >= {}", "{} == {}", "{} != {}")
_JOIN = (
    "({}) & ({})",
    "({}) | ({})",
    "({}) ^ ({})",
    "np.logical_not({})",
    "np.where({}, {}, {})",
    "np.logical_xor({}, {})",
)


def _fill(random: Any, templates: tuple[str, ...], make: Any) -> str:
    template = random.choice(templates)
    if "{0}" in template:
        return "(" + template.format(make()) + ")"
    return "(" + template.format(*(make() for _ in range(template.count("{}")))) + ")"


def integer(random: Any, depth: int) -> str:
    """Return an integer expression of b, h, i and j."""
    if depth == 0 or random.random() < 0.2:
        return random.choice(_INTEGERS)
    return _fill(random, random.choice((_WHOLE_UNARY, _WHOLE_BINARY)), lambda: integer(random, depth - 1))


def condition(random: Any, depth: int, numbers: bool = False) -> str:
    """Return a boolean expression; with `numbers` of comparisons of numbers too."""
    if depth == 0 or random.random() < 0.3:
        make = _steady if numbers and random.random() < 0.4 else integer
        return _fill(random, _COMPARE, lambda: make(random, max(depth - 1, 1)))
    if random.random() < 0.1:
        return "flag[i]"
    return _fill(random, _JOIN, lambda: condition(random, depth - 1, numbers))


def number(random: Any, depth: int, leaves: tuple[str, ...] = _NUMBERS) -> str:
    """Return an expression of a score."""
    if depth == 0 or random.random() < 0.1:
        return random.choice(leaves)
    if random.random() < 0.15:
        parts = condition(random, 1), number(random, depth - 1, leaves), number(random, depth - 1, leaves)
        return "np.where({}, {}, {})".format(*parts)
    return _fill(random, random.choice((_UNARY, _BINARY)), lambda: number(random, depth - 1, leaves))


def _steady(random: Any, depth: int) -> str:
    """Return a number that does not depend on s."""
    return number(random, depth, _NUMBERS[3:])


def compiled(text: str, names: tuple[str, ...] = SCORE, **scope: Any) -> Any:
    """Return the function of a text, whose arrays are globals."""
    return eval(f"lambda {', '.join(names)}: {text}", {"np": np, **ARRAYS, **scope})


def traced(text: str, names: tuple[str, ...] = SCORE):
    """Return a text traced, with its arrays."""
    return trace(compiled(text, names), names).bind()


def grid(dtype: Any = np.float32, scale: float = 1.5, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the variables of a whole small problem, scores that a float32 holds among them."""
    b, h, i, j = np.ogrid[tuple(slice(n) for n in LIMITS)]
    s = np.random.default_rng(seed).normal(size=LIMITS, scale=scale).astype(np.float32).astype(dtype)
    return {"s": s, **{name: x.astype(np.int32) for name, x in zip("bhij", (b, h, i, j), strict=True)}}


def plain(text: str, names: tuple[str, ...] = SCORE, **variables: Any) -> np.ndarray:
    """Return what NumPy makes of a text in int64 and float64."""
    operands = {name: np.asarray(x, np.float64 if name == "s" else np.int64) for name, x in variables.items()}
    with np.errstate(all="ignore"):
        return np.asarray(compiled(text, names)(*(operands[name] for name in names)))


@dataclass(eq=False)
class Rounded(np.lib.mixins.NDArrayOperatorsMixin):
    """Values of which every floating-point result is rounded to a dtype; the largest of them is kept."""

    value: Any
    dtype: Any
    largest: list[float] = field(default_factory=lambda: [1.0])

    def _of(self, value: Any) -> Rounded:
        value = np.asarray(value)
        if value.dtype.kind == "f":
            value = value.astype(self.dtype).astype(np.longdouble if self.dtype == np.float64 else np.float64)
            finite = np.abs(value[np.isfinite(value)])
            self.largest[0] = max(self.largest[0], float(finite.max(initial=0)))
        return Rounded(value, self.dtype, self.largest)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return self._of(ufunc(*(x.value if isinstance(x, Rounded) else x for x in inputs)))

    def __array_function__(self, function, types, args, options):
        return self._of(function(*(x.value if isinstance(x, Rounded) else x for x in args), **options))

    def __getitem__(self, index):
        index = index if isinstance(index, tuple) else (index,)
        return self._of(self.value[tuple(x.value if isinstance(x, Rounded) else x for x in index)])


def textbook(text: str, dtype: Any, **variables: Any) -> tuple[np.ndarray, float]:
    """Return what the same steps give when each is rounded to a dtype, and the largest number on the way."""
    start = Rounded(0.0, np.dtype(dtype))
    operands = {name: start._of(x if name == "s" else np.asarray(x, np.int64)) for name, x in variables.items()}
    arrays = {name: start._of(x) for name, x in ARRAYS.items()}
    with np.errstate(all="ignore"):
        result = compiled(text, **arrays)(*(operands[name] for name in SCORE))
    return np.asarray(getattr(result, "value", result)), start.largest[0]


__all__ = [
    "LIMITS",
    "MASK",
    "SCORE",
    "compiled",
    "condition",
    "grid",
    "integer",
    "number",
    "plain",
    "textbook",
    "traced",
]
