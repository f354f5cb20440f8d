"""The way of a call from the caller's arrays to the backend that computes it.

A :class:`Call` is made at the door, by :mod:`cuattn.api`, and handed on whole.  What it comes to is remembered by what
its arguments look like: a call like an earlier one is not checked again, and on a GPU only passes addresses to the
launches that were prepared for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from cuattn import interop
from cuattn.errors import ArgumentError, DtypeError, UnsupportedError, expect_no_tracing, shown
from cuattn.interop import Outputs
from cuattn.masks.base import Mask
from cuattn.masks.constructors import band_of_runs
from cuattn.plans import Plan
from cuattn.problem import (
    FORWARD,
    SCORE_ARGS,
    Array,
    Operation,
    Options,
    Origin,
    Problem,
    bind,
    borrowed_mask,
    check,
    check_axes,
    check_band,
    check_parts,
    drawn_state,
    pieces,
    place_of,
    replayed_state,
    whole_offset,
)


@lru_cache(maxsize=1)
def _scoring() -> ModuleType:
    """Import what knows functions, with all of tracing, which calls without functions do not need."""
    from cuattn import scoring

    return scoring


@lru_cache(maxsize=64)
def _is_mask(kind: type) -> bool:
    """Return whether instances of a class are masks; to ask an abstract class takes three times as long."""
    return issubclass(kind, Mask)


class Call:
    """One call of an operation, as the caller made it.

    Parameters
    ----------
    operation : Operation
    arrays : dict of str to array
        Those of its operands that there are by name, in the order of `operation.inputs`; of a call that is only planned
        without those that the operation adds.  A mask that is no array is moved to `masks`, or to `function` until
        `take_functions` was called; arrays among `score_args` and their tangents are added.
    options : Options
    random : object, optional
        The argument rng or, where dropout is replayed, the forward's state.
    origin : Origin, optional
    out : object, optional
        Where results are wanted: one array, or a sequence with an item for each result; None for new arrays.
    score, score_args, tscore_args : object, optional
        The arguments; a function is made a `Score`.

    Attributes
    ----------
    masks : tuple of Mask
        Those that are no arrays.
    function : callable or None
        A mask that is ``visible(b, h, i, j)``.
    scored, args : callable or None, sequence
        The score function and its arguments.
    score : Score or None
        The same, once it is needed: not in a warm call, but for few functions.
    count, has_numbers : int, bool
        How many of the arguments are arrays, and whether others are not.
    learned : (int or None, tuple or None)
        Once the call is checked, the first result that is the gradient of one of them, and which of these is whose;
        None if they are all, in their order.
    is_told : bool
        Whether there are masks that are no arrays, or functions.
    into : dict of str to array
        On a GPU, where all results go, of their shapes and dtypes and at any strides, where rows are aligned: nothing
        of this is checked.
    """

    score: Any = None
    scored: Any = None
    args: Any = ()
    count = 0
    has_numbers = False
    learned: tuple[Any, ...] = ()
    masks: tuple[Mask, ...] = ()
    function: Any = None
    is_told = False
    into: dict[str, Any] = {}  # noqa: RUF012  (never written to)

    def __init__(
        self,
        operation: Operation,
        arrays: dict[str, Any],
        options: Options,
        random: Any = None,
        origin: Origin | None = None,
        out: Any = None,
        score: Any = None,
        score_args: Any = (),
        tscore_args: Any = None,
    ) -> None:
        self.operation, self.arrays, self.options = operation, arrays, options
        self.random, self.origin, self.out = random, origin, out
        if "mask" in arrays:
            mask = arrays["mask"]
            if _is_mask(type(mask)):
                self.masks, self.is_told = arrays.pop("mask").parts, True
            elif callable(mask):
                self.function, self.is_told = arrays.pop("mask"), True
        if score is not None or type(score_args) is not tuple or score_args:
            self.scored, self.is_told = score, True
            if type(score_args) is not tuple or not callable(score):
                _scoring().check(score, score_args)
            if score_args:
                self._take_args(score_args)
        if tscore_args is not None:
            self._take_tangents(tscore_args)

    @property
    def has_runs(self) -> bool | None:
        """Whether the call is a part of several pieces of a larger problem; None of the whole."""
        if self.origin is None:
            return None
        if not isinstance(self.origin, Origin):
            raise DtypeError(f"origin is {shown(self.origin)}; expected a cuattn.Origin or None")
        return self.origin.has_runs

    def _take_args(self, args: Sequence[Any]) -> None:
        """Take the arguments of the score function."""
        n = len(args)
        if n > len(SCORE_ARGS):
            raise ArgumentError(f"score_args has {n} items; expected at most {len(SCORE_ARGS)}")
        arrays, count = self.arrays, 0
        for index, value in enumerate(args):
            if hasattr(value, "__dlpack__"):
                arrays[SCORE_ARGS[index]] = value
                count += 1
        self.args, self.count, self.has_numbers = args, count, count < n

    def _take_tangents(self, tangents: Any) -> None:
        """Add the tangents of the score function's arguments."""
        if self.scored is None:
            label = self.operation.label("tscore_args")
            raise ArgumentError(f"{label} is given but score is None; expected None")
        self.take_score()
        self.arrays |= self.score.take_tangents(tangents)

    def take_score(self) -> None:
        """Make the score function and its arguments a `Score`."""
        if self.score is None and self.scored is not None:
            self.score = _scoring().Score(self.scored, self.args, self.count, self.operation)

    def recall(self, known: _Known) -> None:
        """Take what the functions of such a call were traced to."""
        self.learned = known.learned
        if known.numbers is None:
            self.take_score()
            score = self.score
            score.whole, score.traced, score.visible = known.score
            if score.visible is not None and known.masks is None:
                self.take_functions(self.arrays)
        if known.masks is not None:
            self.masks = known.masks

    def divide(self, results: Sequence[Any]) -> tuple[Sequence[Any], tuple[Any, ...]]:
        """Divide a backward's results into those by operands and those by the function's arguments, which come last."""
        first, places = self.learned
        own, found = results[:first], results[first:]
        return own, tuple(found) if places is None else tuple([None if n is None else found[n] for n in places])

    def take_functions(self, arrays: dict[str, Any]) -> None:
        """Make functions of visibility the masks that they are for operands of these shapes, at this origin."""
        if self.function is not None:
            self._add_mask(_scoring().visible(self.function), arrays)
            self.function = None
        if self.score is not None and self.score.visible is not None:
            self._add_mask(self.score.visible, arrays)
            self.score.visible = None

    def _add_mask(self, visible: Any, arrays: dict[str, Any]) -> None:
        """Add the mask of a traced function to the call's, within one of its kind where one mask says both."""
        shapes = [arrays[name].shape for name in "qkv"]
        for part in function_mask(visible, *shapes, self.origin).parts:
            alike = [mask for mask in self.masks if mask.kind == part.kind and not mask.on_device]
            joined = _joined(alike[0], part) if alike and not part.on_device else None
            others = self.masks if joined is None else [mask for mask in self.masks if mask is not alike[0]]
            self.masks = (*others, joined or part)


