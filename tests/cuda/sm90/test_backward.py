"""What Hopper's backward launches, without a GPU."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cuattn import masks
from cuattn.cuda import families
from cuattn.cuda.sm80.backward import Backward as PortableBackward
from cuattn.cuda.sm90.backward import Backward, Cut
from cuattn.errors import UnsupportedError
from cuattn.problem import Band
from tests.cuda.cases import BF16
from tests.cuda.recording import array, operands, sequence_of
from tests.cuda.recording import driver as driver
from tests.cuda.sm90.test_backward_plan import problem
from tests.cuda.sm90.test_forward_plan import CAUSAL

pytestmark = pytest.mark.usefixtures("driver")


def launched(driver, p, taken, masks=(), **more):
    assert Backward(p, taken, masks).unsupported_reason() is None
    return driver.run(sequence_of(Backward(p, taken, masks)), {"q": 1, "k": 2, "v": 3}, masks, **more)[0]


def test_one_kernel_and_its_neighbours(driver):
    p = problem(n_queries=1000, band=CAUSAL)
    preprocess, keys, convert = launched(driver, p, operands(p))
    assert (keys.path, keys.grid, keys.block) == ("sm90/bwd.cu", (132,), (384,))
    assert preprocess.grid == (8 * 16 * 2,) and convert.grid == (16 * 16 * 2,)
    made = keys.argument
    assert (made["row_tiles"], made["key_tiles"], made["section"]) == (16, 32, 32)
    assert list(made["dk.batch"]) == [0, 0, 0, 16 * 4096 * 128] and made["dq.head"] == 1000 * 128
    assert made["dq_acc"] == preprocess.argument["dq_acc"] == convert.argument["dq_acc"] != 0
    assert made["ticket"] and not made["turns"]


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
def test_query_heads_of_one_key_head_are_dealt_out(driver, head_dim, deterministic):
    p = problem(
        head_dim, batch=(), heads=48, kv_heads=1, n_queries=1024, n_keys=1024, band=CAUSAL, deterministic=deterministic
    )
    cut = Backward(p, operands(p), ()).cut
    done = {each.path: each for each in launched(driver, p, operands(p))}
    last = "sm90/bwd_convert.cu" if cut.fused else "sm90/bwd_add_parts.cu"
    keys, add = done["sm90/bwd.cu"].argument, done[last].argument
    assert cut.parts > 1 and (keys["kv_heads"], keys["group"], keys["splits"]) == (
        cut.parts,
        48 // cut.parts,
        cut.parts,
    )
    stored = cut.parts if deterministic else 1
    assert (add["kv_heads"], add["splits"], done["sm90/bwd.cu"].grid) == (1, stored, (132,))
    for name, place in (("dk", "dk_acc"), ("dv", "dv_acc")):
        assert keys[place] == add[place] != 0 and add[f"{name}.data"]
    made = [each.constants["grad"] for each in done.values() if "grad" in each.constants]
    assert sorted({*made}) == ["__nv_bfloat16", "float"] and done["sm90/bwd.cu"].constants["grad"] == "float"
    others = [each for path, each in done.items() if path not in ("sm90/bwd.cu", last)]
    assert all((each.argument["kv_heads"], each.argument["group"]) == (1, 48) for each in others)
    assert all(size > 0 for size in driver.sizes)


def test_slices_of_few_heads_rows(driver):
    p = problem(64, batch=(), heads=1, kv_heads=1)
    _, keys, add = launched(driver, p, operands(p))
    made = keys.argument
    assert (made["kv_heads"], made["group"], made["splits"], made["split_tiles"]) == (4, 1, 4, 4)
    assert (add.argument["kv_heads"], add.argument["splits"]) == (1, 1) and keys.grid == (128,)


def test_parts_have_room(driver):
    p = problem(batch=(2,), heads=12, kv_heads=2, n_queries=500, n_keys=333, head_dim_v=64, deterministic=True)
    call = Backward(p, operands(p), ())
    scratch = call.cut.scratch(24)
    assert scratch["dk_acc"].shape == (4 * call.cut.parts, 333, 128) and scratch["dv_acc"].shape[-1] == 64


def test_views(driver):
    p = problem(kv_heads=4, n_queries=1000)
    _, keys, _ = launched(driver, p, operands(p, swap=True))
    q, k, _, do, dk, _ = (tuple(described) for described in keys.maps)
    assert q == do == ((2, 16, 1000, 128), (1000 * 16 * 256, 256, 16 * 256), 64)
    assert k == ((2, 4, 4096, 128), (4096 * 4 * 256, 256, 4 * 256), 128)
    assert dk == ((2, 4, 4096, 128), (4 * 4096 * 256, 4096 * 256, 256), 64)


def test_wide_heads_take_two_kernels_with_tables_of_their_own(driver):
    p = problem(256, masks=("column",))
    done = launched(driver, p, operands(p), (masks.causal(4096),), capturing=True)
    preprocess, keys, rows = [each for each in done if "mask" not in getattr(each, "path", "mask")]
    assert not preprocess.constants["atomic_dq"] and not keys.argument["dq_acc"]
    assert (rows.path, rows.constants["v_stages"]) == ("sm90/bwd_rows.cu", 2)
    assert keys.argument["table.bounds"] != rows.argument["table.bounds"]


@pytest.mark.parametrize("band", [None, CAUSAL])
def test_wide_heads_keep_slabs_of_ds(driver, band):
    p = problem(256, batch=(), heads=8, kv_heads=8, n_queries=16384, n_keys=16384, band=band)
    _, *done = launched(driver, p, operands(p))
    keys, rows = done[::2], done[1::2]
    assert {each.path for each in keys} == {"sm90/bwd.cu"} and {each.path for each in rows} == {"sm90/bwd_dq.cu"}
    fields = "shared_key", "shared_tile", "splits", "split_tiles", "dq_acc", "dbias_acc"
    cut = [tuple(int(each.argument[name]) for name in fields) for each in keys]
    assert cut == [tuple(int(each.argument[name]) for name in fields) for each in rows]
    # Each head's tiles once, the last first, in an order that both kernels' queues can follow.
    tiles = [(head, tile) for first, end, at, n, *_ in cut for head in range(first, end) for tile in range(at, at + n)]
    assert sorted(tiles) == [(head, tile) for head in range(8) for tile in range(256)]
    assert all(a[2] > b[2] for a, b in pairwise(cut) if a[0] == b[0])
    for each in done:
        first, end, section = (int(each.argument[name]) for name in ("shared_key", "shared_tile", "section"))
        assert first % section == 0 and (end - first) % section == 0


@pytest.mark.parametrize("n", [1024, 4096, 16384, 1 << 20])
@pytest.mark.parametrize("head_dim", [136, 192, 256])
def test_slabs_take_a_multiple_of_qs_memory(driver, head_dim, n):
    p = problem(head_dim, batch=(), heads=8, kv_heads=4, n_queries=n, n_keys=n)
    cut = Backward(p, operands(p), ()).cut
    scratch = cut.scratch(8)
    most = 8 * n * head_dim * 2 * 8
    assert scratch["dbias_acc"].nbytes <= most if cut.kept else "dbias_acc" not in scratch


def test_what_keeps_no_ds(driver):
    p = problem(256, batch=(2,), heads=16, n_queries=4096, n_keys=4096)
    others = {"dropout": 6554}, {"softcap": 3.0}, {"masks": ("column",)}, {"placed": True}
    others += {"band": Band(0, 0, 0), "n_keys": 5000}, {"head_dim": 192, "head_dim_v": 128}
    assert Cut(p).kept and not any(Cut(replace(p, **other)).kept for other in others)


def test_turns(driver):
    p = problem(deterministic=True)
    _, keys, _ = launched(driver, p, operands(p))
    assert keys.constants["deterministic"] and keys.argument["turns"]


def test_a_block_holds_dq_of_few_rows(driver):
    p = problem(32, batch=(256,), heads=4, kv_heads=4, n_queries=256, n_keys=300, deterministic=True)
    preprocess, keys = launched(driver, p, operands(p))
    assert keys.constants["dq_tiles"] == 2 and keys.argument["section"] == 1 and not keys.argument["turns"]
    assert not preprocess.constants["atomic_dq"] and not keys.argument["dq_acc"] and keys.argument["dq.data"]
    wide = replace(p, head_dim=64, head_dim_v=64)
    assert len(launched(driver, wide, operands(wide))) == 2
    shared = {**operands(p), "q": array((1, 4, 256, 32))}
    assert not Backward(replace(p, deterministic=False), shared, ()).cut.dq_tiles


@pytest.mark.parametrize(
    "changes", [{}, {"kv_heads": 4}, {"n_queries": 128, "n_keys": 128, "band": CAUSAL}, {"deterministic": True}]
)
def test_dq_leaves_at_once_where_there_is_one_key_tile(driver, changes):
    p = replace(problem(128, n_queries=500, n_keys=77), **changes)
    preprocess, *done = launched(driver, p, operands(p))
    assert not any(each.argument["dq_acc"] or "convert" in each.path for each in (preprocess, *done))
    assert done[0].argument["dq.data"] and not done[0].constants["dq_tiles"]


@pytest.mark.parametrize(
    "changes",
    [
        {"band": Band(None, 0, -9)},
        {"band": CAUSAL, "placed": True},
        {"out_dtype": np.dtype(np.float32)},
        {"masks": ("column",)},
    ],
)
def test_dq_is_added_up_where_rows_may_see_nothing_or_stay_unrounded(driver, changes):
    p = replace(problem(n_queries=500, n_keys=77), **changes)
    assert Backward(p, operands(p), ()).cut.adds_dq


def test_broadcast_queries_share_an_accumulator(driver):
    p = problem()
    taken = {**operands(p), "q": array((1, 16, 4096, 128))}
    _, keys, convert = launched(driver, p, taken)
    assert convert.grid == (64 * 16,) and not keys.argument["dq.batch"].any()
    assert "q is a sum" in Backward(problem(256), taken, ()).unsupported_reason()


def biased(driver, shape, **changes):
    p = problem(bias=BF16, **changes)
    return launched(driver, p, {**operands(p), "bias": array(shape)})


def test_a_bias_of_its_own_and_its_gradient_travel_in_tiles(driver):
    preprocess, keys, _ = biased(driver, (2, 16, 4096, 4096), band=CAUSAL)
    bias, dbias = keys.maps[-2:]
    assert keys.path == "sm90/bwd_bias.cu" and tuple(bias) == tuple(dbias)
    assert tuple(bias) == ((2, 16, 4096, 4096), (16 * 4096 * 8192, 4096 * 8192, 8192), 64)
    assert preprocess.argument["bias_instances"] == 32 and preprocess.argument["dbias.data"]


def test_a_pass_over_pairs_of_tiles_sums_a_shared_bias(driver):
    _, keys, made, _ = biased(driver, (1, 16, 4096, 4096))
    assert keys.constants["split_delta"] and keys.path == "sm90/bwd_bias.cu"
    assert (made.path, made.grid, made.block) == ("sm90/bwd_dbias.cu", (132,), (640,))
    assert (made.argument["splits"], made.argument["row_tiles"], made.argument["key_tiles"]) == (1, 32, 32)
    assert not made.constants["split"] and not made.argument["dbias_acc"] and made.argument["dbias.data"]
    assert [tuple(described)[-1] for described in made.maps] == [128] * 4


def test_heads_that_share_a_small_bias_are_dealt_out(driver):
    done = biased(driver, (1, 4, 256, 256), batch=(256,), heads=4, kv_heads=4, n_queries=256, n_keys=256)
    made, add = done[2:4]
    assert (made.path, made.grid, made.constants["split"]) == ("sm90/bwd_dbias.cu", (16 * 8,), True)
    assert (add.path, add.argument["size"][0], add.argument["inner"]) == ("util/bwd_sum.cu", 8, 4 << 16)
    assert made.argument["dbias_acc"] == add.argument["in"] != 0 and made.argument["bias_instances"] == 4


def test_a_key_bias_is_summed_by_key_tiles(driver):
    _, keys, add, _ = biased(driver, (2, 1, 1, 4096), kv_heads=4)
    assert keys.path == "sm90/bwd.cu" and len(keys.maps) == 6
    assert (add.path, list(add.argument["keep"]), add.argument["inner"]) == (
        "util/bwd_sum.cu", [True, True, True, True, False], 4096
    )  # fmt: skip


def test_a_pass_sums_along_rows_and_keys(driver):
    for shape, sums, tiles in (((2, 16, 4096, 1), (False, True), 32), ((1, 1, 1, 1), (True, True), 1)):
        made = next(each for each in biased(driver, shape, kv_heads=4) if each.path == "sm90/bwd_dbias.cu")
        assert (made.constants["sum_rows"], made.constants["sum_keys"]) == sums
        assert made.grid == (tiles * math.prod(shape[:2]) * made.argument["splits"],)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": array((1, 16, 4096, 128))}, "gradient of k is a sum"),
        ({"do": array((2, 16, 4096, 128), address=4098)}, "cannot read do"),
    ],
)
def test_unfit_arrays(changes, words):
    p = problem()
    assert words in Backward(p, {**operands(p), **changes}, ()).unsupported_reason()


@pytest.mark.parametrize(
    ("changes", "taken"),
    [
        ({}, True),
        ({"deterministic": True}, True),
        ({"head_dim": 64, "head_dim_v": 64}, True),
        ({"head_dim": 64, "head_dim_v": 64, "deterministic": True}, True),
        ({"batch": (64,)}, False),
        ({"n_queries": 64, "n_keys": 64}, False),
        ({"n_queries": 49, "n_keys": 49, "deterministic": True}, True),
        ({"n_queries": 32, "n_keys": 32, "deterministic": True}, False),
        ({"softcap": 3.0}, False),
    ],
)
def test_many_heads_may_be_short(driver, changes, taken):
    p = problem(32, batch=(512,), heads=4, kv_heads=4, n_queries=70, n_keys=70)
    p = replace(p, **changes)
    assert (Backward(p, operands(p), ()).unsupported_reason() is None) == taken


def test_gradients_unrounded(driver):
    p = problem(out_dtype=np.dtype(np.float32))
    assert Backward(p, operands(p), ()).unsupported_reason() is None
    _, keys, convert = launched(driver, p, operands(p))
    assert keys.constants["grad"] == convert.constants["grad"] == "float"


def test_choice():
    p = problem()
    assert type(families._choose(p, operands(p), ())[0]) is Backward
    planned = {name: array for name, array in operands(p).items() if name in "qkv"}
    assert type(families._choose(p, planned, ())[0]) is Backward
    call, _, notes = families._choose(problem(kernel="sm80"), operands(p), ())
    assert type(call) is PortableBackward and notes == ["not the sm90 kernel: kernel is 'sm80'"]
    short = problem(n_queries=100, n_keys=100)
    assert "fewer than its tiles" in families._choose(short, operands(short), ())[-1][0]
    for n, kernel in ((64, PortableBackward), (65, Backward)):  # of 64 one of the portable kernel's tiles holds all
        many = problem(32, batch=(512,), n_queries=n, n_keys=n)
        assert type(families._choose(many, operands(many), ())[0]) is kernel
    short = problem(n_queries=100, n_keys=100, kernel="sm90")
    assert type(families._choose(short, operands(short), ())[0]) is Backward
    wide = problem(264, kernel="sm90")
    with pytest.raises(UnsupportedError, match="'sm90', but it takes head dimensions up to 256"):
        families._choose(wide, operands(wide), ())
