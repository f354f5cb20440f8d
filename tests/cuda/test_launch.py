"""Records of launches without a GPU: whatever a kernel is given lies in the call's own memory."""

import math

import numpy as np
import pytest
from hypothesis import given

from cuattn.cuda import families
from cuattn.cuda import launch as launches
from cuattn.cuda.merge import merge_record
from cuattn.cuda.params import MAX_PARTS
from cuattn.cuda.sm80 import backward, forward
from cuattn.masks import BlockMask, ColumnMask
from tests.cuda.cases import BF16, CASES, Case
from tests.cuda.recording import BASE, MASK, TICKET, Launch, Zeroed, prepared, validated
from tests.cuda.recording import device as device
from tests.strategies import cases

SPLIT = Case("split", batch=(1,), heads=8, kv_heads=8, n_queries=1, n_keys=4096)
LARGE = Case("large", heads=80, kv_heads=80, n_queries=256, n_keys=256, options={"is_causal": True})


def pointers(launch):
    """Yield every address in the argument of a launch, with its field."""

    def walk(value, dtype, name):
        if dtype.names:
            for field in dtype.names:
                yield from walk(value[field], dtype.fields[field][0], f"{name}.{field}")
        elif dtype.base == np.uint64:
            for address in np.ravel(value):
                yield name, int(address)

    argument = launch.argument
    if argument.dtype.names:
        yield from walk(argument, argument.dtype, launch.kernel)


def check_memory(device, direction, problem, operands, addresses):
    """Check that a captured call uses its arguments and one piece of memory, and no tables that nothing has written."""
    made = families.record(problem, operands)
    sparse = operands.mask if isinstance(operands.mask, (ColumnMask, BlockMask)) else None
    names = forward.INPUTS if direction == "forward" else backward.INPUTS
    done, places = device.run(made, addresses, names, sparse, operands.rng, capturing=True)
    vectors = range(MASK, MASK + 4 * (0 if sparse is None else sparse._array.nbytes))
    written = set(addresses.values()) | {0}
    for each in done:
        if isinstance(each, Zeroed):
            assert each.address >= BASE and each.address + each.size <= device.end
            continue
        for name, address in pointers(each):
            assert address in written or address in vectors or BASE <= address < device.end, name
    launches = [each for each in done if isinstance(each, Launch)]
    for number, each in enumerate(launches):
        if "table" in (each.argument.dtype.names or ()):
            before = [other.kernel for other in launches[:number]]
            for table in ("bounds", "order"):
                assert not each.argument["table"][table] or f"mask_{table}" in before, f"nothing wrote {table}"
    if direction == "forward" and math.prod(problem.stat_shape):
        last = launches[-1].argument
        merged = "l_out" in last.dtype.names
        assert places[1:3] == [last[f"{name}_out"] if merged else last[name]["data"] for name in "lm"]


@pytest.mark.parametrize("direction", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("case", [*CASES, SPLIT, LARGE], ids=lambda case: case.name)
def test_memory_of_the_gpu_cases(case, direction, device):
    more = {"deterministic": True} if direction == "deterministic" else {}
    direction = "forward" if direction == "forward" else "backward"
    check_memory(device, direction, *prepared(case, direction, **more))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@given(case=cases(max_length=300, head_dims=(8, 33, 64, 128, 256)))
def test_memory_of_any_call(direction, device, case):
    arrays, options = case.arguments()
    check_memory(device, direction, *validated(arrays, options, direction))


def test_warm_arguments_differ_in_addresses_alone(device):
    case = next(case for case in CASES if case.name == "dropout")
    problem, operands, addresses = prepared(case)
    made = families.record(problem, operands)
    assert families.record(problem, operands) is made
    first = device.run(made, addresses, forward.INPUTS, None, operands.rng)[0][-1].argument
    moved = {name: address + 4096 for name, address in addresses.items()}
    second = device.run(made, moved, forward.INPUTS, None, operands.rng)[0][-1].argument
    for name in first.dtype.names:
        if name in "qkv":
            assert second[name]["data"] == first[name]["data"] + 4096
        else:
            assert second[name].tobytes() == first[name].tobytes()


def test_arrays_have_the_strides_of_contiguous_ones():
    for shape in ((), (3,), (2, 3, 5), (4, 1, 0, 7)[:2]):
        array = np.empty(shape, np.float32)
        found = launches.Array(shape, array.dtype)
        assert (found.strides, found.nbytes, found.ndim) == (array.strides, array.nbytes, array.ndim)


@pytest.mark.parametrize("count", [1, 2, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS**2 + 1])
def test_merge_reads_every_part_once(count, device):
    made = merge_record(0, count, (2, 3, 8), BF16, np.dtype(np.float32))
    names = [f"{name} {part}" for part in range(count) for name in "olm"]
    done, places = device.run(made, {name: index + 1 for index, name in enumerate(names)}, names)
    read = [int(address) for each in done for name in "olm" for address in each.argument[name] if address]
    assert sorted(address for address in read if address < BASE) == list(range(1, 3 * count + 1))
    outs = [[int(each.argument[name]) for name in ("o_out", "l_out", "m_out")] for each in done]
    assert outs[-1] == places[:3]
    assert sorted(address for address in read if address >= BASE) == sorted(
        address for out in outs[:-1] for address in out
    )
    assert sum(int(each.argument["parts"]) for each in done) == count + len(outs) - 1
    assert done[0].constants["part"] == done[-1].constants["out"] == "__nv_bfloat16"


def test_ticket_is_the_streams_own(device):
    problem, operands, addresses = prepared(LARGE)
    (launch,), _ = device.run(families.record(problem, operands), addresses, forward.INPUTS)
    assert launch.path == "sm90/fwd.cu" and launch.argument["counters"] == TICKET
