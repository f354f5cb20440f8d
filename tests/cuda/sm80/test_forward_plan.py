"""Plans on every kind of GPU: they print, fit it, and refuse by name."""

import dataclasses

import numpy as np
import pytest

from cuattn.cuda import call as base
from cuattn.cuda.device import Device
from cuattn.cuda.families import launch_sequence, plan
from cuattn.cuda.sm80.forward import Cut, unsupported_reason
from cuattn.errors import UnsupportedError
from cuattn.problem import OPERATIONS, Options, check
from tests.cuda.cases import BF16, CASES, Case, case_of
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
    cut = Cut(problem_of(case), device)
    assert cut.shared_bytes + STATIC_BYTES <= device.shared_bytes
    assert cut.tile.block_m % (16 * cut.tile.warps) == 0 and cut.tile.block_n % 16 == 0
    assert cut.splits * cut.teams * cut.split_tiles >= cut.key_tiles
    assert (cut.splits - 1) * cut.teams * cut.split_tiles < max(cut.key_tiles, 1)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
def test_mask_kind_does_not_change_key_tiles(device):
    column = case_of("column")
    problem = problem_of(column)
    dense = dataclasses.replace(problem, masks=("boolean",))
    assert Cut(problem, device).tile.block_n == Cut(dense, device).tile.block_n


def test_decode_fills_the_device():
    problem = shaped(heads=32, kv_heads=8, n_keys=65536, head_dim=128)
    cut = Cut(problem, DEVICES["H200"])
    assert cut.pack == 4
    assert 8 * cut.row_tiles * cut.splits * cut.tile.warps * cut.teams >= 3 * 132  # warps


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
    cut = Cut(problem, DEVICES["H200"])
    constants = cut.constants(16)
    assert words in cut.notes(16)[0] and constants["split"]
    assert constants["merges"] == (words != "afterwards")
    assert constants["out"] == ("__nv_bfloat16" if constants["merges"] else "float")


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("dtype", "keys"), [(np.float32, 20000), (np.float64, 2000)], ids=["float32", "float64"])
def test_long_sums_move_to_memory(dtype, keys, device):
    for head_dim in (33, 64, 128, 200, 256):
        problem = shaped(np.dtype(dtype), heads=999, n_queries=300, n_keys=keys, head_dim=head_dim)
        cut = Cut(problem, device)
        assert 0 < cut.constants(16)["flush_every"] * cut.tile.block_n <= 2048
        assert cut.shared_bytes + STATIC_BYTES <= device.shared_bytes


def test_long_queries_are_not_split():
    problem = shaped(heads=16, n_queries=4096, n_keys=4096, batch=4)
    assert Cut(problem, DEVICES["H200"]).splits == 1


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256, 384, 500, 512])
def test_every_mask_fits_the_device(head_dim, dtype, device):
    """Also blocks of wide heads, whose tile would take more keys if there were room."""
    for masks in ((), ("column",), ("block",), ("boolean",), ("column", "block", "boolean")):
        for n_queries in (1, 40, 4096):
            problem = shaped(dtype, n_queries=n_queries, n_keys=4096, head_dim=head_dim)
            problem = dataclasses.replace(problem, masks=masks)
            cut = Cut(problem, device)
            if cut.tile is not None:
                assert cut.shared_bytes + STATIC_BYTES <= device.shared_bytes


@pytest.mark.parametrize(
    ("arguments", "words"), [({"head_dim": 513}, "head dimension 513"), ({"n_keys": 2**30}, "k has 1073741824 rows")]
)
def test_reasons_name_the_argument(arguments, words):
    assert words in unsupported_reason(shaped(**arguments))


def test_heads_too_wide_for_the_device(driver, monkeypatch):
    call = prepared(Case("wide", np.dtype(np.float64), head_dim=512), kernel="sm80")
    launch_sequence(*call[:3])
    monkeypatch.setattr(base, "device_of", lambda number: DEVICES["RTX 4090"])
    with pytest.raises(UnsupportedError, match="no kernel does that on this GPU"):
        launch_sequence(*call[:3])


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("name", ["d64", "one query", "dropout", "bias", "d 512"])
def test_plans_print(operation, name, driver):
    call = prepared(case_of(name), operation, kernel="sm80")
    made = plan(*call[:3])
    assert made.direction == operation and f"{made.block_m} query rows" in str(made) and "sm_90" in str(made)


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("shapes", [((0, 9, 16), (9, 16)), ((0, 9, 16), (0, 9, 16)), ((2, 0, 9, 16), (1, 9, 16))])
def test_no_heads_at_all(operation, shapes, driver):
    q, k = (np.zeros(shape, BF16) for shape in shapes)
    call = validated([q, k, k], {"window": (3, 2)}, operation)
    assert call.problem.group == 1
    driver.run(launch_sequence(*call[:3]), call.addresses)
