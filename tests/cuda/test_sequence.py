"""Launch sequences without a GPU: whatever a kernel is given lies in the call's own memory."""

import contextlib
import dataclasses
import gc
import math
import subprocess
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given

from cuattn.cuda import families, sequence, source, tables
from cuattn.cuda.arguments import Array
from cuattn.cuda.merge import merge_sequence
from cuattn.cuda.params import MAX_PARTS, PARAMS
from tests.cuda.cases import BF16, CASES, Case, case_of
from tests.cuda.nvrtc import compile_log
from tests.cuda.recording import BASE, MASK, TICKET, Launch, Stream, Zeroed, prepared, validated
from tests.cuda.recording import driver as driver
from tests.strategies import cases

SPLIT = Case("split", batch=(1,), heads=8, kv_heads=8, n_queries=1, n_keys=4096)
LARGE = Case("large", heads=80, kv_heads=80, n_queries=256, n_keys=256, options={"is_causal": True})


def pointers(launch):
    """Yield every address in the argument of a launch, with its field."""

    fields = launch.argument.dtype.fields
    for name in fields:
        if fields[name][0].base == np.uint64 and name != "dropout.keys":
            for address in np.ravel(launch.argument[name]):
                yield f"{launch.kernel}: {name}", int(address)


def check_memory(driver, call):
    """Check that a captured call uses its arguments and one piece of memory, and no tables that nothing has written."""
    problem, operands, masks, addresses, state = call
    made = families.launch_sequence(problem, operands, masks)
    done, places = driver.run(made, addresses, masks, state, capturing=True)
    sparse = [mask for mask in masks if mask.kind != "boolean"]
    vectors = range(MASK, MASK + 4 * sum(mask._array.nbytes for mask in sparse))
    written = set(addresses.values()) | {0}
    for each in done:
        if isinstance(each, Zeroed):
            assert each.address >= BASE and each.address + each.size <= driver.end
            continue
        for name, address in pointers(each):
            assert address in written or address in vectors or BASE <= address < driver.end, name
    launches = [each for each in done if isinstance(each, Launch)]
    for number, each in enumerate(launches):
        if "table.cols" in each.argument.dtype.names:
            before = [other.kernel for other in launches[:number]]
            for table in ("bounds", "order"):
                assert not each.argument[f"table.{table}"] or f"mask_{table}" in before, f"nothing wrote {table}"
    if problem.operation == "forward" and math.prod(problem.stat_shape):
        last = launches[-1].argument
        merged = "l_out" in last.dtype.names
        assert places[1:3] == [last[f"{name}_out"] if merged else last[f"{name}.data"] for name in "lm"]


@pytest.mark.parametrize("direction", ["forward", "backward", "deterministic"])
@pytest.mark.parametrize("case", [*CASES, SPLIT, LARGE], ids=lambda case: case.name)
def test_memory_of_the_gpu_cases(case, direction, driver):
    more = {"deterministic": True} if direction == "deterministic" else {}
    check_memory(driver, prepared(case, "forward" if direction == "forward" else "backward", **more))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@given(case=cases(max_length=300, head_dims=(8, 33, 64, 128, 256)))
def test_memory_of_any_call(direction, driver, case):
    arrays, options = case.arguments()
    check_memory(driver, validated(arrays, options, direction))


def test_warm_arguments_differ_in_addresses_alone(driver):
    case = case_of("dropout")
    call = prepared(case)
    made = families.launch_sequence(*call[:3])
    first = driver.run(made, call.addresses, (), call.state)[0][-1].argument
    moved = {name: address + 4096 for name, address in call.addresses.items()}
    second = driver.run(made, moved, (), call.state)[0][-1].argument
    for name in first.dtype.names:
        if name in ("q.data", "k.data", "v.data"):
            assert second[name] == first[name] + 4096
        else:
            assert second[name].tobytes() == first[name].tobytes()


def test_arrays_have_the_strides_of_contiguous_ones():
    for shape in ((), (3,), (2, 3, 5), (4, 1, 0, 7)[:2]):
        array = np.empty(shape, np.float32)
        found = Array(shape, array.dtype)
        assert (found.strides, found.nbytes, found.size) == (array.strides, array.nbytes, array.size)


