"""Hopper's backward plan: what it takes, that every variant compiles without spills and fits in shared memory."""

import numpy as np
import pytest

from cuattn.cuda import source
from cuattn.cuda.families import launch_sequence
from cuattn.cuda.sm90.backward import Cut, unsupported_reason
from cuattn.cuda.sm90.balance import makespan
from cuattn.cuda.sm90.bias import NO_BIAS, BiasForm, Dbias, bias_form
from cuattn.cuda.sm90.kept import STAGES
from cuattn.cuda.sm90.pairs import TILE, ring
from cuattn.cuda.sm90.parts import visible_rows
from cuattn.problem import Band
from tests.cuda import scores
from tests.cuda.cases import BF16, F16, Case, columns_of
from tests.cuda.nvrtc import kernel_resources, resources, version
from tests.cuda.recording import array, prepared, scored
from tests.cuda.recording import driver as driver
from tests.cuda.sm90.test_forward_plan import ARCH, CAUSAL, H200
from tests.cuda.sm90.test_forward_plan import problem as forward_problem

WINDOW = Band(10, 5, 0)
FLOAT32 = np.dtype(np.float32)


def problem(*sizes, **changes):
    return forward_problem(*sizes, operation="backward", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": np.dtype(np.float32)}, "float32"),
        ({"head_dim": 264}, "264"),
        ({"head_dim": 36, "head_dim_v": 40}, "36"),
        ({"n_queries": 0}, "nothing"),
    ],
)
def test_reasons(changes, words):
    assert words in unsupported_reason(problem(**changes), H200)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 136, 192, 256])
def test_takes_head_dimensions(head_dim):
    assert unsupported_reason(problem(head_dim), H200) is None


def test_one_kernel_or_two():
    assert Cut(problem()).fused and Cut(problem(64, softcap=3.0, dropout=6554)).fused
    assert [Cut(problem(masks=(kind,), dropout=6554)).fused for kind in ("column", "block")] == [True, False]
    assert not Cut(problem(256)).fused and not Cut(problem(softcap=3.0, dropout=6554)).fused
    assert Cut(problem(softcap=3.0, band=CAUSAL)).fused and not Cut(problem(softcap=3.0)).split_delta
    assert "turns" in Cut(problem(64, deterministic=True)).note
    assert "fixed order" in Cut(problem(256)).note
    assert [Cut(problem(192, 128, **changes)).keys.block_n for changes in ({}, {"softcap": 3.0})] == [128, 64]


def test_scratch_holds_whole_tiles():
    made = Cut(problem(72, n_queries=130)).scratch(3)
    assert made["dq_acc"].shape == (3, 192, 80) and "turns" not in made
    assert made["stat"].shape == (1, 2 * 16, 256)
    assert Cut(problem(deterministic=True)).scratch(3)["turns"].shape == (3, 64)
    assert "dq_acc" not in Cut(problem(256)).scratch(32)


def test_who_subtracts_delta():
    assert [Cut(problem(d)).split_delta for d in (64, 96, 128, 256)] == [False, True, True, False]
    assert Cut(problem(masks=("column",), deterministic=True, band=CAUSAL)).split_delta
    assert not Cut(problem(dropout=6554)).split_delta and not Cut(problem(masks=("block",))).split_delta
    parts = Cut(problem(n_queries=130)).scratch(3)["delta"]
    assert (parts.shape, parts.dtype) == ((2 * 16, 256, 3), np.uint16)
    assert Cut(problem(64, n_queries=130)).scratch(3)["delta"].dtype == np.float32


@pytest.mark.parametrize("masks", [(), ("column",), ("block",), ("column", "boolean")])
@pytest.mark.parametrize("sizes", [(64,), (96, 40), (128,), (64, 256), (192, 128), (256,)])
def test_fits_in_shared_memory(sizes, masks):
    for changes in ({}, {"dropout": 6554}, {"softcap": 1.0}, {"deterministic": True}):
        cut = Cut(problem(*sizes, masks=masks, **changes))
        assert max(cut.keys.shared_bytes, cut.rows.shared_bytes) <= H200.shared_bytes