@dataclass
class _Known:
    """What calls of one signature come to; empty until the first of them was checked.

    The problem, the results' shapes and dtypes and who computes them; on a GPU the sequence of launches; and, where a
    look at the arrays is enough, the way back to such a caller, what its score function was traced to, its numbers (or
    what tells them from the arguments, or None where a `Score` does), where the gradients by these are, the mask that
    its function of visibility is, and its masks' tables by the place of the call.
    """

    problem: Problem | None = None
    made: dict[str, Array] | None = None
    backend: ModuleType | None = None
    sequence: Any = None
    origin: interop.ArrayOrigin | None = None
    allocate: Any = None
    score: tuple[Any, ...] = ()
    numbers: Any = ()
    recalls: bool = False
    learned: tuple[Any, ...] = ()
    masks: tuple[Mask, ...] | None = None
    kept: dict[int, Any] | None = None
    places: dict[Origin, Any] = field(default_factory=dict)

    def place(self, origin: Origin) -> Any:
        """Return where a part stands, see :func:`place_of`: the same object for the same origin, for a while."""
        found = self.places.get(origin)
        if found is None:
            if len(self.places) >= _PLACES_KEPT:
                self.places.clear()
            found = self.places[origin] = place_of(self.problem, origin)
        return found


def _memo(size: int) -> Callable[..., _Known]:
    """Return what remembers so many calls, each option beside its type, as True is no 1."""
    return lru_cache(maxsize=size, typed=True)(lambda *signature: _Known())


