"""Hopper's plan: what it takes, that every variant compiles without spills and fits in shared memory."""

import itertools

import numpy as np
import pytest

import cuattn.masks.function  # noqa: F401 - its kind is known when it is imported
from cuattn.cuda import source
from cuattn.cuda.arguments import pad
from cuattn.cuda.sm90 import tensor_map
from cuattn.cuda.sm90.backward import Cut as BackwardCut
from cuattn.cuda.sm90.forward import Cut, bias_form, unsupported_reason
from cuattn.problem import DTYPES, Band, Problem
from tests.cuda import scores
from tests.cuda.cases import BF16, F16, Case
from tests.cuda.nvrtc import compile_log, resources
from tests.cuda.recording import H200, array, prepared, scored

ARCH = "sm_90a"
FLOAT32 = np.dtype(np.float32)
CAUSAL = Band(None, 0, 0)


def problem(head_dim=128, head_dim_v=None, **changes) -> Problem:
    values = {
        "operation": "forward", "batch": (2,), "heads": 16, "kv_heads": 16, "n_queries": 4096, "n_keys": 4096,
        "head_dim": head_dim, "head_dim_v": head_dim if head_dim_v is None else head_dim_v, "dtype": BF16,
        "scale": 0.1, "out_dtype": BF16,
    }  # fmt: skip
    return Problem(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": np.dtype(np.float32)}, "float32"),
        ({"head_dim": 264}, "264"),
        ({"head_dim_v": 36}, "36"),
        ({"masks": ("column", "column")}, "column and column"),
        ({"masks": ("block", "boolean")}, "block mask alone"),
        ({"masks": ("column", "boolean"), "head_dim": 256}, "beside a column mask"),
        ({"n_keys": 0}, "nothing"),
        ({"n_keys": 2**30}, "k has 1073741824 rows"),
        ({"n_queries": 2**30}, "q has 1073741824 rows"),
    ],
)
def test_reasons(changes, words):
    assert words in unsupported_reason(problem(**changes), H200)


def test_reason_on_other_devices():
    assert "sm_80" in unsupported_reason(problem(), H200._replace(arch="sm_80"))


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256])
def test_takes_head_dimensions(head_dim):
    assert unsupported_reason(problem(head_dim), H200) is None


def test_few_rows_leave_the_device_idle():
    assert "splits the keys" in Cut(problem(n_queries=1, batch=(1,))).slow_reason(H200)
    assert Cut(problem()).slow_reason(H200) is None


@pytest.mark.parametrize(
    ("changes", "few"),
    [
        ({"heads": 32, "kv_heads": 8, "n_queries": 1, "n_keys": 8192}, True),
        ({"heads": 32, "kv_heads": 8, "n_queries": 32, "n_keys": 8192}, True),  # 128 rows share their keys
        ({"heads": 32, "kv_heads": 8, "n_queries": 64, "n_keys": 8192}, False),
        ({"heads": 32, "kv_heads": 8, "n_queries": 4, "n_keys": 256}, True),
        ({"heads": 8, "n_queries": 32, "n_keys": 8192}, True),  # teams of the portable kernel, 32 rows a warp
        ({"heads": 8, "n_queries": 33, "n_keys": 8192}, False),
        ({"n_queries": 16}, True),
        ({"n_queries": 32}, False),
        ({"n_queries": 64}, False),
        ({"kv_heads": 8, "n_queries": 32}, False),
        ({"n_queries": 128}, False),
        ({"n_queries": 4096}, False),
        ({"heads": 32, "kv_heads": 8, "n_queries": 1, "n_keys": 8192, "masks": ("column",)}, True),
    ],
)
def test_few_rows_per_key(changes, few):
    assert ("fill its tiles" in (Cut(problem(batch=(16,), **changes)).slow_reason(H200) or "")) == few


def test_counts_cover_ragged_ends():
    tiles = Cut(problem(n_queries=129, n_keys=257)).counts
    assert (tiles["row_tiles"], tiles["key_tiles"]) == (2, 3)


def divided(p: Problem, multiprocessors: int = H200.multiprocessors, bias=None) -> Cut:
    """Return how a problem is cut on so many multiprocessors."""
    cut = Cut(p, bias)
    cut.divide(multiprocessors)
    return cut