def test_causal_heads_share_the_cache():
    assert Cut(problem()).keys.counts["section"] == 1
    assert Cut(problem(band=CAUSAL, n_queries=65536)).keys.counts["section"] == 1
    assert Cut(problem(band=CAUSAL, n_queries=1024)).keys.counts["section"] == 32


def grouped(batch, heads, kv_heads, length, head_dim, **changes):
    return problem(head_dim, batch=(batch,), heads=heads, kv_heads=kv_heads, n_queries=length, n_keys=length, **changes)


@pytest.mark.parametrize(
    ("sizes", "changes", "parts"),
    [
        ((1, 48, 1, 8192, 128), {"band": CAUSAL}, 12),
        ((1, 48, 1, 8192, 128), {}, 2),
        ((2, 32, 1, 4096, 128), {"band": CAUSAL, "deterministic": True}, 8),
        ((2, 14, 2, 8192, 64), {"band": CAUSAL}, 1),  # the longest takes no longer than a 132nd of all
        ((1, 64, 8, 8192, 128), {"band": CAUSAL}, 2),
        ((4, 32, 8, 4096, 128), {"band": CAUSAL}, 1),
        ((4, 8, 1, 4096, 256), {"band": CAUSAL}, 1),
        ((1, 48, 1, 8192, 128), {"band": CAUSAL, "bias": BF16}, 1),
        ((1, 8, 8, 1024, 128), {"band": CAUSAL}, 2),
        ((1, 2, 1, 128, 64), {}, 1),  # not worth a launch
        ((1, 1, 1, 4096, 64), {}, 4),
        ((1, 1, 1, 4096, 64), {"masks": ("column",), "dropout": 6554}, 1),  # no registers
        ((1, 1, 1, 4096, 64), {"deterministic": True}, 1),
        ((1, 8, 8, 3001, 128), {"band": CAUSAL}, 1),  # parts would travel longer than the longest tile
    ],
)
def test_how_many_blocks_share_a_key_tile(sizes, changes, parts):
    assert Cut(grouped(*sizes, **changes)).parts == parts


@pytest.mark.parametrize("changes", [{}, {"dropout": 6554}])
def test_parts_of_a_fixed_order_depend_on_no_mask(changes):
    kinds = {}, {"band": CAUSAL}, {"band": WINDOW}, {"masks": ("column",)}, {"masks": ("boolean",)}
    parts = [Cut(grouped(1, 48, 1, 2048, 64, deterministic=True, **kind, **changes)).parts for kind in kinds]
    assert len({*parts}) == 1 and (parts[0] > 1) == (not changes)


def test_key_tiles_are_as_long_as_the_band_makes_them():
    assert visible_rows(problem(n_queries=100, n_keys=300), 128) == [100, 100, 100]
    assert visible_rows(problem(n_queries=300, n_keys=300, band=CAUSAL), 128) == [300, 172, 44]
    assert visible_rows(problem(n_queries=300, n_keys=300, band=WINDOW), 128) == [138, 143, 49]
    assert makespan([4, 3], [2, 2], 3) == 6 and makespan([4, 2], [2, 2], 4) == 4


def test_the_last_key_tiles_are_shared():
    assert Cut(grouped(4, 16, 16, 4096, 128)).tail == (1980, 68, 3)
    assert Cut(grouped(1, 16, 16, 32768, 128)).tail == (4092, 4, 32)
    assert Cut(grouped(16, 16, 16, 1024, 128)).tail is None  # parts would travel longer than they save
    assert Cut(grouped(1, 33, 33, 16384, 128)).tail is None  # none are left over
    for head_dim, changes in (64, {}), (256, {}), (128, {"band": CAUSAL}), (128, {"deterministic": True}):
        assert Cut(grouped(4, 16, 16, 4096, head_dim, **changes)).tail is None


def test_long_key_tiles_of_the_last_heads_begin_early():
    def sections(*sizes):
        return Cut(grouped(*sizes, band=CAUSAL)).keys.counts["section"]

    assert sections(4, 32, 8, 4096, 128) == 8 and sections(1, 32, 8, 32768, 128) == 2
    assert sections(1, 64, 8, 8192, 128) == 4 == sections(2, 14, 2, 8192, 64)
    assert sections(1, 20, 5, 32768, 128) == 3  # and 2: none is much smaller than the others


