"""Run launch sequences without a GPU: made-up addresses in, arguments out."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuattn.cuda import call, launch, merge, sequence, tables
from cuattn.cuda.device import Device
from cuattn.cuda.sm90 import tensor_map
from cuattn.io_model.sizes import align_up
from cuattn.masks import BooleanMask
from cuattn.problem import OPERATIONS, Options, Problem, ScoreFunction, bind, check
from cuattn.rng import RNGState, resolve
from cuattn.tracing import facts
from tests.cuda.cases import BF16, Case

H200 = Device("sm_90", 132, 232448, 60 << 20)
BASE = 1 << 40  # where results and scratch memory begin
MASK, TICKET = 1 << 36, 1 << 38


class Launch(NamedTuple):
    """One launch: what was compiled, and what it was given."""

    path: str
    kernel: str
    constants: dict[str, Any]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    argument: np.void
    maps: tuple[Any, ...]


class Zeroed(NamedTuple):
    """Memory that was filled with zeros."""

    address: int
    size: int


class Stream:
    """What a launch sequence needs to know of a stream."""

    def __init__(self, capturing=False, ptr=7):
        self.capturing, self.ptr = capturing, ptr

    def is_capturing(self):
        return self.capturing


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a grid as it is written: without the last axes of length 1, the first apart."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class Driver:
    """Stands in for the driver: remembers what is compiled, allocated and launched."""

    def __init__(self):
        self.done: list[Launch | Zeroed] = []
        self.sizes: list[int] = []  # of the pieces of memory of the last run

    def start(self, kernel, piece, stream):
        _, path, name, constants, shared_bytes, *_ = kernel._found
        struct = len(piece.words) - 1 - len(piece.maps)
        assert list(piece.words[struct + 1 :]) == [described.address for described in piece.maps]
        argument = np.frombuffer(piece.words[:struct].tobytes(), kernel.dtype)[0]
        grid, block = (_without_ones(kernel._shape[first : first + 3]) for first in (0, 3))
        described = tuple(each.storage for each in piece.maps)
        self.done.append(Launch(path, name, dict(constants), grid, block, shared_bytes, argument, described))

    def zero(self, address, size, stream):
        if size:
            self.done.append(Zeroed(address, size))

    def run(
        self, made: sequence.LaunchSequence, inputs: dict[str, int], masks=(), state=None, place=None, numbers=(),
        **stream,
    ):  # fmt: skip
        """Run a sequence; return what it launched, in order, and the addresses of its results by position."""
        self.done.clear()
        places: list[int] = []
        stream = Stream(**stream)

        def allocate(scratch_bytes, together, held):
            assert together == stream.capturing
            self.held = held
            sizes = [align_up(array.nbytes) for array in made.results.values()] + [scratch_bytes]
            places[:] = np.cumsum([BASE, *sizes[:-1]]).tolist()
            self.sizes = sizes
            return ["results"], list(places), None

        addresses = [inputs.get(name, 0) for name in made.inputs]
        masks = [mask for mask in masks if not getattr(mask, "borrowed", False)]
        assert made.run(allocate, stream, addresses, masks, state, place, (), numbers) == ["results"]
        return list(self.done), places

    @property
    def end(self) -> int:
        """Where the memory of the last run ends."""
        return BASE + sum(self.sizes)


def _sources(self, masks, plain, stream):
    found = [MASK + (number << 32) for number in range(len(masks))]
    return [*found, plain] if plain else found


@pytest.fixture
def driver(monkeypatch):
    """A stand-in for the driver of an H200."""
    driver = Driver()
    monkeypatch.setattr(call, "device_of", lambda number: H200)
    for module in (sequence, tables):
        monkeypatch.setattr(module, "zero", driver.zero)
    merge.merge_sequence.cache_clear()
    monkeypatch.setattr(sequence, "counters_of", lambda stream, device: TICKET)
    monkeypatch.setattr(launch.Kernel, "start", lambda *arguments: driver.start(*arguments))
    monkeypatch.setattr(tensor_map, "describe", lambda at, dtype, view: tensor_map.TensorMap(at, view))
    monkeypatch.setattr(tables.MaskTables, "sources", _sources)
    yield driver
    merge.merge_sequence.cache_clear()


def array(shape, dtype=BF16, address=4096, *, swap=False, broadcast=()):
    """Return what a record looks at of a CuPy array; `swap`: heads inside rows; `broadcast`: axes of stride 0."""
    order = [*range(len(shape) - 3), -2, -3, -1] if swap else range(len(shape))
    strides, step = [0] * len(shape), dtype.itemsize
    for axis in reversed(list(order)):
        strides[axis], step = step, step * shape[axis]
    strides = tuple(0 if axis in broadcast else stride for axis, stride in enumerate(strides))
    return _stand_in(tuple(shape), strides, dtype, address)


def _stand_in(shape, strides, dtype, address):
    return SimpleNamespace(
        shape=shape, strides=strides, ndim=len(shape), dtype=dtype, size=math.prod(shape),
        nbytes=math.prod(shape) * dtype.itemsize, data=SimpleNamespace(ptr=address), device=SimpleNamespace(id=0),
    )  # fmt: skip


def operands(p: Problem, **options) -> dict[str, Any]:
    """Return the arrays of a problem, which need not be there."""
    q = array((*p.batch, p.heads, p.n_queries, p.head_dim), p.dtype, **options)
    k = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim), p.dtype, **options)
    v = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim_v), p.dtype, **options)
    if p.operation != "backward":
        return {"q": q, "k": k, "v": v}
    stat = array(p.stat_shape, p.stat_dtype)
    return {
        "q": q,
        "k": k,
        "v": v,
        "do": array(p.o_shape, p.dtype, **options),
        "o": array(p.o_shape),
        "l": stat,
        "m": stat,
    }


def sequence_of(made: call.Call) -> sequence.LaunchSequence:
    """Return what a call launches."""
    made.prepare()
    return made.sequence


class Prepared(NamedTuple):
    """A checked call whose arrays are on a GPU that is not there."""

    problem: Problem
    operands: dict[str, Any]
    masks: tuple[Any, ...]
    addresses: dict[str, int]
    state: RNGState | None


def scored(call: Prepared, score: Any) -> Prepared:
    """Return a call with a score function, a `tests.cuda.scores.Score`; of a backward, whose arrays are learned."""
    bound, p = score.bound, call.problem
    replays = OPERATIONS[p.operation].replays
    floats = [slot for slot, x in enumerate(bound.arrays) if x.dtype.kind not in "biu"] * replays
    limits = (math.prod(p.batch), p.heads, p.n_queries, p.n_keys)
    problem = replace(p, score=ScoreFunction(bound.root, facts(bound, limits), tuple(floats)))
    arrays = dict(zip(problem.score.names, bound.arrays, strict=True))
    first = max(call.addresses.values()) + (1 << 28)
    addresses = {name: first + (slot << 28) for slot, name in enumerate(arrays)}
    return call._replace(problem=problem, operands=call.operands | arrays, addresses=call.addresses | addresses)


def prepared(case: Case, operation="forward", **more) -> Prepared:
    """Return a case as a call of an operation."""
    arrays, options = case.arrays(drawn=False)
    return validated(arrays.values(), options, operation, **more)


def validated(arrays, options, operation, **more) -> Prepared:
    """Return a call of q, k, v and the options of a forward; `more` are the operation's own."""
    options = dict(options)
    rng, mask, bias = (options.pop(name, None) for name in ("rng", "mask", "bias"))
    masks = () if mask is None else (BooleanMask.borrow(mask),) if isinstance(mask, np.ndarray) else mask.parts
    named = dict(zip("qkv", arrays, strict=True))
    if bias is not None:
        named["bias"] = bias
    tangents = {f"t{name}": x for name, x in named.items() if "tq" in OPERATIONS[operation].optional}
    if OPERATIONS[operation].replays:
        options.pop("out_dtype", None)
        forward = check(OPERATIONS["forward"], named, masks, Options(**options))
        shape = (*np.broadcast_shapes(*(a.shape[:-3] for a in named.values() if a.ndim > 2)), forward.heads)
        rows = (*shape, forward.n_queries) if named["q"].ndim > 2 else (forward.n_queries,)
        named["do"] = named["o"] = np.empty((*rows, forward.head_dim_v), forward.dtype)
        named["l"], named["m"] = np.empty((2, *rows), forward.stat_dtype)
        if more.pop("dlse", False):
            named["dlse"] = named["l"]
        if tangents:
            named["o"] = named["to"] = named["o"].astype(forward.stat_dtype)
            named["tlse"] = named["l"]
        if "tdo" in OPERATIONS[operation].optional:
            named["tdo"] = named["do"]
    named |= tangents
    problem = check(OPERATIONS[operation], named, masks, Options(**{**options, **more}))
    operands, addresses, next_address = {}, {}, 1 << 32
    for name, value in bind(problem, named).items():
        operands[name] = _stand_in(value.shape, value.strides, value.dtype, next_address)
        addresses[name] = next_address
        next_address += 1 << 28
    if masks and isinstance(mask, np.ndarray):
        addresses["mask"] = next_address
    return Prepared(problem, operands, masks, addresses, resolve(rng) if problem.dropout else None)
