"""Plans on every kind of card: they print, fit the card, and refuse by name."""

import numpy as np
import pytest

from cuattn.cuda.sm80.forward_plan import forward_plan, grid_of
from cuattn.cuda.sm80.tiles import Card
from cuattn.errors import UnsupportedError
from cuattn.problem import validate
from tests.cuda.cases import BF16, CASES, Case

CARDS = {
    "A100": Card("sm_80", 108, 166912, 40 << 20),
    "RTX 4090": Card("sm_89", 128, 101376, 72 << 20),
    "H200": Card("sm_90", 132, 232448, 60 << 20),
    "RTX 5090": Card("sm_120", 170, 101376, 96 << 20),
}
STATIC_BYTES = 1024  # room for what the kernel declares itself


def problem_of(case: Case):
    arrays, options = case.arrays()
    return validate("forward", *arrays.values(), **options)[0]


def shaped(dtype=BF16, heads=1, kv_heads=None, n_queries=1, n_keys=1, head_dim=64, batch=1, **options):
    """Return a problem of arrays that take no memory."""
    kv_heads = kv_heads or heads
    row = np.zeros(head_dim, dtype)
    q = np.broadcast_to(row, (batch, heads, n_queries, head_dim))
    k = np.broadcast_to(row, (batch, kv_heads, n_keys, head_dim))
    return validate("forward", q, k, k, enable_gqa=kv_heads != heads, **options)[0]


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fits_the_card(case, card):
    problem = problem_of(case)
    plan = forward_plan(problem, card)
    assert plan.smem_bytes + STATIC_BYTES <= card.shared_bytes
    teams = dict(plan.constants)["teams"]
    assert plan.block_m * teams % (16 * plan.workers) == 0 and plan.block_n % 16 == 0
    counts = grid_of(problem, plan, card)
    assert counts["splits"] * teams * counts["split_tiles"] >= counts["key_tiles"]
    assert (counts["splits"] - 1) * teams * counts["split_tiles"] < max(counts["key_tiles"], 1)
    assert str(plan.block_m) in str(plan) and card.arch in str(plan)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_mask_kind_does_not_change_key_tiles(card):
    column = next(case for case in CASES if case.name == "column")
    problem = problem_of(column)
    arrays, options = column.arrays()
    dense = validate("forward", *arrays.values(), mask=options["mask"].dense())[0]
    assert forward_plan(problem, card).block_n == forward_plan(dense, card).block_n


def test_decode_fills_the_card():
    problem = shaped(heads=32, kv_heads=8, n_keys=65536, head_dim=128)
    plan = forward_plan(problem, CARDS["H200"])
    counts = grid_of(problem, plan, CARDS["H200"])
    assert dict(plan.constants)["pack"] == 4
    assert 8 * counts["row_tiles"] * counts["splits"] * plan.workers >= 3 * 132  # warps
    assert plan.workspace_bytes == counts["splits"] * 32 * (128 + 2) * 4


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
    plan = forward_plan(problem, CARDS["H200"])
    constants = dict(plan.constants)
    assert words in str(plan) and constants["split"]
    assert constants["merges"] == (words != "afterwards")
    assert constants["out"] == ("__nv_bfloat16" if constants["merges"] else "float")


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
@pytest.mark.parametrize(("dtype", "keys"), [(np.float32, 20000), (np.float64, 2000)], ids=["float32", "float64"])
def test_long_sums_move_to_memory(dtype, keys, card):
    for head_dim in (33, 64, 128, 200, 256):
        problem = shaped(np.dtype(dtype), heads=999, n_queries=300, n_keys=keys, head_dim=head_dim)
        plan = forward_plan(problem, card)
        assert 0 < dict(plan.constants)["flush_every"] * plan.block_n <= 2048
        assert plan.smem_bytes + STATIC_BYTES <= card.shared_bytes


def test_long_queries_are_not_split():
    problem = shaped(heads=16, n_queries=4096, n_keys=4096, batch=4)
    assert forward_plan(problem, CARDS["H200"]).workspace_bytes == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"head_dim": 513}, "head dimension 513"),
        ({"n_keys": 2**30}, "k has 1073741824 rows"),
        ({"kernel": "sm90"}, "kernel is 'sm90'"),
    ],
)
def test_refusals_name_the_argument(arguments, match):
    with pytest.raises(UnsupportedError, match=match):
        forward_plan(shaped(**arguments), CARDS["RTX 4090"])
