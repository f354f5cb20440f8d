"""A call as one rank makes it: its arrays read, agreed on with the other ranks, and checked."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from cuattn import api, dispatch, interop
from cuattn.distributed.agreement import Message, Stated, agreed, described, digest_of, same
from cuattn.distributed.arrays import given_back, rounded
from cuattn.distributed.comm import Comm
from cuattn.distributed.layout import Layout
from cuattn.distributed.model import ALGORITHMS, DistributedPlan, Size, least, options_of, planned, rates_of
from cuattn.distributed.tape import Tape
from cuattn.distributed.walk import axis_of
from cuattn.distributed.whole import Whole
from cuattn.errors import ArgumentError, ShapeError, shown
from cuattn.interop import Outputs
from cuattn.masks.base import Mask
from cuattn.masks.runs import length_of
from cuattn.problem import DTYPES, Operation, Options, Origin, check_axes, check_band, check_state
from cuattn.rng import BLOCK, RNGState, recorded, resolve, threshold

_memo = lru_cache(maxsize=64)(lambda *call: {})  # of calls that were in order
_SETTLED = ("rows", "keys", "whole", "size", "slices", "costs", "algorithm", "learned", "made", "of_keys")  # is kept
_OWN = ("bias", "out", "rng", "dlse")  # settings that are a rank's own
_CUT = (*_OWN, "mask", "origin", "score_args")  # settings that parts are not given as they are


@lru_cache
def defaults(name: str) -> dict[str, Any]:
    """Return the keyword arguments of a function of cuattn, with their defaults."""
    parameters = inspect.signature(getattr(api, name)).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def _recalled(function: Any) -> Any:
    """Return what tells a function that was traced, as long as it captures the same, from others; None of another."""
    from cuattn.tracing import recall

    return recall(function)


class Request:
    """What all ranks together are asked for, as far as this one knows.

    Parameters
    ----------
    operation : Operation
    operands : dict of str to array
        This rank's, by name.
    state : object
        A backward's ``fwd.rng_state``.
    comm : Comm
    placing : dict of str to object
        The arguments layout, key_layout and algorithm.
    options : dict of str to object
        The other keyword arguments.
    wanted : tuple of str
        The results.

    Attributes
    ----------
    arrays : dict of str to array
        NumPy or CuPy views.  A bias without rows is "key_bias".
    home : ArrayOrigin
        Their kind and place.
    rows, keys : Layout
    whole : Whole
    learned : dict of int to array
        The arrays among score_args that are differentiated, by number.
    made : dict of str to (shape, dtype)
        Of each result.
    tape : Tape or None
        What this rank does, once it was taken down.
    """

    tape: Tape | None = None
    of_keys = False  # whether the bias has no rows

    def __init__(
        self,
        operation: Operation,
        operands: Mapping[str, Any],
        state: Any,
        comm: Comm,
        placing: Mapping[str, Any],
        options: Mapping[str, Any],
        wanted: tuple[str, ...],
    ) -> None:
        self.operation, self.comm, self.placing, self._operands = operation, comm, placing, operands
        self.settings, self.state, self._wanted = {**defaults(operation.name), **options}, state, wanted
        found = same(comm, self._read, self._facts)
        if self._plain() is not None and not operation.replays:
            self.state = found.seed
        if found.known:
            vars(self).update(self._memo)
            self._name_bias()
            self._widen()
            return

        def settle() -> None:
            with self.home.scope():
                self._settle(found.everyone)

        agreed(comm, settle)
        if self._memo is not None:
            said = self._message.stated._replace(random="", seed=None, expected=found.digest)
            self._memo |= {"_message": Message(said), **{name: getattr(self, name) for name in _SETTLED}}

    @property
    def dtype(self) -> np.dtype:
        """Of q, k and v."""
        return np.dtype(self.arrays["q"].dtype)

    @property
    def sums(self) -> np.dtype:
        """Of l, m and of all sums."""
        return DTYPES[self.dtype].stat

    @property
    def _local_size(self) -> int:
        return getattr(self.comm, "local_size", self.comm.size)

    def _read(self) -> Message:
        """Look at this rank's arguments; return what must be equal everywhere, and what it brings."""
        settings, known = self.settings, defaults(self.operation.name)
        for name in settings.keys() - known.keys():
            raise TypeError(f"{self.operation.name}() got an unexpected keyword argument {name!r}")
        self._outputs = Outputs(self._wanted, settings["out"])
        self._look()
        level, arrays = threshold(settings["dropout_p"]), self.arrays
        if self.operation.replays:
            check_state("fwd.rng_state", self.state, level)
            self.state = None if self.state is None else recorded(self.state)
        else:
            self.state = resolve(settings["rng"]) if level else None
        self._memo = self._memo_of_call()
        if self._memo:
            message = self._memo["_message"]
            self._outputs.check(self._memo["made"], arrays, self.home)
        else:
            rows = arrays["bias"].shape[-2:-1] if "bias" in arrays else ()
            brought = {"lengths": (arrays["q"].shape[-2], arrays["k"].shape[-2]), "rows": rows}
            texts = sorted((name, described(value)) for name, value in self._facts().items() if name != "rng")
            message = Message(Stated(digest_of(texts), brought))
        if self.state is not None or settings.get("rng") is not None:
            random = described(self._random())
            message = Message(message.stated._replace(random=random, seed=self._plain()))
        self._message = message
        return message

    def _random(self) -> Any:
        """Return where random numbers come from, as far as it is to be equal everywhere."""
        random = self.state if self.operation.replays else self.settings["rng"]
        if isinstance(random, np.random.Generator):
            return type(random)
        return random.seed if isinstance(random, RNGState) and not isinstance(random.offset, int) else random

    def _facts(self) -> dict[str, Any]:
        """Return what must be equal everywhere."""
        facts = {"the operation": self.operation.name, "the memory": self.home.backend, **self.placing}
        facts |= {name: value for name, value in self.settings.items() if name not in _OWN}
        facts |= {"mask": self.mask, "rng": self._random(), "score_args": self._score_args}
        return facts | {f"the shape of {name}": _without_length(name, x) for name, x in self.arrays.items()}

    def _memo_of_call(self) -> dict[str, Any] | None:
        """Return where it is kept what was found of a call like this one, empty at first.

        None of a call in which more may be wrong than shapes, dtypes and options tell.
        """
        settings, mask, comm, home = self.settings, self.mask, self.comm, self.home
        args, window, seen = settings["score_args"], settings["window"], interop.signature(self.arrays)
        if seen is None or type(args) is not tuple or not all(type(x) in (bool, int, float) for x in args):
            return None
        if self.state is None and settings.get("rng") is not None:
            return None
        options = {name: x for name, x in settings.items() if name not in (*_OWN, "score")}
        functions = [f for f in (settings["score"], mask) if not (f is None or isinstance(f, Mask))]
        if functions:
            options["mask"] = mask if mask is None or isinstance(mask, Mask) else callable
            functions = [_recalled(f) if callable(f) else None for f in functions]
            if None in functions:
                return None
        types = tuple(map(type, (*options.values(), *args, *(window if isinstance(window, tuple) else ()))))
        strides = tuple([array.strides for array in self.arrays.values()])
        ranks = comm.rank, comm.size, self._local_size, getattr(comm, "sm_margin", 0)
        where = *ranks, home.backend, home.device, home.kind, *self.placing.values()
        call = self.operation.name, tuple(options.items()), types, *functions, self._wanted, seen[0], strides
        try:
            return _memo(*call, *where)
        except TypeError:  # an option that cannot be hashed, and will be refused
            return None

    def keep(self, tape: Tape) -> None:
        """Take the tape of the call, which others like it are given."""
        self.tape = tape
        if self._memo is not None:
            self._memo["tape"] = tape

    def _look(self) -> None:
        """Take views of this rank's arrays."""
        settings, mask = self.settings, self.settings["mask"]
        needed = ("q", "k", "v", *self.operation.operands)
        arrays = {**self._operands, "bias": settings["bias"], "dlse": settings.get("dlse")}
        named = {name: x for name, x in arrays.items() if x is not None or name in needed}
        if mask is not None and not isinstance(mask, Mask) and not callable(mask):
            named["mask"] = mask
        args = settings["score_args"]
        if isinstance(args, tuple | list):
            named |= {f"score_args[{n}]": x for n, x in enumerate(args) if hasattr(x, "__dlpack__")}
        labels = {self.operation.label(name): name for name in named}
        views, self.home = interop.to_backend(
            {**{label: named[name] for label, name in labels.items()}, **self._outputs.given}
        )
        views = {labels[label]: x for label, x in self._outputs.take(views).items()}
        for name, array in views.items():
            if array.ndim < 2 and name in ("q", "k", "v", "do", "o", "bias", "mask"):
                raise ShapeError(f"{name} has shape {array.shape}; expected at least two axes")
        self.mask = views.pop("mask", mask)
        if isinstance(args, tuple | list):
            args = tuple(views.pop(f"score_args[{n}]", x) for n, x in enumerate(args))
        self._score_args, self.arrays = args, views

    def _plain(self) -> Any:
        """Return the state as other ranks can have it: not with an offset on this one's GPU."""
        state = self.state
        return state if state is None or isinstance(state.offset, int) else None

    def _settle(self, everyone: list[dict[str, Any]]) -> None:
        """Check this rank's arguments against the whole problem, given what each rank brings."""
        settings, arrays = self.settings, self.arrays
        if self.placing["algorithm"] not in (None, *ALGORITHMS):
            names = ", ".join(map(repr, ALGORITHMS))
            raise ArgumentError(f"algorithm is {shown(self.placing['algorithm'])}; expected None or one of {names}")
        lengths = zip(*(one["lengths"] for one in everyone), strict=True)
        self.rows, self.keys = _layouts(self.placing, [tuple(each) for each in lengths])
        n_queries, n_keys = self.rows.n, self.keys.n
        q, k, v = (tuple(arrays[name].shape) for name in "qkv")
        batch, heads, kv_heads = check_axes(q, k, v, True)  # groups are checked below
        leading = (*batch, heads) if max(map(len, (q, k, v))) > 2 else ()
        origin = settings["origin"] or Origin()
        if origin != Origin(origin.batch, origin.head, heads=origin.heads):
            raise ArgumentError(
                f"origin is {shown(origin)}; expected one of batch, head and heads: layout has the rest"
            )
        own = Origin(origin.batch, origin.head, heads=origin.heads or heads)
        options = {name: value for name, value in settings.items() if name not in _CUT}
        options |= {"score_args": self._score_args}
        self.whole = Whole(n_queries, n_keys, leading, own, self.mask, self.state, options)
        check_band(settings["is_causal"], settings["window"], n_queries, n_keys)
        _check_mask(self.mask, n_queries, n_keys)
        if self.state is not None:
            _check_places(self.rows, self.keys)
        if "bias" in arrays:
            self._check_bias([one["rows"][0] for one in everyone])
        self._check_part()
        self._widen()
        self._choose(batch, (heads, kv_heads), {x[-3] if len(x) > 2 else 1 for x in (q, k, v)})
        self._outputs.check(self.made, arrays, self.home)

    def _check_bias(self, rows: list[int]) -> None:
        """Check the bias's keys, and call it what it is: one of this rank's rows, or of no rows."""
        bias = self.arrays["bias"]
        if bias.shape[-1] not in (1, self.keys.n):
            raise ShapeError(f"bias has shape {tuple(bias.shape)}; expected this rank's rows by all {self.keys.n} keys")
        own = self.arrays["q"].shape[-2]
        self.of_keys = all(n == 1 for n in rows) and any(n != 1 for n in self.rows.lengths)
        self._name_bias()
        if not self.of_keys and bias.shape[-2] != own:
            raise ShapeError(
                f"bias has shape {tuple(bias.shape)}; expected {own} rows, this rank's, or 1 on every rank"
            )

    def _name_bias(self) -> None:
        """Call a bias without rows what it is."""
        if self.of_keys:
            self.arrays["key_bias"] = self.arrays.pop("bias")

    def _part(self) -> dispatch.Call:
        """Return a call like that for the part of this rank's rows and keys, as good to check."""
        rows, keys = (layout.rows(self.comm.rank) for layout in (self.rows, self.keys))
        given, lengths = {"bias": self.bias, "mask": self.mask}, (length_of(rows), length_of(keys))
        corners = {name: _corner(x, *lengths) for name, x in given.items() if hasattr(x, "shape")}
        part = replace(self.whole, mask=None if "mask" in corners else self.mask).part(rows, keys)
        arrays = self.operation.given({**self.arrays, "mask": part["mask"], **corners})
        options = Options(**{name: part[name] for name in Options._fields if name in part})
        random = self.state if self.operation.replays else self.settings["rng"]
        functions = part["score"], part["score_args"]
        return dispatch.Call(self.operation, arrays, options, random, part["origin"], None, *functions)

    def _check_part(self) -> None:
        """Check everything else, as for the part of this rank's rows and keys."""
        call = self._part()
        made = dispatch.check_call(call)[0].made
        slots = call.score.learned if call.score else {}
        self.learned = {index: self._score_args[index] for index in slots.values()}
        if not self.operation.replays:
            made = {name: made[name] for name in self._wanted}
        elif self.bias is not None:
            made = {**made, "dbias": (tuple(self.bias.shape), made["dbias"][1])}
        names = {f"dscore{slot}": f"dscore{index}" for slot, index in slots.items()}
        self.made = {names.get(name, name): one for name, one in made.items()}

    def _widen(self) -> None:
        """Let gradients of parts, which have their operand's dtype, be sums of float64."""
        if not self.operation.replays or self.dtype != np.float64:
            return
        args = tuple(x.astype(self.dtype) if n in self.learned else x for n, x in enumerate(self._score_args))
        self.whole.options["score_args"] = args
        self.learned = {n: args[n] for n in self.learned}
        for name in self.arrays.keys() & {"bias", "key_bias"}:
            self.arrays[name] = self.arrays[name].astype(self.dtype, copy=False)

    def _choose(self, batch: tuple[int, ...], heads: tuple[int, int], own: set[int]) -> None:
        """Choose the algorithm; heads can be exchanged where each operand has its own."""
        arrays, asked = self.arrays, self.placing["algorithm"]
        dims, bytes = (arrays["q"].shape[-1], arrays["v"].shape[-1]), (self.dtype.itemsize, self.sums.itemsize)
        self.size = Size(self.operation.replays, math.prod(batch), *heads, *dims, *bytes)
        rates = rates_of(self.home.backend, bytes[0], self._local_size)
        shared = math.gcd(*heads) if own <= set(heads) else 1
        self.slices = 1 if self.bias is not None or self.learned else shared  # parts that heads can be computed in
        self.costs = options_of(self.rows, self.keys, self.whole.visible, self.size, rates, shared, self.slices)
        self.algorithm = asked or least(self.costs)
        if self.algorithm not in self.costs:
            expected = (
                "key heads that the number of ranks divides" if asked == "heads" else "groups that divide key heads"
            )
            raise ArgumentError(
                f"algorithm is {asked!r} with {heads[1]} key heads on {self.comm.size} ranks; expected {expected}"
            )

    def plan(self) -> DistributedPlan:
        """Return the plan."""
        asked = self.placing["algorithm"] is not None
        local = dispatch.plan(self._part())
        return planned(self.costs, self.algorithm, asked, self.size, self.comm.size, local)

    @property
    def bias(self) -> Any:
        """The bias, one of this rank's rows or one without rows, or None."""
        return self.arrays.get("bias", self.arrays.get("key_bias"))

    def delivered(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return results as the caller's kind of array, of the dtypes that they have to have."""
        made = self.made
        found = [(results[name], dtype) for name, (_, dtype) in made.items()]
        arrays = [array if array.dtype == dtype else rounded(array, dtype) for array, dtype in found]
        self._outputs.direct.clear()  # they are filled below
        if self.home.kind == "torch":
            arrays = given_back(self.home, arrays)
        return dict(zip(made, self._outputs.fill(arrays), strict=True))


def _corner(array: Any, *lengths: int) -> Any:
    """Return an array like a part's of one that has more rows and keys: as good to check, but not copied."""
    return array[(..., *(slice(min(n, size)) for n, size in zip(lengths, array.shape[-2:], strict=True)))]


def _without_length(name: str, array: Any) -> tuple[Any, ...]:
    """Return what of an array's shape, and its dtype, is the same on all ranks."""
    shape, axis = tuple(array.shape), axis_of(name)
    return (*shape[:axis], *shape[axis:][1:], array.dtype)


def _layouts(placing: Mapping[str, Any], lengths: list[tuple[int, ...]]) -> tuple[Layout, Layout]:
    """Return the layouts of rows and keys, given the lengths that ranks bring."""
    for name in ("layout", "key_layout"):
        if not isinstance(placing[name], Layout | None):
            raise ArgumentError(f"{name} is {shown(placing[name])}; expected a cuattn.distributed.Layout or None")
    rows, keys = placing["layout"], placing["key_layout"]
    if keys is None and rows is not None and rows.lengths == lengths[1]:
        keys = rows
    found = []
    for name, layout, brought in (("layout", rows, lengths[0]), ("key_layout", keys, lengths[1])):
        if layout is None:
            edges = np.cumsum([0, *brought]).tolist()
            layout = Layout.from_runs([[run] for run in pairwise(edges)])
        elif layout.lengths != brought:
            given = f"{name} has lengths {shown(layout.lengths)} by rank, and {'k' if found else 'q'} {shown(brought)}"
            raise ShapeError(f"{given}; expected equal ones")
        found.append(layout)
    return found[0], found[1]


def _check_mask(mask: Any, n_queries: int, n_keys: int) -> None:
    if mask is None or (callable(mask) and not isinstance(mask, Mask)):
        return
    if isinstance(mask, Mask):
        fits = mask.fits(n_queries, n_keys)
    else:
        fits = mask.shape[-2] in (1, n_queries) and mask.shape[-1] in (1, n_keys)
    if not fits:
        text = shown(mask) if isinstance(mask, Mask) else f"an array of shape {tuple(mask.shape)}"
        raise ShapeError(f"mask is {text}; expected one of the whole problem: {n_queries} queries and {n_keys} keys")


def _check_places(rows: Layout, keys: Layout) -> None:
    """Check that dropout's blocks are not cut."""
    for name, layout in (("layout", rows), ("key_layout", keys)):
        for start, _ in (run for mine in layout.runs for run in mine):
            if start % BLOCK:
                raise ArgumentError(f"{name} has a run at {start}; expected multiples of {BLOCK} with dropout_p > 0")