def test_many_heads_take_turns():
    assert Cut(problem(deterministic=True)).keys.counts["section"] == 16
    assert Cut(problem(deterministic=True, band=CAUSAL)).keys.counts["section"] == 32
    assert Cut(problem(256, deterministic=True)).keys.counts["section"] == 1


SHAPES = {"whole": (2, 16, 4096, 4096), "heads": (1, 16, 4096, 4096), "keys": (2, 1, 1, 4096), "rows": (2, 16, 4096, 1)}


@pytest.mark.parametrize(
    ("shape", "changes", "form"),
    [
        ("whole", {}, (False, True, Dbias.STORED)),
        ("whole", {"dropout": 6554}, (False, True)),
        ("whole", {"bias": FLOAT32}, ()),
        ("whole", {"out_dtype": FLOAT32, "deterministic": True}, (False, True)),
        ("whole", {"softcap": 3.0}, (False, True)),
        ("heads", {}, (False, True, Dbias.ELSEWHERE, True)),
        ("keys", {"deterministic": True}, (True, False, Dbias.OF_KEYS)),
        ("keys", {"kv_heads": 4}, (True, False, Dbias.OF_KEYS)),
        ("rows", {}, ()),
    ],
)
def test_how_a_bias_comes_and_its_gradient_leaves(shape, changes, form):
    p = problem(**{"bias": BF16, **changes})
    assert bias_form(p, array(SHAPES[shape], p.bias)) == BiasForm(*form)


def test_what_a_bias_asks_for():
    assert bias_form(problem(), None) == BiasForm()
    odd = problem(bias=BF16, n_keys=4095)
    assert bias_form(odd, array((2, 16, 4096, 4095))) == BiasForm()
    heads = problem(bias=BF16, kv_heads=4)
    assert bias_form(heads, array((1, 16, 1, 4096))) == BiasForm(keys=True)
    wide = problem(64, 128, bias=BF16)
    assert not bias_form(wide, array(SHAPES["whole"])).tiles
    few = problem(bias=BF16, n_queries=256, n_keys=256)
    assert not bias_form(few, array((1, 16, 256, 256))).batches_first
    shared = Cut(problem(bias=BF16), BiasForm(tiles=True, batches_first=True))
    assert shared.split_delta and shared.keys.counts["section"] == 2
    assert Cut(problem(256, bias=BF16), BiasForm(True, gradient=Dbias.OF_KEYS)).bias == BiasForm(True)


# What NVRTC 12 keeps in local memory of the warps that draw what dropout drops: one value, once per tile.
DRAWER_BYTES = 8
CROWDED_BYTES = 24  # of NVRTC 12 alone, where a column mask meets a boolean mask in one kernel at d 128

VARIANTS = [
    problem(64),
    problem(64, masks=("column",), band=WINDOW),
    problem(64, dropout=6554, dtype=F16, softcap=3.0),
    problem(64, dropout=40000, masks=("block",), band=WINDOW),
    problem(96, 40, masks=("block",)),
    problem(128),
    problem(128, masks=("column",), band=CAUSAL),
    problem(96, dropout=6554),
    problem(128, dropout=6554, scale=-0.1),
    problem(128, dropout=6554, masks=("column",), band=CAUSAL),
    problem(128, softcap=3.0, masks=("column",)),
    problem(192, 128, band=CAUSAL),
    problem(256),
    # Few rows, one key tile.
    *(problem(64, batch=(64,), n_queries=200, n_keys=200, masks=masks) for masks in ((), ("column", "boolean"))),
    *(problem(d, n_queries=500, n_keys=77, band=WINDOW) for d in (64, 128)),
    problem(256, masks=("column",), dropout=6554, softcap=3.0, band=WINDOW),
    problem(256, masks=("block",)),
    problem(64, deterministic=True, band=CAUSAL),
    problem(128, deterministic=True, masks=("column",)),
    problem(96, deterministic=True, masks=("block",), dropout=6554),
    problem(64, masks=("boolean",), dropout=6554, band=CAUSAL),
    problem(128, masks=("function",)),
    problem(256, masks=("function", "boolean")),
    *(problem(d, band=CAUSAL) for d in (64, 72, 128)),
    problem(128, masks=("boolean",), deterministic=True, band=WINDOW),
    problem(128, masks=("column", "boolean"), deterministic=True, band=WINDOW),
    problem(128, masks=("column", "boolean"), dropout=6554, band=CAUSAL),
    problem(192, masks=("column", "boolean"), dropout=6554, softcap=3.0, band=WINDOW),
    # Parts of a group's heads.
    *(problem(d, kv_heads=1, batch=(1,), n_queries=1024, n_keys=1024, band=CAUSAL) for d in (64, 96, 128, 256)),
    problem(64, heads=1, kv_heads=1, batch=(1,), dropout=6554),
    problem(128, heads=1, kv_heads=1, batch=(1,), softcap=3.0),
    problem(128, heads=1, kv_heads=1, batch=(1,), masks=("column",)),
    problem(128, heads=1, kv_heads=1, batch=(1,), masks=("block",)),
    problem(128, kv_heads=1, batch=(1,), n_queries=1024, n_keys=1024, masks=("column",), deterministic=True),
]