_known = _memo(1024)  # by kinds of masks and functions
_of_masks = _memo(64)  # by functions that are masks, which hold tables
_PLACES_KEPT = 16  # of the parts that calls of one signature are
_OF_ONE = 32  # calls that a mask or the function of a score remembers, as long as it lives
_epoch = object()


def forget() -> None:
    """Forget every call."""
    global _epoch
    _epoch = object()
    _known.cache_clear()
    _of_masks.cache_clear()


def _cell(call: Call, layouts: Any, memo: Callable[..., _Known], masks: Any, who: Any, place: Any) -> _Known:
    """Return a memo's cell of a call whose arrays have these layouts; one of its own where it cannot be hashed.

    Parameters
    ----------
    call : Call
    layouts : object
        See :func:`cuattn.interop.signature`.
    memo : callable
    masks, who, place : object
        What tells the call's masks, functions and place from others of the memo.
    """
    options = call.options
    try:  # beside the options so is each side of the window
        return memo(call.operation.name, layouts, masks, who, place, *options, *(options.window or ()))
    except (TypeError, ValueError):  # an option that cannot be hashed: checked in every call
        return _Known()


def _kinds(call: Call) -> tuple[Any, ...]:
    """Return where the cell is that calls share whose masks and functions are alike, and what tells it there."""
    score, masks = call.score, tuple([mask.layout for mask in call.masks])
    kind = score and (score.traced and score.traced.kind,)
    return _known, masks, kind, None if call.origin is None else call.has_runs


def _themselves(call: Call) -> tuple[Any, ...] | None:
    """Return the same of the cell of calls with these very masks and functions; None where one must be traced.

    The first mask has it, or the score's function, so that it does not outlive them.
    """
    masks, known, numbers = call.masks, None, ()
    place = None if call.origin is None else False  # a part, but of one piece
    if call.scored is not None:
        known = _scoring().recall(call.scored)
        if known is None:
            return None
        if call.has_numbers:
            numbers = tuple(_scoring().kinds_of_numbers(call.args))
    if call.function is not None:
        visible = _scoring().recall(call.function)
        return visible and (_of_masks, visible, (known, numbers), call.origin)
    if masks:
        own, masks, numbers = masks[0]._cache, masks[1:], (known, numbers)
    else:
        own = known.calls
    return own.get(_epoch) or own.setdefault(_epoch, _memo(_OF_ONE)), masks, numbers, place


def compute(call: Call) -> tuple[list[Any], Any]:
    """Run a call; PyTorch's compiler, where it is in use, is kept from looking inside.

    Returns
    -------
    results : list of array
        The operation's results, in its order.
    state : RNGState or None
        Of dropout.
    """
    if "torch._dynamo" not in sys.modules:
        return _run(call)
    expect_no_tracing()
    callback, opaque = _compiler()
    return _run(call) if callback() is None else opaque(call)


@lru_cache(maxsize=1)
def _compiler() -> tuple[Any, Any]:
    """Return what tells what looks at frames for PyTorch's compiler, and `_run` unseen by it."""
    frames = getattr(sys.modules["torch"]._C._dynamo, "eval_frame", None)  # private; `disable` asks it, too
    callback = getattr(frames, "get_eval_frame_callback", object)
    return callback, sys.modules["torch._dynamo"].disable(_run)