LOW = {"batch": (4,), "heads": 16, "kv_heads": 16, "n_queries": 2048, "n_keys": 2048}  # rows of which 256 make a tile
FEW = {"batch": (1,), "heads": 2, "kv_heads": 2, "n_queries": 16384, "n_keys": 16384}


@pytest.mark.parametrize("n_keys", [512, 5000, 16384, 65536])
@pytest.mark.parametrize("n_queries", [512, 4096, 16384])
def test_parts_of_keys_fill_the_device(n_keys, n_queries):
    """Some where most would idle, and none that nobody has."""
    cut = divided(problem(64, **FEW | {"n_queries": n_queries, "n_keys": n_keys}))
    tiles = cut.counts["key_tiles"]
    assert cut.splits == 1 or -(-tiles // cut.split_tiles) == cut.splits
    assert cut.splits > 1 or 2 * cut.blocks > 132 or tiles < 8
    arrays, counters = cut.scratch
    assert counters == (cut.splits > 1) * cut.blocks * cut.tile.block_m // 64
    assert sum(x.nbytes for x in arrays.values()) == counters * cut.splits * 64 * 4 * (64 + 8)


TAIL = {"heads": 24, "kv_heads": 24, "n_queries": 4608, "n_keys": 4608}  # 12 of 1728 in the last round


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT32])
def test_parts_of_the_last_round(out_dtype):
    cut = divided(problem(**TAIL, out_dtype=out_dtype))
    assert (cut.whole, cut.splits, cut.blocks) == (13 * 132, 9, 13 * 132 + 12) == (cut.counts["shared_tile"], 9, 1728)
    assert cut.work == 13 * 132 + 9 * 12 and cut.scratch[1] == 12 * 2


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 64, "head_dim_v": 64},
        {"head_dim": 256, "head_dim_v": 256},
        {"band": CAUSAL},
        {"masks": ("column",)},
        {"n_queries": 4096, "batch": (11,), "heads": 6, "kv_heads": 6},  # full rounds
    ],
)
def test_last_rounds_that_stay_whole(changes):
    assert divided(problem(**TAIL | changes)).splits == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"masks": ("column",)},
        {"dropout": 6554},
        {"softcap": 3.0},
        {"bias": BF16},
        {"head_dim": 256, "head_dim_v": 256},
        {"band": Band(10, 0, 0)},
        {"band": CAUSAL, "placed": True},
        {"twin": True},
        {"batch": (16,)},
        {"n_keys": 512, "n_queries": 512, "heads": 1, "kv_heads": 1},
    ],
)
def test_rows_that_stay_whole(changes):
    few = FEW | {"n_queries": 2048}
    assert divided(problem(**few)).splits > 1
    assert divided(problem(**few | changes)).splits == 1


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({}, True),
        ({"n_queries": 4000, "n_keys": 4129, "band": Band(None, 0, 128)}, True),
        ({"head_dim": 192, "head_dim_v": 128}, True),
        ({"band": Band(None, 0, 129)}, False),
        ({"band": Band(10, 0, 0)}, False),
        ({"placed": True}, False),
        ({"n_keys": 512}, False),
        ({"head_dim": 64, "head_dim_v": 64}, False),
        ({"head_dim": 256, "head_dim_v": 256}, False),
        ({"softcap": 3.0}, False),
        ({"dropout": 6554}, False),
        ({"masks": ("column",)}, False),
    ],
)
def test_where_causal_key_tiles_are_counted(changes, counted):
    assert Cut(problem(**{"band": CAUSAL, **changes})).constants["diagonal"] is counted


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"batch": (1,), "n_queries": 2048, "n_keys": 2048}, 256),  # 128 tiles are one round, where 176 are two
        ({"batch": (1,), "n_queries": 2048, "n_keys": 2048, "band": CAUSAL}, 128),  # 256 in two rounds
        ({"batch": (8,), "n_queries": 512, "n_keys": 512}, 256),
        ({"batch": (1,), "n_queries": 2048, "n_keys": 2048, "twin": True}, 192),
        ({"batch": (8,)}, 192),
        ({"batch": (1,), "heads": 2, "kv_heads": 2, "n_queries": 16384, "n_keys": 16384}, 256),
        ({"batch": (32,), "n_queries": 577, "n_keys": 577}, 192),  # twelve rounds of 256 rows are longer than sixteen
    ],
)
def test_heights_of_tiles(changes, rows):
    assert divided(problem(64, **changes)).tile.block_m == rows


