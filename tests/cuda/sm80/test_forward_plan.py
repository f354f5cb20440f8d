"""Plans on every kind of GPU: they print, fit it, and refuse by name."""

import dataclasses

import numpy as np
import pytest

from cuattn.cuda.device import Device
from cuattn.cuda.families import launch_sequence
from cuattn.cuda.sm80.forward_plan import cut, forward_plan, grid_of, tile_reason, unsupported_reason
from cuattn.problem import OPERATIONS, Options, check
from tests.cuda.cases import BF16, CASES, Case
from tests.cuda.recording import driver as driver
from tests.cuda.recording import prepared, validated

DEVICES = {
    "A100": Device("sm_80", 108, 166912, 40 << 20),
    "RTX 4090": Device("sm_89", 128, 101376, 72 << 20),
    "H200": Device("sm_90", 132, 232448, 60 << 20),
    "RTX 5090": Device("sm_120", 170, 101376, 96 << 20),
}
STATIC_BYTES = 1024  # room for what the kernel declares itself


def problem_of(case: Case, operation: str = "forward", **more):
    """Return the problem of a case."""
    return prepared(case, operation, **more).problem


def shaped(dtype=BF16, heads=1, kv_heads=None, n_queries=1, n_keys=1, head_dim=64, batch=1, masks=(), **options):
    """Return a problem of arrays that take no memory."""
    kv_heads = kv_heads or heads
    row = np.zeros(head_dim, dtype)
    q = np.broadcast_to(row, (batch, heads, n_queries, head_dim))
    k = np.broadcast_to(row, (batch, kv_heads, n_keys, head_dim))
    options = Options(enable_gqa=kv_heads != heads, **options)
    return check(OPERATIONS["forward"], {"q": q, "k": k, "v": k}, masks, options)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fits_the_card(case, device):
    problem = problem_of(case)
    plan = forward_plan(problem, device)
    assert plan.smem_bytes + STATIC_BYTES <= device.shared_bytes
    teams = dict(plan.constants)["teams"]
    assert plan.block_m * teams % (16 * plan.workers) == 0 and plan.block_n % 16 == 0
    grid = grid_of(problem, cut(problem, device), device)
    assert grid.splits * teams * grid.split_tiles >= grid.key_tiles
    assert (grid.splits - 1) * teams * grid.split_tiles < max(grid.key_tiles, 1)
    assert str(plan.block_m) in str(plan) and device.arch in str(plan)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_mask_kind_does_not_change_key_tiles(device):
    column = next(case for case in CASES if case.name == "column")
    problem = problem_of(column)
    dense = dataclasses.replace(problem, masks=("boolean",))
    assert forward_plan(problem, device).block_n == forward_plan(dense, device).block_n


def test_decode_fills_the_device():
    problem = shaped(heads=32, kv_heads=8, n_keys=65536, head_dim=128)
    plan = forward_plan(problem, DEVICES["H200"])
    grid = grid_of(problem, cut(problem, DEVICES["H200"]), DEVICES["H200"])
    assert dict(plan.constants)["pack"] == 4
    assert 8 * grid.row_tiles * grid.splits * plan.workers >= 3 * 132  # warps


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"heads": 32, "kv_heads": 8, "n_keys": 65536}, "by the last block"),
        ({"batch": 4, "heads": 32, "kv_heads": 8, "n_keys": 8192}, "by the last block"),
        ({"n_queries": 100, "n_keys": 65536}, "afterwards"),
    ],
)
def test_parts_of_few_rows_are_merged_without_a_second_kernel(sizes, words):
    problem = shaped(head_dim=128, **sizes)
    plan = forward_plan(problem, DEVICES["H200"])
    constants = dict(plan.constants)
    assert words in str(plan) and constants["split"]
    assert constants["merges"] == (words != "afterwards")
    assert constants["out"] == ("__nv_bfloat16" if constants["merges"] else "float")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("dtype", "keys"), [(np.float32, 20000), (np.float64, 2000)], ids=["float32", "float64"])
def test_long_sums_move_to_memory(dtype, keys, device):
    for head_dim in (33, 64, 128, 200, 256):
        problem = shaped(np.dtype(dtype), heads=999, n_queries=300, n_keys=keys, head_dim=head_dim)
        plan = forward_plan(problem, device)
        assert 0 < dict(plan.constants)["flush_every"] * plan.block_n <= 2048
        assert plan.smem_bytes + STATIC_BYTES <= device.shared_bytes


def test_long_queries_are_not_split():
    problem = shaped(heads=16, n_queries=4096, n_keys=4096, batch=4)
    assert grid_of(problem, cut(problem, DEVICES["H200"]), DEVICES["H200"]).splits == 1


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 384, 500, 512])
def test_every_mask_fits_the_device(head_dim, dtype, device):
    """Also blocks of wide heads, whose tile would take more keys if there were room."""
    for masks in ((), ("column",), ("block",), ("boolean",), ("column", "block", "boolean")):
        for n_queries in (1, 40, 4096):
            problem = shaped(dtype, n_queries=n_queries, n_keys=4096, head_dim=head_dim)
            problem = dataclasses.replace(problem, masks=masks)
            if tile_reason(problem, device) is None:
                assert forward_plan(problem, device).smem_bytes + STATIC_BYTES <= device.shared_bytes


@pytest.mark.parametrize(
    ("arguments", "words"), [({"head_dim": 513}, "head dimension 513"), ({"n_keys": 2**30}, "k has 1073741824 rows")]
)
def test_reasons_name_the_argument(arguments, words):
    assert words in unsupported_reason(shaped(**arguments), DEVICES["RTX 4090"])


def test_heads_too_wide_for_the_device():
    assert "no kernel does that" in tile_reason(shaped(np.float64, head_dim=512), DEVICES["RTX 4090"])
    assert tile_reason(shaped(np.float64, head_dim=512), DEVICES["H200"]) is None


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("shapes", [((0, 9, 16), (9, 16)), ((0, 9, 16), (0, 9, 16)), ((2, 0, 9, 16), (1, 9, 16))])
def test_no_heads_at_all(operation, shapes, driver):
    q, k = (np.zeros(shape, BF16) for shape in shapes)
    call = validated([q, k, k], {"window": (3, 2)}, operation)
    assert call.problem.group == 1
    driver.run(launch_sequence(*call[:3]), call.addresses)