def _run(call: Call) -> tuple[list[Any], Any]:
    if call.out is not None or (call.origin is not None and call.has_runs):
        return _compute(call)
    seen = interop.signature({**call.arrays, **call.into} if call.into else call.arrays)
    if seen is None:
        return _compute(call)
    layouts, addresses = seen
    about = _themselves(call) if call.is_told else (_known, (), None, None if call.origin is None else False)
    if about is None:
        return _compute(call)
    known = _cell(call, layouts, *about)
    origin, problem = known.origin, known.problem
    if origin is None:
        return _compute(call, known, addresses)
    if known.recalls:
        call.recall(known)
    state = _state(call, problem) if problem.dropout or call.random is not None else None
    place = None if call.origin is None else known.place(call.origin)
    if origin.backend == "cpu":
        return _on_host(call, known, call.arrays, origin, state, place), state
    if call.into:
        return _launch_into(call, known, known.allocate, origin, addresses, state, place), state
    if origin.is_current:
        return _launch(call, known, known.allocate, origin, addresses, state, place), state
    with origin.scope():
        return _launch(call, known, known.allocate, origin, addresses, state, place), state


def _launch_into(
    call: Call, known: _Known, allocate: Any, origin: interop.ArrayOrigin, addresses: list[int], *more: Any
) -> list[Any]:
    """Run a checked call on its GPU for results in `call.into`, whose addresses come last."""
    into, count = [*call.into.values()], len(addresses) - len(call.into)
    addresses, places = addresses[:count], addresses[count:]

    def scratch_alone(scratch_bytes: int, together: bool, held: Sequence[Any]) -> tuple[list[Any], list[int], Any]:
        _, (scratch,), keep = allocate(scratch_bytes, together, held)
        return into, [*places, scratch], keep

    if known.sequence.laid:
        return _launch(call, known, scratch_alone, origin, addresses, *more)
    for array, found in zip(into, _launch(call, known, allocate, origin, addresses, *more), strict=True):
        add(array, found)
    return into


def _launch(
    call: Call,
    known: _Known,
    allocate: Any,
    origin: interop.ArrayOrigin,
    addresses: list[int],
    state: Any,
    place: Any,
    held: Sequence[Any] = (),
) -> list[Any]:
    """Run a checked call on its GPU, the current one, given the addresses of its arrays; `held` are copies of some."""
    numbers = known.numbers
    if numbers is None:
        addresses, captured, numbers = call.score.given(addresses, origin.device)
        held = (*held, *captured) if captured else held
    elif type(numbers) is not tuple:
        numbers = numbers(call.args)
    return known.sequence.run(allocate, origin.stream(), addresses, call.masks, state, place, held, numbers, known.kept)


def _compute(call: Call, warm: _Known | None = None, seen: Any = None) -> tuple[list[Any], Any]:
    """Run a call that is checked; `warm` is told what it comes to if its arrays on a GPU are read at `seen`."""
    outputs = Outputs(call.operation.results if call.options.statistics else call.operation.results[:1], call.out)
    into, count = call.into, len(call.arrays)
    views, origin = _enter(call, outputs)
    function = call.function
    with origin.scope():
        known = _check(call, views, origin)
        problem, call.learned = known.problem, known.learned
        place, state = place_of(problem, call.origin), _state(call, problem)
        outputs.check(known.made, views, origin)
        if origin.backend == "cpu":
            results = _on_host(call, known, views, origin, state, place, outputs.direct)
            if warm is not None and origin.kind == "numpy":
                _remember(warm, known, call, function, origin=origin)
        else:
            operands = bind(problem, views)
            _, addresses = interop.signature({name: operands.get(name, array) for name, array in views.items()})
            if known.sequence is None:
                given = bind(problem, {**_operands(call, views, origin), **into})
                known.sequence = known.backend.launch_sequence(problem, given, _all_masks(call, views))
            allocate = outputs.allocator() if not (into and known.sequence.laid) else origin.allocator([])
            if warm is not None and seen[:count] == addresses:  # not those of copies
                _remember(warm, known, call, function, origin=origin, allocate=allocate)
            copies = [a for name, a in operands.items() if a.data.ptr != views[name].data.ptr]
            place = None if call.origin is None else place
            launch = _launch_into if into else _launch
            addresses += [array.data.ptr for array in into.values()]
            results = launch(call, known, allocate, origin, addresses, state, place, copies)
        return outputs.fill(results), state