KEYS = BiasForm(True, gradient=Dbias.OF_KEYS)
TILES, LOADS = (
    {form: BiasForm(tiles=tiles, gradient=form) for form in (Dbias.ELSEWHERE, Dbias.STORED)} for tiles in (True, False)
)
BIASED = [
    (problem(64, bias=BF16), KEYS),
    (problem(64, bias=BF16, masks=("column",), deterministic=True), KEYS),
    (problem(128, bias=BF16), KEYS),
    (problem(128, bias=BF16, kv_heads=4, band=CAUSAL), KEYS),
    (problem(128, bias=BF16, dropout=6554, band=CAUSAL), KEYS),
    (problem(64, bias=BF16), TILES[Dbias.STORED]),
    (problem(128, bias=BF16, masks=("column",), deterministic=True), TILES[Dbias.STORED]),
    (problem(128, bias=BF16, band=CAUSAL), TILES[Dbias.ELSEWHERE]),
    (problem(64, bias=BF16, masks=("column",)), TILES[Dbias.ELSEWHERE]),
    (problem(64, bias=FLOAT32), LOADS[Dbias.ELSEWHERE]),
    (problem(128, bias=FLOAT32, dropout=6554), LOADS[Dbias.ELSEWHERE]),
    (problem(256, bias=BF16, band=WINDOW), BiasForm(True)),
    (problem(64, masks=("column",)), BiasForm(gradient=Dbias.DIAGONALS)),
    (problem(128, masks=("column",), band=CAUSAL), BiasForm(gradient=Dbias.DIAGONALS)),
]


def kernels(p, form=NO_BIAS):
    """Yield path, constants and shared memory of the kernels that are Hopper's own."""
    cut = Cut(p, form)
    constants = cut.constants
    own = constants if cut.parts == 1 else {**constants, "grad": "float"}
    yield "sm90/bwd_bias.cu" if form.tiles else "sm90/bwd.cu", own, cut.keys.shared_bytes, "bwd_layout"
    if cut.parts > 1 and not cut.adds_dq:
        yield "sm90/bwd_add_parts.cu", constants, 0, ""
    if cut.fused:
        yield "sm90/bwd_convert.cu", constants, 0, ""
    else:
        tile = cut.rows
        own = {"block_m": tile.block_m, "block_n": tile.block_n}
        if cut.kept:
            yield "sm90/bwd_dq.cu", {**constants, **own, "stages": STAGES}, tile.shared_bytes, "bwd_dq"
        else:
            yield "sm90/bwd_rows.cu", {**constants, **own}, tile.shared_bytes, "bwd_rows_layout"


def used_by(path, constants, shared_bytes, layout):
    """Return what a kernel uses, which must lay out its shared memory as the plan does."""
    space = {"bwd_rows_layout": "rows", "bwd_dq": "dq"}.get(layout, "bwd")
    check = f"static_assert(sm90::{space}::shared_bytes == {shared_bytes});\n" if layout else ""
    (used,) = resources(source.build(path, constants) + check, ARCH, path).values()
    return used


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda p: f"d{p.head_dim} {p.masks} {p.dropout} {p.softcap}")
def test_spills(variant):
    for path, *kernel in kernels(variant):
        used, known = used_by(path, *kernel), 0
        if version().startswith("12."):
            crowded = {"column", "boolean"} <= {*variant.masks}
            known = DRAWER_BYTES if variant.dropout else CROWDED_BYTES if crowded else 0
        assert used.stack <= known, (path, used)


