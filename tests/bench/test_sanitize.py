"""The list for compute-sanitizer holds every feature and every way that kernels take it, and all of it is legal."""

from pathlib import Path

import numpy as np
import pytest

from bench import sanitize
from cuattn.cuda.families import launch_sequence
from cuattn.cuda.sm90.bias import Dbias
from cuattn.masks import from_function
from tests.cuda.recording import driver as driver
from tests.cuda.recording import scored, validated
from tests.cuda.scores import Score

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def test_every_dtype_group_and_width_is_there():
    found = sanitize.problems()
    assert {(x.kernel, np.dtype(x.dtype)) for x in found} == {
        (kernel, np.dtype(dtype)) for kernel, dtypes in sanitize.DTYPES.items() for dtype in dtypes
    }
    for kernel, dtypes in sanitize.DTYPES.items():
        for dtype in dtypes:
            cases = [x.case for x in found if (x.kernel, x.dtype) == (kernel, dtype)]
            assert any(case.heads > case.kv_heads and case.head_dim_v for case in cases)
    used = {option for x in found for option in x.options}
    assert used >= {
        "mask",
        "bias",
        "softcap",
        "dropout_p",
        "window",
        "is_causal",
        "deterministic",
        "out_dtype",
        "score",
    }


@pytest.mark.parametrize("feature", (*sanitize.FEATURES, *sanitize.WIDE, *sanitize.IN_ONE_DTYPE), ids=str)
def test_problems_are_legal(feature):
    calls = sanitize.Problem("cpu", np.float32, *feature, ()).calls(np)
    assert all(np.isfinite(x).all() for x in (*calls.both(), sanitize.joined(calls).o))


@pytest.mark.parametrize("feature", sanitize.TANGENTS, ids=str)
def test_problems_along_tangents_are_legal(feature):
    calls = sanitize.Problem("cpu", np.float32, *feature, ()).calls(np)
    jvp, (gradients, tangents), double = calls.jvp(), calls.backward_jvp(), calls.double_backward()
    assert all(np.isfinite(x).all() for x in (jvp.to, jvp.tlse, *gradients[:3], *tangents[:3], *double[:4]))


def kernels(problem, operation):
    """Return path and constants of what a problem launches."""
    calls = problem.calls(np)
    options = {"kernel": problem.kernel, **calls.options, **calls.first}
    score, args, exact = options.pop("score", None), options.pop("score_args", ()), calls.exact
    if callable(mask := options.get("mask")):
        shape = problem.case.n_queries, problem.case.n_keys
        options["mask"] = from_function(mask, *shape, batch=problem.case.batch, heads=problem.case.heads)
    call = validated(calls.operands, options, operation, **(exact if "backward" in operation else {}))
    call = call if score is None else scored(call, Score(score, args))
    made = launch_sequence(*call[:3])
    found = [*made._kernels, *(kernel for table in made._tables for kernel in table._kernels)]
    return [(kernel._found[1], dict(kernel._found[3])) for kernel in found]


@pytest.fixture
def launched(driver):
    """Paths and constants of all that is launched, by operation; a family that does not take its problem raises."""
    found = {}
    for problem in sanitize.problems():
        for operation in problem.operations:
            found.setdefault(operation, []).extend(kernels(problem, operation))
    return found


def test_every_kernel_and_every_way_to_take_a_bias_and_a_function_is_there(launched):
    def ways(operation, *names):
        return {tuple(constants.get(name) for name in names) for _, constants in launched[operation]}

    paths = {path for taken in launched.values() for path, _ in taken}
    for family in ("sm80", "sm90"):
        files = [file for some in ("fwd", "bwd", "jvp") for file in (KERNELS / family).glob(f"{some}*.cu")]
        assert paths >= {f"{family}/{file.name}" for file in files}
    assert paths >= {f"util/{name}.cu" for name in ("mask_bits", "mask_states", "mask_bounds", "score_sums")}
    assert "util/bwd_jvp_rows.cu" in paths
    forms = {(True, False, False), (False, True, False), (False, False, True), (False, False, False)}
    assert ways("forward", "bias", "bias_tiles", "bias_keys", "bias_rows") >= {(True, *form) for form in forms}
    in_order = {(form, True) for form in Dbias}
    assert ways("backward", "dbias", "deterministic") >= in_order
    assert {walk for (walk,) in ways("backward", "walk")} >= {*range(4)}  # keys, rows, diagonals, heads
    assert {kind for (kind,) in ways("backward", "gathers")} >= {*range(4)}  # nothing, heads, lines, slices


@pytest.mark.gpu
def test_each_family_computes_its_first_and_its_last_problem():
    for kernel in sanitize.DTYPES:
        for problem in sanitize.problems([kernel])[:: len(sanitize.problems([kernel])) - 1]:
            assert problem.run() == " and ".join(problem.operations), problem