def test_causal_heads_share_the_cache():
    assert Cut(problem(band=CAUSAL, kv_heads=4, n_keys=65536)).counts["section"] == 4
    assert Cut(problem(band=CAUSAL, n_keys=1024)).counts["section"] == 32


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("masks", [(), ("column",), ("block",), ("column", "boolean")])
def test_fits_in_shared_memory(head_dim, masks):
    for out, bias in itertools.product((BF16, FLOAT32), (None, BF16, FLOAT32)):
        for given in (None,) if bias is None else (None, array((1, 1, 1, 4096), bias)):
            taken = problem(head_dim, masks=masks, out_dtype=out, bias=bias)
            assert unsupported_reason(taken, H200) or Cut(taken, given).shared_bytes <= H200.shared_bytes


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "form"),
    [
        ((2, 16, 4096, 4096), BF16, {}, "tiles"),
        ((1, 16, 4096, 4096), BF16, {"broadcast": (1,)}, "tiles"),
        ((2, 16, 4096, 4096), FLOAT32, {}, "loads"),
        ((2, 16, 4096, 4096), BF16, {"address": 4098}, "loads"),
        ((2, 16, 4096, 4095), BF16, {}, "loads"),
        ((2, 16, 4096, 1), BF16, {}, "rows"),
        ((2, 1, 1, 4096), FLOAT32, {}, "keys"),
        ((2, 16, 4096, 4096), BF16, {"broadcast": (2,)}, "keys"),
    ],
)
def test_how_a_bias_comes(shape, dtype, options, form):
    assert bias_form(problem(bias=dtype), array(shape, dtype, **options)) == form


@pytest.mark.parametrize(
    ("name", "changes", "split"),
    [
        ("alibi", {}, (True, True)),
        ("alibi", {"dropout_p": 0.5, "rng": 1}, (False, False)),
        ("alibi", {"softcap": 3.0}, (False, False)),
        ("key_bias", {}, (True, False)),
        ("key_bias", {"scale": 0.0}, (False, False)),
        ("relative_table", {}, (False, False)),
        ("gated", {}, (False, False)),
    ],
)
def test_what_tensor_cores_add_of_functions(name, changes, split):
    case = Case("added", options=changes)
    for operation, cut in (("forward", Cut), ("backward", BackwardCut)):
        constants = cut(scored(prepared(case, operation), scores.SCORES[name](case)).problem).constants
        assert (constants["split_score"], constants["row_offsets"]) == split
        assert constants["prescaled"] is not split[0]


def test_what_tensor_cores_add_of_biases():
    keys = array((2, 1, 1, 4096), FLOAT32)
    for changes, split in (
        ({}, True),
        ({"softcap": 3.0}, False),
        ({"masks": ("block",)}, False),
        ({"head_dim": 192}, False),
    ):
        assert Cut(problem(**{"bias": FLOAT32, **changes}), keys).constants["split_bias"] is split


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 256),
        ({"batch": (1,), "n_queries": 2048}, 256),
        ({"batch": (1,), "n_queries": 1024}, 128),  # half of the multiprocessors had nothing to do
        ({"n_queries": 2100}, 128),
        ({"n_keys": 512}, 128),
        ({"band": CAUSAL}, 128),
        ({"softcap": 3.0}, 128),
        ({"masks": ("column",)}, 128),
        ({"head_dim": 48}, 128),
    ],
)
def test_four_warpgroups_beside_a_bias(changes, rows):
    assert Cut(problem(**{"head_dim": 64, "bias": BF16, **changes})).tile.block_m == rows


@pytest.mark.parametrize(
    ("address", "stride", "good"), [(16, 32, True), (8, 32, False), (16, 24, False), (16, -16, False)]
)
def test_tensor_map_conditions(address, stride, good):
    assert (tensor_map.unsupported_reason(address, (0, stride)) is None) == good