def test_passes_spills():
    for variant, form, more in (
        (problem(32, bias=BF16), TILES[Dbias.ELSEWHERE], {"split": True}),
        (problem(64, bias=BF16, softcap=3.0), TILES[Dbias.ELSEWHERE], {}),
        (problem(128, bias=BF16, masks=("column",)), TILES[Dbias.ELSEWHERE], {}),
        (problem(128, bias=BF16, dropout=6554, band=CAUSAL), TILES[Dbias.ELSEWHERE], {}),
        (problem(256, bias=BF16, masks=("block",)), BiasForm(True), {"sum_rows": True}),
    ):
        constants = Cut(variant, form).constants
        own = TILE[0] * TILE[1] * variant.bias.itemsize
        stages, shared_bytes = ring(variant, constants["split_delta"], own, H200.shared_bytes)
        assert shared_bytes + own <= H200.shared_bytes
        constants |= {"block_m": TILE[0], "block_n": TILE[1], "stages": stages, "split": False, "sum_rows": False}
        constants |= {
            "sum_keys": False,
            "inputs": False,
            "dp_late": False,
            "pair_warpgroups": 2 if variant.masks else 4,
            **more,
        }
        path, check = "sm90/bwd_dbias.cu", f"static_assert(sm90::pairs::own_at == {shared_bytes});\n"
        (used,) = resources(source.build(path, constants) + check, ARCH, path).values()
        assert used.stack == 0, (variant, used)


@pytest.mark.parametrize(("variant", "form"), BIASED)
def test_biases_spills(variant, form):
    path, *kernel = next(kernels(variant, form))
    used = used_by(path, *kernel)
    assert used.stack == 0, (path, used)


SCORED = [
    ("alibi", {"head_dim": 128, "mask": columns_of}),
    ("alibi", {"head_dim": 128, "options": {"is_causal": "top_left"}}),
    ("key_bias", {"head_dim": 128}),
    ("key_bias", {"options": {"dropout_p": 0.25, "rng": 9}}),
    ("relative_table", {"head_dim": 128}),
    ("gated", {}),
    ("row_temperature", {"head_dim": 256}),
    ("graph", {"head_dim": 128, "mask": columns_of}),
    ("pair_bias", {}),
]


@pytest.mark.parametrize(("name", "changes"), SCORED)
def test_scores_spills(driver, name, changes):
    case = Case("scored", n_queries=400, n_keys=400, **changes)
    call = scored(prepared(case, "backward", kernel="sm90"), scores.SCORES[name](case))
    kernels = [kernel._found for kernel in launch_sequence(*call[:3])._kernels]
    by_main = "sm90/bwd_weights.cu" in [path for _, path, *_ in kernels]
    assert by_main == (name in ("alibi", "key_bias"))
    assert ("sm90/bwd_score.cu" in [path for _, path, *_ in kernels]) == (name in ("row_temperature", "graph"))
    for _, path, _, constants, _, exact, traced in kernels:
        if exact:
            (used,) = kernel_resources(path, constants, ARCH, traced).values()
            assert used.stack == 0, (path, used)


DROPPED = {"options": {"dropout_p": 0.25, "rng": 9}}