@pytest.mark.parametrize("count", [1, 2, MAX_PARTS, MAX_PARTS + 1, MAX_PARTS**2 + 1])
def test_merge_reads_every_part_once(count, driver):
    made = merge_sequence(0, count, (2, 3, 8), BF16, np.dtype(np.float32))
    names = [f"{name} {part}" for part in range(count) for name in "olm"]
    done, places = driver.run(made, {name: index + 1 for index, name in enumerate(names)})
    read = [int(address) for each in done for name in "olm" for address in each.argument[name] if address]
    assert sorted(address for address in read if address < BASE) == list(range(1, 3 * count + 1))
    outs = [[int(each.argument[name]) for name in ("o_out", "l_out", "m_out")] for each in done]
    assert outs[-1] == places[:3]
    assert sorted(address for address in read if address >= BASE) == sorted(
        address for out in outs[:-1] for address in out
    )
    assert sum(int(each.argument["parts"]) for each in done) == count + len(outs) - 1
    assert done[0].constants["part"] == done[-1].constants["out"] == "__nv_bfloat16"


def test_counters_are_the_streams_own(driver):
    call = prepared(LARGE)
    (launch,), _ = driver.run(families.launch_sequence(*call[:3]), call.addresses)
    assert launch.path == "sm90/fwd.cu" and launch.argument["counters"] == TICKET


def test_a_place_is_a_launch_argument(driver):
    """The whole after a part has the arguments that it had before."""
    call = prepared(case_of("dropout causal"))
    made = families.launch_sequence(*call[:3])

    def argument(place=None):
        return driver.run(made, call.addresses, (), call.state, place)[0][-1].argument

    before = argument()
    part = argument(call.problem.place._replace(batch=2, head=1, heads=9, row=64, key=32, shift=32))
    assert [int(part[f"dropout.{name}"]) for name in ("batch", "head", "heads", "row", "key")] == [2, 1, 9, 64, 32]
    assert part["band_right"] == before["band_right"] + 32
    after = argument()
    for name in PARAMS.names:
        assert after[name].tobytes() == before[name].tobytes(), name


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_tables_of_a_part_are_of_its_band(operation, driver):
    """A key that the band shows to no row of the whole may be alive in a part."""
    call = prepared(case_of("column d64 causal"), operation)
    made = families.launch_sequence(*call[:3])
    for shift in (0, -64, 32):
        place = call.problem.place._replace(shift=shift)
        done, _ = driver.run(made, call.addresses, call.masks, call.state, place, capturing=True)
        launches = [each for each in done if isinstance(each, Launch) and "band_right" in each.argument.dtype.names]
        assert any("mask" in each.path for each in launches)
        assert {int(each.argument["band_right"]) for each in launches if "preprocess" not in each.path} == {shift}


def test_places_of_runs_are_copied_once_and_held_by_a_graph(driver, monkeypatch):
    uploads = []

    def upload(array, device):
        uploads.append(SimpleNamespace(content=array.tolist(), data=SimpleNamespace(ptr=1 << 20)))
        return uploads[-1]

    monkeypatch.setattr(sequence, "upload", upload)
    sequence._uploaded.cache_clear()
    call = prepared(case_of("dropout"))
    made = families.launch_sequence(dataclasses.replace(call.problem, runs=True), *call[1:3])
    place = call.problem.place._replace(row_blocks=np.array([0, 16, 64], np.int32))
    for _ in range(2):
        (*_, launch), _ = driver.run(made, call.addresses, (), call.state, place, capturing=True)
    assert launch.constants["runs"] and launch.argument["dropout.row_blocks"] == 1 << 20
    assert launch.argument["dropout.key_blocks"] == 0
    assert [each.content for each in uploads] == [[0, 16, 64]] and uploads[0] in driver.held
    sequence._uploaded.cache_clear()


def test_a_graph_holds_tables_that_a_mask_keeps(driver):
    case = case_of("column")
    call = prepared(case)
    made = families.launch_sequence(*call[:3])
    kept = SimpleNamespace(addresses=[0] * len(made._tables[0].slots), home=None, use=lambda stream: None)
    for table in made._tables:
        table.find = lambda *_: kept
    driver.run(made, call.addresses, call.masks, capturing=True)
    assert kept in driver.held[0].tables