def _remember(warm: _Known, known: _Known, call: Call, function: Any, **way: Any) -> None:
    """Tell a cell what a call came to, whose argument mask was a function or is None."""
    masks, score = None if function is None else call.masks, call.score
    told = () if score is None else (score.whole, score.traced, score.whole.split[0])
    numbers = () if score is None else score.way_to_numbers if known.sequence else None
    recalls = numbers is None or masks is not None or bool(known.learned)
    own = {"score": told, "numbers": numbers, "recalls": recalls, "masks": masks, "kept": {}}
    vars(warm).update({**vars(known), **way, **own})


def _on_host(
    call: Call,
    known: _Known,
    views: dict[str, Any],
    origin: interop.ArrayOrigin,
    state: Any,
    place: Any,
    out: Any = None,
) -> list[Any]:
    """Run a checked call on the CPU; `out` has arrays for some of the results."""
    problem = known.problem
    for mask in call.masks:
        if mask.on_device:
            raise DtypeError("mask holds device vectors but q is on the CPU; expected a mask of host vectors")
    if state is not None and not isinstance(state.offset, int):
        raise DtypeError("rng.offset is a device array but q is on the CPU; expected an int")
    operands, direct = bind(problem, _operands(call, views, origin)), bind(problem, out) if out else {}
    numbers = () if call.score is None else call.score.numbers
    masks, place = _all_masks(call, views), place or problem.place
    found = known.backend.run(problem, operands, masks, state, place, direct, numbers)
    return [found[name].reshape(shape) for name, (shape, _) in known.made.items()]


def _operands(call: Call, views: dict[str, Any], origin: interop.ArrayOrigin) -> dict[str, Any]:
    """Return the arrays of a call by a backend's names, those that its score function captures among them."""
    return views if call.score is None else call.score.operands(views, origin)


def _state(call: Call, problem: Problem) -> Any:
    """Return the state of dropout's random numbers; None without dropout."""
    if call.random is None and not problem.dropout:
        return None
    return (replayed_state if call.operation.replays else drawn_state)(problem, call.random)


def _enter(call: Call, outputs: Outputs) -> tuple[dict[str, Any], interop.ArrayOrigin]:
    """Return NumPy or CuPy views of a call's arrays by name; `outputs` takes those in which results are wanted."""
    call.take_score()
    label = call.operation.label
    named = {label(name): array for name, array in call.arrays.items()}
    views, origin = interop.to_backend({**named, **outputs.given})
    taken = outputs.take(views)
    return {name: taken[label(name)] for name in call.arrays}, origin


def _check(call: Call, views: dict[str, Any], origin: interop.ArrayOrigin) -> _Known:
    """Check a call; return its memo cell."""
    has_runs = call.has_runs
    if call.score is not None and call.score.whole is None:
        call.score.trace(views)
    call.take_functions(views)
    if has_runs:
        _fold(call, views)
    layouts, _ = interop.signature({**views, **call.into})
    known = _cell(call, layouts, *_kinds(call))
    if known.problem is None:
        operands = _operands(call, views, origin)
        score: tuple[Any, ...] = ()
        if call.score is not None:
            call.score.check_tangents(views)
            score = call.score.bound(operands), tuple(call.score.learned), call.score.tangent_slots
        problem = check(call.operation, operands, _all_masks(call, views), call.options, call.origin, *score)
        made, backend = call.operation.made(problem, operands), _backend_of(origin, problem.kernel)
        numbers, learned = (None, call.score.places) if call.score else ((), ())
        vars(known).update(problem=problem, made=made, backend=backend, numbers=numbers, learned=learned)
    return known


