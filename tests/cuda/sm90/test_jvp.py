"""Hopper's kernel along tangents: what it takes, its launch, and that its variants compile without spills."""

from dataclasses import replace

import numpy as np
import pytest

from cuattn.cuda import families
from cuattn.cuda.sm90.jvp import Cut, Jvp, unsupported_reason
from cuattn.errors import UnsupportedError
from tests.cuda.cases import BF16, F16, Case, case_of, columns_of, dense_of, sized
from tests.cuda.nvrtc import kernel_resources
from tests.cuda.recording import H200, TICKET, prepared, scored
from tests.cuda.recording import driver as driver
from tests.cuda.scores import SCORES
from tests.cuda.sm90.test_forward_plan import CAUSAL, problem

TANGENTS = ("q", "k", "v")
CAUSAL_DROPOUT = {"dropout_p": 0.25, "rng": 9, "is_causal": "top_left"}
COMPILED = [
    Case("d64"),
    Case("float16 d128", dtype=F16, head_dim=128, options={"is_causal": "top_left"}),
    Case("column d128", mask=columns_of, head_dim=128),
    Case("dense dropout", mask=dense_of, options=CAUSAL_DROPOUT),
]
MORE = [
    Case("d80 dv 40", head_dim=80, head_dim_v=40),
    Case("dropout d128", head_dim=128, options=CAUSAL_DROPOUT),
    case_of("small blocks"),
    case_of("scale zero"),
    case_of("softcap"),
    case_of("bias"),
    case_of("bias row"),
    case_of("everything"),
    Case("column parts", n_keys=2100, mask=columns_of),
    Case("dense parts d128", n_keys=1100, head_dim=128, mask=dense_of),
    Case("float32 results", options={"out_dtype": np.float32, "window": (30, 20, "top_left")}),
]
MOST = 32  # bytes that a thread may spill beside a bias and its tangent


def jvp_problem(head_dim=128, tangents=TANGENTS, **changes):
    return problem(head_dim, operation="jvp", tangents=tangents, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": np.dtype(np.float64)}, "float64"),
        ({"head_dim": 136}, "136"),
        ({"tangents": ()}, "no tangent"),
        ({"n_keys": 0}, "nothing"),
    ],
)
def test_reasons(changes, words):
    assert words in unsupported_reason(replace(jvp_problem(), **changes), H200)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128])
@pytest.mark.parametrize("tangents", [TANGENTS, ("q",), ("k", "v"), ("v",)])
def test_tiles_fit_in_shared_memory(head_dim, tangents):
    for masks in ((), ("column", "boolean"), ("block",)):
        for out in (BF16, np.dtype(np.float32)):
            p = jvp_problem(head_dim, tangents, masks=masks, out_dtype=out)
            assert unsupported_reason(p, H200) is None and Cut(p).shared_bytes <= H200.shared_bytes


def test_launch(driver):
    call = prepared(Case("own", n_queries=1000, n_keys=1000, heads=32, kv_heads=8), "jvp", kernel="sm90")
    made = families.launch_sequence(*call[:3])
    (found,), places = driver.run(made, call.addresses)
    argument = found.argument
    assert (found.path, found.kernel, found.grid, found.block) == ("sm90/jvp.cu", "attention_jvp", (132,), (384,))
    assert [argument[f"{name}.data"] for name in ("o", "l", "m", "to", "tlse")] == places[:5]
    assert [argument[f"t{name}.data"] for name in TANGENTS] == [call.addresses[f"t{name}"] for name in TANGENTS]
    assert argument["tk.head"] == 1000 * 64 and argument["counters"] == TICKET
    assert [view.box_rows for view in found.maps] == [128, 128, 128, 64, 64, 128, 128, 128]


@pytest.mark.parametrize(("heads", "parts"), [(8, 4), (80, 1)])
def test_first_rows_are_divided_where_masks_may_make_them_far_longer(heads, parts, driver):
    case = sized("columns", 4000, 4000, batch=(1,), heads=heads, kv_heads=heads, mask=columns_of)
    call = prepared(case, "jvp", kernel="sm90")
    made = families.launch_sequence(*call[:3])
    *_, found = driver.run(made, call.addresses, call.masks, capturing=True)[0]
    assert (found.constants["split"], found.constants["first_parts"]) == (parts > 1, parts)
    assert found.grid == (min(heads * (32 + parts - 1), 132),)
    of_part = 2 * 128 * (64 // 2 + 4) * 4  # two results, and of each row six numbers, in units of 16 bytes
    assert made.scratch_bytes == 2 * heads * parts * of_part * (parts > 1)
    assert (found.argument["o_part"] > 0) == (parts > 1)


def test_what_has_no_tangent_is_not_read(driver):
    call = prepared(Case("own", n_queries=1000, n_keys=1000, heads=32, kv_heads=8), "jvp", kernel="sm90")
    taken = {name: x for name, x in call.operands.items() if name not in ("tq", "tk")}
    made = families.launch_sequence(replace(call.problem, tangents=("v",)), taken, ())
    (found,), _ = driver.run(made, {**call.addresses, "tq": 0, "tk": 0})
    assert not (found.constants["moves"] or found.constants["tq"] or found.constants["tk"]) and found.constants["tv"]
    assert found.maps[5] == found.maps[0] and found.maps[6] == found.maps[1]


def test_other_calls_are_left_to_the_portable_kernel(driver):
    few = prepared(Case("few", n_queries=64), "jvp")
    assert any("query rows" in note for note in families._choose(*few[:3])[-1])
    many = prepared(Case("many", n_queries=1000, heads=32, kv_heads=32), "jvp")
    assert families._choose(*many[:3])[1] == "sm90"
    call = prepared(Case("wide", head_dim=160), "jvp")
    _, name, notes = families._choose(*call[:3])
    assert name == "sm80" and any("160" in note for note in notes)
    with pytest.raises(UnsupportedError, match="160"):
        families.launch_sequence(replace(call.problem, kernel="sm90"), *call[1:3])


@pytest.mark.parametrize("case", COMPILED + MORE, ids=lambda case: case.name)
def test_spills(case, driver):
    call = prepared(case, "jvp", kernel="sm90")
    assert stack_of(call) <= (0 if call.problem.bias is None else MOST)


def stack_of(call):
    """Return how many bytes a thread of a call's kernel spills."""
    (kernel,) = families.launch_sequence(*call[:3])._kernels
    _, path, _, constants, _, _, traced = kernel._found
    (used,) = kernel_resources(path, constants, "sm_90a", traced).values()
    return used.stack


@pytest.mark.parametrize("name", ["relative_table", "gated"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_score_functions_compile(name, head_dim, driver):
    case = Case("plain", n_queries=150, n_keys=200, head_dim=head_dim)
    assert stack_of(scored(prepared(case, "jvp", kernel="sm90"), SCORES[name](case))) == 0


def test_a_band_takes_the_place_of_a_mask():
    p = jvp_problem(band=CAUSAL)
    assert Jvp.simplify(replace(p, band=None, masks=()), ()) == (replace(p, band=None), ())
