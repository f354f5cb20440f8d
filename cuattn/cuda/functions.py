"""The score function of a call as its kernels take it: their text, and what follows ``CoreParams`` in their argument.

All kernels of a call share one text, and so one layout of arguments.  Strides and lengths of the arrays are written
into the arguments once, addresses in each call, and numbers where they are others than the last.
"""

import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cuattn.cuda.arguments import Change
from cuattn.cuda.learned import learned
from cuattn.cuda.params import PARAMS, derived
from cuattn.problem import OPERATIONS, Problem
from cuattn.tracing import Bound, addend, along, derivative, host_value, source
from cuattn.tracing.graph import constant

_PREFIX = "traced."
_ONE, _ZERO = constant(1.0), constant(0.0)
_FORMATS = {"b": "?", "i": "q", "l": "q", "f": "d"}  # of a number, by its kind


class Functions:
    """The text of a call's functions, and their arguments.

    Parameters
    ----------
    problem : Problem
        With a score function.
    operands : mapping of str to array
        The function's arrays "score0", "score1", ... among them.
    arithmetic : numpy.dtype, optional
        By default that of the problem's sums.

    Attributes
    ----------
    text : str
        For :func:`cuattn.cuda.source.build`.
    dtype : numpy.dtype
        ``Params``: ``CoreParams`` and what the functions take.
    values : dict of str to object
        Its fields of the functions: lengths and strides.
    slots : dict of str to str
        Its fields that take addresses, and the operands whose they are.
    told : tuple, list of Change
        The numbers that were asked for last, and what they change.
    """

    def __init__(self, problem: Problem, operands: Mapping[str, Any], arithmetic: np.dtype | None = None) -> None:
        score, operation = problem.score, OPERATIONS[problem.operation]
        replays, found = operation.replays, learned(problem)
        functions = {
            "score": [score.root],
            "addend": [addend(score.root) or _ZERO],
            "score_and_slope": [score.root, derivative(score.root) if replays else _ONE],
        }
        if "tq" in operation.optional:
            slope, tangents = derivative(score.root), dict(score.tangents)
            moved = along(score.root, tangents), derivative(slope), along(slope, tangents)
            functions["moved"] = [score.root, slope, *moved]
            weights = [x.weight.weight for x in found]
            if weights:
                functions["weights_moved"] = [
                    *weights,
                    *(along(x, tangents) for x in weights),
                    *map(derivative, weights),
                ]
                functions["places"] = [x.weight.offset for x in found]
        if score.learned:
            functions["weights"] = [x.weight.weight for x in found] or [_ZERO]
            functions["tilts"] = [x.line.tilt if x.line else _ZERO for x in found] or [_ZERO]
            functions["steps"] = [x.line.step if x.line else _ZERO for x in found] or [_ZERO]
            for name in ("number", "offset", "base"):
                functions[f"{name}s"] = [getattr(x, name) for x in found] or [constant(0)]
        dtype = arithmetic or problem.stat_dtype
        made = source(functions, score.facts, dtype, short=problem.dtype.itemsize == 2)
        arrays = tuple(operands[name] for name in score.names)
        self.text, self._nodes = made.text, made.numbers
        self.told: tuple[tuple[Any, ...], list[Change]] = (), []
        self._numbers = struct.Struct("=" + "".join(map(_FORMATS.get, score.facts.numbers)))
        self.dtype = derived(PARAMS, made.arguments, _PREFIX)
        blank = made.pack(Bound(score.root, arrays, (1,) * len(score.facts.numbers)), (0,) * len(arrays))
        self.values = {_PREFIX + name: blank[name] for name in made.arguments.names}
        addresses = {f"{_PREFIX}array{slot}": name for slot, name in enumerate(score.names)}
        self.slots = {field: name for field, name in addresses.items() if field in self.dtype.fields}

    def changes(self, numbers: tuple[Any, ...]) -> list[Change]:
        """Return what gives an argument the numbers of a call, by slot of the graph's parameters."""
        found = self._changes(self._numbers.pack(*numbers)) if self._nodes else []
        self.told = numbers, found
        return found

    @functools.cached_property
    def _changes(self) -> Callable[[bytes], list[Change]]:
        return functools.lru_cache(maxsize=64)(self._words)

    def _words(self, packed: bytes) -> list[Change]:
        """Return the words in which the numbers lie; `packed` ones tell 0.0 from -0.0."""
        record, words, numbers = np.zeros((), self.dtype), set(), self._numbers.unpack(packed)
        for index, node in enumerate(self._nodes):
            field = f"{_PREFIX}number{index}"
            record[field] = numbers[node.value] if node.op == "parameter" else host_value(node, numbers)
            kind, offset = self.dtype.fields[field][:2]
            words |= set(range(offset // 4, (offset + kind.itemsize + 3) // 4))
        halves = np.frombuffer(record.tobytes(), np.uint32)
        return [(word, int(halves[word])) for word in sorted(words)]