def test_calls_of_one_mask_share_its_tables(driver, monkeypatch):
    """They are made once for each place and tile; a stream that did not write them waits, and all die with the mask."""
    made, waiting = [], []

    class Kept:
        def __init__(self, table, masks, shift, stream):
            self.home, first = stream, 1000 * len(made)
            self.addresses = [*range(first, first + len(table.slots))]
            made.append(weakref.ref(self))

        def use(self, stream):
            waiting.append(stream)

    monkeypatch.setattr(tables.MaskTables, "_make", lambda *given: Kept(*given))
    call = prepared(case_of("column"))
    sequences, stream = [families.launch_sequence(*call[:3]) for _ in range(2)], Stream()
    for made_for in sequences:
        for _ in range(2):
            kept = made_for._kept(call.masks, 0, stream, False, {})
            assert kept.addresses == [address for table in kept.tables for address in table.addresses]
            assert {one() for one in made} == {*kept.tables}
    before = len(made)
    assert not waiting and sequences[0]._kept(call.masks, 0, Stream(), True, {}).tables == kept.tables
    assert len(waiting) == before
    assert sequences[0]._kept(call.masks, 3, stream, True, {}) is None
    assert sequences[0]._kept(call.masks, 3, stream, False, {}) and len(made) == 2 * before
    del kept, call
    gc.collect()
    assert not any(one() for one in made)


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
@pytest.mark.parametrize("case", [SPLIT, LARGE], ids=lambda case: case.name)
def test_statistics_that_nobody_asks_for_are_not_made(case, kernel, driver):
    call = prepared(case, kernel=kernel, statistics=False)
    made = families.launch_sequence(*call[:3])
    assert list(made.results) == ["o"]
    (*_, last), _ = driver.run(made, call.addresses)
    if "o_out" in last.argument.dtype.names:
        assert last.argument["l_out"] == last.argument["m_out"] == 0
    else:
        assert last.argument["l.data"] == last.argument["m.data"] == 0 and not last.constants["statistics"]


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_cotangent_of_lse_reaches_the_preprocess(kernel, driver):
    for asked in (False, True):
        call = prepared(LARGE, "backward", kernel=kernel, dlse=asked)
        made = families.launch_sequence(*call[:3])
        first, *_ = driver.run(made, call.addresses)[0]
        assert first.kernel == "backward_preprocess"
        assert first.argument["dlse.data"] == call.addresses.get("dlse", 0)
        assert bool(first.argument["dlse.data"]) == asked


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("operation", ["backward", "backward_jvp"])
def test_values_without_columns_leave_the_cotangent_of_lse(operation, dtype, driver):
    case = LARGE._replace(dtype=np.dtype(dtype), head_dim_v=0)
    for asked in (False, True):
        call = prepared(case, operation, dlse=asked)
        done, _ = driver.run(families.launch_sequence(*call[:3]), call.addresses)
        launches = [each for each in done if isinstance(each, Launch)]
        assert bool(launches) == asked
        for launch in launches:
            assert all(launch.grid)
            if "attention" in launch.kernel:
                assert launch.argument["v.data"] == launch.argument["k.data"] == call.addresses["k"]
            compile_log(source.build(launch.path, launch.constants), "sm_90", launch.path)