def test_the_driver_is_told_plausible_strides(monkeypatch):
    """Also of axes of length 1, whose strides nothing is wrong with: 27 values of 16 bits from row to row."""
    told = []
    monkeypatch.setattr(tensor_map, "_encoder", lambda: lambda *arguments: told.extend(arguments[5]) or 0)
    tensor_map.describe(4096, DTYPES[F16], tensor_map.View((1, 3, 1, 27), (54, 64, 54), 64))
    assert told == [16, 64, 16]


VARIANTS = [
    problem(64, band=CAUSAL),
    problem(128, band=CAUSAL),
    problem(64, dropout=6554, dtype=F16, out_dtype=F16),
    problem(64, masks=("column",)),
    problem(64, masks=("block",), band=Band(10, 0, 0)),
    problem(96, scale=-0.1),
    problem(128, n_keys=1024),
    problem(128, masks=("column",), band=Band(10, 0, 0), dropout=6554, softcap=3.0),
    problem(192, 128, out_dtype=FLOAT32),
    problem(256, masks=("column",)),
    problem(256, masks=("column",), dropout=6554),
    problem(256, band=CAUSAL, softcap=3.0),
    problem(64, masks=("boolean",)),
    problem(64, masks=("function",), dropout=6554),
    problem(64, masks=("column", "boolean"), dropout=6554),
    problem(128, masks=("boolean",), band=Band(10, 0, 0)),
    problem(128, masks=("column", "boolean"), band=Band(10, 0, 0), dropout=6554, softcap=3.0),
    problem(256, masks=("boolean",), dropout=6554),
    problem(32, bias=BF16, n_keys=256),
    problem(64, bias=BF16),
    problem(128, bias=BF16),
    problem(128, bias=BF16, masks=("column",), dropout=6554, softcap=3.0),
    problem(256, bias=BF16, masks=("column",)),
    problem(128, bias=FLOAT32, dropout=6554, band=CAUSAL),
    problem(64, bias=FLOAT32, masks=("block",), band=Band(10, 0, 0)),
]


# Of short sequences: every tile with what takes registers and room, the largest with every feature.
SHORT = [
    problem(d, n_queries=n, n_keys=n, **more)
    for d, n, features in ((64, 128, 8), (32, 49, 4), (32, 250, 4), (64, 64, 4))
    for more in (
        {},
        {"masks": ("column",), "band": CAUSAL},
        {"masks": ("boolean",), "softcap": 3.0},
        {"masks": ("column", "boolean"), "dropout": 6554},
        {"band": Band(10, 0, 0), "out_dtype": FLOAT32},
        {"masks": ("function",), "dtype": F16, "out_dtype": F16, "scale": -0.1},
        {"masks": ("block",), "band": CAUSAL, "dropout": 6554},
        {"dropout": 6554},
    )[:features]
]
SHORT += [
    problem(80, n_queries=257, n_keys=257),
    problem(96, n_keys=729),
    problem(128, n_keys=257, masks=("column", "boolean"), dropout=6554),
]


def cuts() -> list[Cut]:
    """Return the variants, and those where a bias is broadcast along rows or keys."""
    rows, keys = array((1, 1, 1, 4096), FLOAT32), array((2, 16, 4096, 1), FLOAT32)
    broadcast = [
        Cut(problem(64, bias=FLOAT32), rows),
        Cut(problem(64, bias=FLOAT32, masks=("column",), band=CAUSAL), rows),
        Cut(problem(64, bias=FLOAT32, dropout=6554), rows),
        Cut(problem(128, bias=FLOAT32), rows),
        Cut(problem(128, bias=FLOAT32, softcap=3.0), rows),
        Cut(problem(256, bias=FLOAT32, masks=("column",), dropout=6554), rows),
        Cut(problem(128, bias=FLOAT32, band=CAUSAL), keys),
    ]
    parts = [problem(d, **FEW | {"band": band}) for d in (64, 128) for band in (None, CAUSAL)]
    broadcast.append(divided(problem(64, bias=FLOAT32, **LOW), bias=rows))
    broadcast += [divided(problem(**TAIL, out_dtype=out_dtype)) for out_dtype in (BF16, FLOAT32)]
    return [*map(Cut, VARIANTS), *broadcast, *map(Cut, SHORT), *(divided(p, 1000) for p in parts)]


