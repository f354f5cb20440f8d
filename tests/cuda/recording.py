"""Run records of launches without a GPU: made-up addresses in, arguments out."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from cuattn.cuda import arguments, families, launch, merge, tables
from cuattn.cuda.params import MASK_PARAMS, MERGE_PARAMS, PARAMS
from cuattn.cuda.sm90 import tensor_map
from cuattn.problem import validate
from tests.cuda.cases import BF16, Case
from tests.cuda.sm90.test_forward_plan import H200

BASE = 1 << 40  # where results and scratch memory begin
MASK, TICKET = 1 << 36, 1 << 38
_MASK_KERNELS = ("mask_bounds", "mask_order", "mask_alive")
_DTYPES = {"attention_merge": MERGE_PARAMS, **dict.fromkeys(_MASK_KERNELS, MASK_PARAMS)}


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
    """What a record needs to know of a stream."""

    ptr = 7

    def __init__(self, capturing=False):
        self.capturing = capturing

    def is_capturing(self):
        return self.capturing


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a grid as it is written: without the last axes of length 1, the first apart."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class Device:
    """Stands in for the driver: remembers what is compiled, allocated and launched."""

    def __init__(self):
        self.done: list[Launch | Zeroed] = []
        self.sizes: list[int] = []  # of the pieces of memory of the last run

    def function(self, device, path, kernel, constants, shared_bytes=0, arch=None):
        def started(grid, block, arguments, shared_bytes=0, stream=None):
            first, *maps = arguments
            dtype = _DTYPES.get(kernel, PARAMS)
            argument = np.frombuffer(first.tobytes(), dtype)[0] if first.nbytes == dtype.itemsize else first
            values = dict(constants)
            self.done.append(Launch(path, kernel, values, grid, block, shared_bytes, argument, tuple(maps)))

        return started

    def start(self, function, shape, piece, maps, stream):
        assert stream == Stream.ptr
        struct = len(piece.words) - 1 - len(maps)
        assert list(piece.words[struct + 1 :]) == [described.address for described in maps]
        argument = np.frombuffer(piece.words[:struct].tobytes(), f"V{8 * struct}")[0]
        grid, block = (_without_ones(shape[first : first + 3]) for first in (0, 3))
        function(grid, block, (argument, *[described.storage for described in maps]), shape[6])

    def zero(self, address, size, stream):
        self.done.append(Zeroed(address, size))

    def run(self, made: launch.Record, inputs: dict[str, int], names, mask=None, state=None, capturing=False):
        """Run a record; return what it launched, in order, and the addresses of its results by position."""
        self.done.clear()
        places: list[int] = []

        def allocate(scratch_bytes, together, held):
            assert together == capturing
            sizes = [arguments.whole(array.nbytes) for array in made.results] + [scratch_bytes]
            places[:] = np.cumsum([BASE, *sizes[:-1]]).tolist()
            self.sizes = sizes
            return ["results"], list(places), None

        addresses = [inputs.get(name, 0) for name in names]
        assert made.run(allocate, Stream(capturing), addresses, mask, state) == ["results"]
        return list(self.done), places

    @property
    def end(self) -> int:
        """Where the memory of the last run ends."""
        return BASE + sum(self.sizes)


@pytest.fixture
def device(monkeypatch):
    """A stand-in for an H200."""
    device = Device()
    monkeypatch.setattr(arguments, "card", lambda number: H200)
    for module in (arguments, merge, tables):
        monkeypatch.setattr(module, "function", device.function)
    for module in (launch, tables):
        monkeypatch.setattr(module, "zero", device.zero)
    monkeypatch.setattr(families, "_records", {})
    merge.merge_record.cache_clear()
    monkeypatch.setattr(launch, "ticket_of", lambda stream: TICKET)
    monkeypatch.setattr(launch, "start", device.start)
    monkeypatch.setattr(tensor_map, "describe", lambda *arguments: tensor_map.TensorMap(arguments[0], arguments))
    monkeypatch.setattr(tables.MaskTables, "source", lambda self, mask, stream: MASK)
    yield device
    merge.merge_record.cache_clear()


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


def prepared(case: Case, direction="forward", **more):
    """Return problem, operands and addresses by name of a case, its arrays on a GPU that is not there."""
    arrays, options = case.arrays()
    return validated(arrays.values(), options, direction, **more)


def validated(arrays, options, direction, **more):
    """Return the same of q, k, v and the options of a forward; `more` are a backward's own."""
    problem, operands, size = validate("forward", *arrays, **options, **({} if direction == "backward" else more))
    if direction == "backward":
        state, shape = operands.rng, (*size.leading, size.n_queries, size.head_dim_v)
        o, do = np.empty(shape, problem.out_dtype), np.empty(shape, problem.dtype)
        l, m = np.empty((2, *shape[:-1]), problem.stat_dtype)
        options = {name: value for name, value in options.items() if name not in ("rng", "out_dtype")}
        problem, operands, _ = validate("backward", *arrays, do=do, fwd=(o, l, m, state), **options, **more)
    addresses, next_address = {}, 1 << 32
    for field, value in operands._asdict().items():
        if isinstance(value, np.ndarray):
            operands = operands._replace(**{field: _stand_in(value.shape, value.strides, value.dtype, next_address)})
            addresses["dout" if field == "do" else field] = next_address
            next_address += 1 << 28
    return problem, operands, addresses