def _all_masks(call: Call, views: dict[str, Any]) -> tuple:
    """Return the masks of a call, an array among them, too."""
    return (*call.masks, borrowed_mask(views["mask"])) if "mask" in views else call.masks


def _fold(call: Call, views: dict[str, Any]) -> None:
    """Turn the band of a part that is made of several pieces into a mask of its own rows and keys."""
    rows, keys = (views[name].shape[-2] if views[name].ndim > 1 else 0 for name in "qk")
    options = call.options
    mask = band_mask(options.is_causal, options.window, call.origin, rows, keys)
    if mask is not None:
        call.options, call.masks = options._replace(is_causal=False, window=None), (*call.masks, mask)


def band_mask(is_causal: Any, window: Any, origin: Origin, rows: int, keys: int) -> Mask | None:
    """Return what causality and a window leave visible of a part of so many rows and keys; None where it is all."""
    band = check_band(is_causal, window, rows, keys, sharded=True)
    if band is None:
        return None
    offset = whole_offset(origin) if band.bottom_right else 0
    return _band_mask(pieces("row", origin.row, rows), pieces("key", origin.key, keys), band.left, band.right, offset)


_joined = lru_cache(maxsize=32)(lambda one, other: one.joined(other))  # masks hold tables
_band_mask = lru_cache(maxsize=64)(band_of_runs)  # kept, since a mask holds tables on a GPU


@lru_cache(maxsize=32)  # masks hold tables
def function_mask(bound: Any, q: tuple, k: tuple, v: tuple, origin: Origin | None) -> Mask:
    """Return the mask that a function is for operands of these shapes; `bound` is what was traced."""
    from cuattn.masks.function import mask_of

    batch, heads, _ = check_axes(q, k, v, True)  # whether groups are allowed, `check` asks
    leading, origin = () if max(map(len, (q, k, v))) == 2 else (*batch, heads), origin or Origin()
    rows, keys = pieces("row", origin.row, q[-2]), pieces("key", origin.key, k[-2])
    return mask_of(bound, rows, keys, leading, (origin.batch, origin.head))


def check_call(call: Call) -> tuple[_Known, dict[str, Any], interop.ArrayOrigin]:
    """Check a call without its outputs, of whose arrays q, k and v are enough; return what it comes to, and views."""
    views, origin = _enter(call, Outputs((), None))
    with origin.scope():
        known = _check(call, views, origin)
        place_of(known.problem, call.origin)
        if not isinstance(call.random, np.random.Generator):  # which nothing here may draw from
            drawn_state(known.problem, call.random)
    return known, views, origin


def plan(call: Call) -> Plan:
    """Return the plan of a call, of whose arrays q, k and v are enough."""
    known, views, origin = check_call(call)
    problem = known.problem
    with origin.scope():
        found = known.backend.plan(problem, bind(problem, _operands(call, views, origin)), _all_masks(call, views))
        if problem.score is None:
            return found
        return replace(found, notes=(*found.notes, f"score {shown(problem.score.root, 200)}"))