@pytest.mark.parametrize(
    ("name", "changes", "options", "sums"),
    [
        ("alibi", {}, {}, "weights"),
        ("key_bias", {"heads": 8}, {}, "weights"),
        ("alibi", DROPPED, {}, "weights"),
        ("head_temperature", {"head_dim": 128}, {}, "weights heads"),
        ("head_temperature", {"heads": 8}, {}, "pass"),
        ("head_factor", {}, {}, "heads"),
        ("row_temperature", {}, {}, "pass"),
        ("relative_table", {}, {}, "diagonals"),
        ("relative_table", {"heads": 8}, {"deterministic": True}, "diagonals"),
        ("relative_table", {"n_queries": 30000, "n_keys": 30000}, {"deterministic": True}, "pass"),
        ("relative_table", DROPPED, {}, "pass"),
        ("relative_table", {"head_dim": 256}, {}, "pass"),
        ("buckets", {}, {}, "diagonals"),
        ("grid", {}, {}, "pass"),
    ],
)
def test_who_sums_what_arrays_need(driver, name, changes, options, sums):
    case = Case("summed", n_queries=400, n_keys=400)._replace(**changes)
    call = scored(prepared(case, "backward", kernel="sm90", **options), scores.SCORES[name](case))
    kernels = [kernel._found[1:4:2] for kernel in launch_sequence(*call[:3])._kernels]
    paths = {path.rpartition("/")[2]: dict(constants) for path, constants in kernels}
    found = {
        "pass": "bwd_score.cu" in paths,
        "weights": "bwd_weights.cu" in paths,
        "heads": any(paths.get(f"bwd_convert_{name}.cu", {}).get("slopes_of_heads") for name in ("sums", "heads")),
    }
    main = paths.get("bwd_weights.cu", paths.get("bwd.cu"))
    found["diagonals"] = main["dbias"] == Dbias.DIAGONALS
    assert sums.split() == [what for what, holds in found.items() if holds]


BIG = {"n_queries": 4096, "n_keys": 4096, "heads": 8}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    ("name", "changes", "launches", "beside"),
    [
        ("unread", {}, 3, True),
        ("alibi", {}, 3, True),
        ("key_bias", {"mask": columns_of}, 3, True),
        ("relative_table", {}, 3, True),
        ("relative_table", DROPPED, 5, False),  # a pass along diagonals counts tiles of its own
        ("head_temperature", {}, 5, True),  # an array read twice, and another
        ("row_temperature", {}, 4, True),
        ("graph", {}, 4, True),
        ("grid", DROPPED, 4, True),
        ("head_factor", {}, 3, False),
        ("alibi", BIG, 4, False),
        ("relative_table", BIG, 4, False),
    ],
)
def test_the_last_sum_is_made_beside_the_conversion(driver, name, changes, launches, beside, head_dim, deterministic):
    case = Case("beside", head_dim=head_dim, **{"n_queries": 400, "n_keys": 500, **changes})
    unread = scores.Score(lambda s, b, h, i, j, x: s, (np.ones(3, np.float32),))
    score = unread if name == "unread" else scores.SCORES[name](case)
    call = scored(prepared(case, "backward", kernel="sm90", deterministic=deterministic), score)
    sequence = launch_sequence(*call[:3])
    done, places = driver.run(sequence, call.addresses, call.masks, call.state, capturing=True)
    last, results = done[-1].argument, dict(zip(sequence.results, places, strict=False))
    assert len(sequence._kernels) == launches and done[-1].path.endswith("_sums.cu") == beside
    assert last["dq_acc"] and last["dq.data"] == results["dq"]
    if beside:
        assert last["result"] == results[max(name for name in results if "score" in name)]
        blocks = -(-int(last["size"]) // int(last["owned"]))
        assert done[-1].grid == (blocks + 4 * int(last["row_tiles"]),)
        _, path, _, constants, *_, traced = sequence._kernels[-1]._found
        (used,) = kernel_resources(path, constants, ARCH, traced).values()
        assert used.stack == 0, used


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize(("load_bytes", "o_elem"), [(2, "elem"), (8, "float"), (16, "elem"), (16, "float")])
@pytest.mark.parametrize(
    "variant", [problem(64), problem(256), problem(96), problem(dtype=F16)], ids=["d64", "d256", "d96", "float16"]
)
def test_preprocess_spills(variant, o_elem, load_bytes, dlse):
    constants = dict(Cut(variant).constants)
    constants["o_elem"] = constants["elem"] if o_elem == "elem" else "float"
    constants |= {"warps": 8, "head_dim": Cut(variant).columns, "atomic_dq": Cut(variant).fused}
    constants = tuple({**constants, "load_bytes": load_bytes, "dlse": dlse}.items())
    (used,) = kernel_resources("util/bwd_preprocess.cu", constants, "sm_90").values()
    assert used.stack == 0, used