@pytest.mark.parametrize("name", ["bias row", "d64", "float32 d64", "grouped"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_may_stay_unrounded(name, deterministic, driver):
    case = case_of(name)
    call = prepared(case, "backward", kernel="sm80", out_dtype=np.float32, deterministic=deterministic)
    made = families.launch_sequence(*call[:3])
    assert {array.dtype for array in made.results.values()} == {np.dtype(np.float32)}
    done = driver.run(made, call.addresses)[0]
    assert {each.constants["grad"] for each in done if "grad" in each.constants} == {"float"}


@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_what_is_launched_beside_the_large_kernels_compiles(kernel, driver):
    """A kernel is told only some of a problem's constants, so that few variants of it are compiled."""
    wide = LARGE._replace(head_dim=256)
    broadcast = SPLIT._replace(kv_heads=1, n_queries=300)
    calls = [prepared(case, "backward", kernel=kernel) for case in (LARGE, LARGE._replace(head_dim=128), wide)]
    calls.append(prepared(LARGE, "backward", kernel=kernel, out_dtype=np.float32, dlse=True))
    names = ("column", "blocks", "dense", "bias row", "float64 bias") if kernel == "sm80" else ("column", "blocks")
    cases = [case_of(name) for name in names]
    calls += [prepared(case, operation, kernel=kernel) for case in cases for operation in ("forward", "backward")]
    if kernel == "sm80":
        calls += [prepared(SPLIT._replace(n_queries=100, n_keys=65536), kernel=kernel)]
        calls += [prepared(broadcast, "backward", kernel=kernel, deterministic=True)]
    found = set()
    for call in calls:
        done = driver.run(families.launch_sequence(*call[:3]), call.addresses, call.masks, call.state, capturing=True)[
            0
        ]
        small = [each for each in done if isinstance(each, Launch) and ("util" in each.path or "convert" in each.path)]
        found |= {(each.path, tuple(each.constants.items())) for each in small}
    assert len({path for path, _ in found}) >= (6 if kernel == "sm80" else 4)
    for path, constants in sorted(found, key=str):
        compile_log(source.build(path, dict(constants)), "sm_90", path)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("q", "k", "v", "strides"),
    [
        ((4, 1, 1, 5, 16), (4, 3, 1, 6, 16), (1, 1, 1, 6, 16), (0, 0, 0, 16, 1)),  # one row of q, handed out 4 times
        ((2, 3, 1, 5, 16), (2, 3, 2, 6, 16), (2, 3, 1, 6, 16), None),
        ((2, 1, 2, 5, 16), (2, 3, 2, 6, 16), (1, 3, 2, 6, 16), None),
        ((2, 3, 2, 5, 16), (1, 1, 1, 6, 16), (2, 1, 1, 6, 16), None),
    ],
)
def test_gradients_are_summed_over_broadcast_axes_alone(q, k, v, strides, deterministic, driver):
    shapes = {"dq": q, "dk": k, "dv": v}
    arrays = [np.ones(shape, np.float32) for shape in shapes.values()]
    if strides:
        arrays[0] = np.lib.stride_tricks.as_strided(arrays[0], q, [4 * step for step in strides])
    call = validated(arrays, {"kernel": "sm80"}, "backward", deterministic=deterministic)
    made = families.launch_sequence(call.problem, call.operands, call.masks)
    launches, _ = driver.run(made, call.addresses, call.masks)
    sums = [launch.argument for launch in launches if getattr(launch, "kernel", "") == "backward_sum"]
    for argument in sums:
        kept = [n for n, keep in zip(argument["size"], argument["keep"], strict=True) if keep]
        assert argument["results"] == np.prod(kept, dtype=int) * argument["inner"]
    whole = np.broadcast_shapes(*(shape[:-2] for shape in shapes.values()))
    partial = {name for name, shape in shapes.items() if shape[:-2] != whole}
    assert len(sums) == len(partial - ({"dq"} if not deterministic else set()))  # else dq is added up in memory


AT_THE_END = """
import ctypes, keyword
from types import SimpleNamespace as N
from cuattn.cuda import tables
tables.Ready = lambda stream: N(wait=lambda stream: None)
for module in (keyword, tables):  # they live until all modules are cleared, this one first
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
keyword.kept = tables.Kept([], (), N(ptr=1), 0)
keyword.kept.use(N(ptr=2))
"""


def test_tables_that_outlive_the_interpreters_modules_end_quietly():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_memory_of_tables_goes_back_behind_the_work_of_all_that_read_them(monkeypatch):
    events = []
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda number: contextlib.nullcontext()))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(tables, "Ready", lambda stream: SimpleNamespace(wait=lambda stream: None))
    home = SimpleNamespace(ptr=1, wait_event=events.append)
    kept = tables.Kept([], (), home, 0)
    kept.use(home)
    for number in (2, 3):
        kept.use(SimpleNamespace(ptr=number, record=lambda number=number: number))
    assert not events
    del kept
    assert events == [2, 3]