def merge(parts: dict[str, Any], names: tuple[str, ...], out: Any) -> list[Any]:
    """Combine forwards or jvps.

    Parameters
    ----------
    parts : dict of str to array
        What `names` are of each, in turn, under the names that errors use.
    names : tuple of str
        The results.
    out : object
    """
    outputs, n = Outputs(names, out), len(names)
    views, origin = interop.to_backend({**parts, **outputs.given})
    made = check_parts(outputs.take(views))
    outputs.check(made, views, origin)
    arrays, backend = list(views.values()), _backend_of(origin, None)
    with origin.scope():
        if origin.backend == "cpu":
            results = backend.merge([arrays[first : first + n] for first in range(0, len(arrays), n)])
            outputs.direct.clear()  # they are filled below
        else:
            o, l = arrays[:2]
            sequence = backend.merge_sequence(origin.device, len(arrays) // n, o.shape, o.dtype, l.dtype, names)
            copies = [sys.modules["cupy"].ascontiguousarray(array) for array in arrays]
            held = [copy for copy, array in zip(copies, arrays, strict=True) if copy is not array]
            addresses = [copy.data.ptr for copy in copies]
            results = sequence.run(outputs.allocator(), origin.stream(), addresses, held=held)
        return outputs.fill(results)


def merging(*arrays: Any) -> Any:
    """Return the launches of :func:`merge_into` for such arrays, see :func:`fill`; None on the host."""
    out, _, _, o, l, _ = arrays[:6]
    if isinstance(out, np.ndarray):
        return None
    from cuattn import cuda

    width = 4 if o.shape[-1] % 4 == 0 else 1
    return cuda.merge_sequence(out.device.id, 2, o.shape, o.dtype, l.dtype, FORWARD.results, out.dtype, width)


def merge_into(*arrays: Any) -> None:
    """Merge the (o, l, m) of two parts.

    Parameters
    ----------
    *arrays : array
        Where to, of any dtype of o, which may be the first part; and the parts, of equal dtypes.  NumPy's, or CuPy's on
        the current device; C-contiguous and allocated, which aligns them.
    """
    sequence = merging(*arrays)
    if sequence is not None:
        return fill(sequence, [array.data.ptr for array in arrays], sys.modules["cupy"].cuda.get_current_stream())
    from cuattn import cpu

    for target, found in zip(arrays, cpu.merge([list(arrays[3:6]), list(arrays[6:])]), strict=False):
        target[...] = found


def adding(out: Any, *terms: Any) -> Any:
    """Return the launches of :func:`add` for such arrays, see :func:`fill`; None where NumPy or CuPy does it."""
    if isinstance(out, np.ndarray):
        return None
    from cuattn import cuda

    return cuda.add_sequence(out, *terms)


def add(out: Any, *terms: Any) -> None:
    """Round an array, or the sum of two, to `out`, which may be one of them.

    Parameters
    ----------
    out : array
        NumPy's, or CuPy's on the current device.
    *terms : array
        One or two of one dtype, of the same kind and shape as `out`.
    """
    sequence = adding(out, *terms)
    if sequence is not None:
        addresses = [array.data.ptr for array in (out, *terms)]
        return fill(sequence, addresses, sys.modules["cupy"].cuda.get_current_stream())
    out[...] = terms[0] if len(terms) == 1 else terms[0] + terms[1]


def fill(sequence: Any, addresses: Sequence[int], stream: Any) -> None:
    """Run launches whose results, the first of these addresses, are there already."""
    made = len(sequence.results)
    sequence.run(lambda *_: ([], [*addresses[:made], 0], None), stream, addresses[made:])


def _backend_of(origin: interop.ArrayOrigin, kernel: str | None) -> ModuleType:
    """Return the module that computes where the arrays are."""
    from cuattn import cpu

    if origin.backend == "cpu" and kernel in (None, *cpu.FAMILIES):
        return cpu
    from cuattn import cuda

    families = (*cpu.FAMILIES, *cuda.FAMILIES)
    if kernel not in (None, *families):
        raise ArgumentError(f"kernel is {shown(kernel)}; expected None or one of {', '.join(map(repr, families))}")
    if origin.backend == "cpu":
        raise UnsupportedError(f"kernel is {kernel!r} but q is in host memory; expected an array on a GPU")
    if kernel in cpu.FAMILIES:
        raise UnsupportedError(f"kernel is {kernel!r} but q is on a GPU; expected an array in host memory")
    return cuda