@pytest.mark.parametrize("band", [None, CAUSAL])
@pytest.mark.parametrize("n", [1024, 2048, 4096, 16384])
def test_what_tensor_cores_add_changes_no_tile(n, band):
    sizes = {**LOW, "n_queries": n, "n_keys": n, "band": band}
    plain, biased = (
        divided(problem(64, **sizes)),
        divided(problem(64, bias=FLOAT32, **sizes), bias=array((1, 1, 1, n), FLOAT32)),
    )
    assert biased.tile == plain.tile and biased.splits == 1
    unrounded = divided(problem(64, bias=FLOAT32, out_dtype=FLOAT32, **sizes), bias=array((1, 1, 1, n), FLOAT32))
    assert unrounded.tile.block_n == biased.tile.block_n


def name_of(cut: Cut) -> str:
    p = cut.problem
    short = f" n {p.n_queries}" if p.n_keys <= 512 else ""
    return f"d{p.head_dim} {p.masks} {p.dropout} {p.softcap} {cut.bias_form} {cut.tile.block_m} {cut.splits}{short}"


@pytest.mark.parametrize("cut", cuts(), ids=name_of)
def test_spills(cut):
    """Nothing is kept in local memory, and the kernel lays out its shared memory as the plan does."""
    layout = (
        f"static_assert(sm90::fwd::shared_bytes == {cut.shared_bytes});\n"
        f"static_assert(sm90::fwd::threads == {2 * cut.tile.block_m + 128});\n"
    )
    (used,) = resources(source.build(cut.path, cut.constants) + layout, ARCH, cut.path).values()
    assert used.stack == 0, used


@pytest.mark.parametrize("d", [32, 64])
def test_tiles_of_short_rows_have_few_rows_that_are_not_there(d):
    for n in range(1, 2000, 7):
        tile = Cut(problem(d, n_queries=n, n_keys=n)).tile
        assert pad(n, tile.block_m) <= pad(n, 192)
        assert pad(n, tile.block_m) < n + 64 or not 32 < n <= 256
        assert tile == (192, 128, 3, 3, 1) or n <= 256


def test_few_heads_take_lower_tiles():
    """With the same keys, so that a result does not depend on how many there are."""
    low, high = (Cut(problem(64, batch=(b,), n_queries=256, n_keys=256)).tile for b in (4, 5))
    assert (low.block_m, high.block_m) == (64, 256) and low.block_n == high.block_n
    assert Cut(problem(64, batch=(3,), n_queries=256, n_keys=256)).slow_reason(H200) is None
    assert Cut(problem(64, n_queries=256, n_keys=256)).slow_reason(H200) is not None


def test_tiles_of_longer_rows_stay():
    for d, tile in ((64, (192, 128, 3, 3, 1)), (96, (128, 128, 2, 3, 1)), (128, (128, 128, 2, 3, 1))):
        for n_queries, n_keys in ((4096, 4096), (1024, 1024), (77, 4096), (4096, 1024)):
            for band in (None, CAUSAL):
                assert Cut(problem(d, n_queries=n_queries, n_keys=n_keys, band=band)).tile == tile


def test_short_rows_of_all_masks_have_the_same_keys():
    """The order of sums depends on nothing else."""
    for n in (49, 100, 200, 256, 300):
        for d in (32, 64, 128):
            masks = ((), ("column",), ("boolean",), ("block",), ("function",), ("column", "boolean"))
            assert len({Cut(problem(d, n_queries=n, n_keys=n, masks=each)).tile.block_n for each in masks}) == 1


def test_key_tiles_fit_few_keys():
    assert [Cut(problem(128, n_keys=n)).tile.block_n for n in (96, 128, 190, 256, 257, 288, 512, 600)] == [
        96, 128, 96, 128, 96, 96, 128, 128,
    ]  # fmt: skip


def test_all_key_tiles_can_be_told_apart():
    """As many as lengths below 2**30 have of 64 keys; none of them is taken for the end of a list."""
    text = source.prologue(Cut(VARIANTS[0]).constants) + source.flatten_text(
        '#include "sm90/fwd_layout.cuh"\nusing Tile = sm90::fwd::KeyTile;\nconstexpr i32 last = (1 << 24) - 1;\n'
        "static_assert(Tile::make(last, 0).n() == last && Tile::make(last, 127).exists() && !Tile::none().exists());\n",
        "tiles.cu",
    )
    compile_log(text, ARCH)
