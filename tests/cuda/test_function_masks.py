"""Mask functions in kernels, without a GPU: everything that a call launches compiles for three generations."""

import dataclasses

import numpy as np
import pytest

from cuattn.cuda import call, families, source
from cuattn.cuda import compile as compiler
from cuattn.cuda.params import MASK_PARAMS, PARAMS
from cuattn.masks import BooleanMask, causal_document, from_function
from tests.cuda.cases import bias_of, sized
from tests.cuda.nvrtc import resources
from tests.cuda.recording import H200, operands, prepared, scored
from tests.cuda.recording import driver as driver
from tests.cuda.scores import SCORES
from tests.cuda.sm90.test_forward_plan import problem as problem_of

N = 4096
GROUPS = np.random.default_rng(0).integers(0, 4, N)
NEIGHBOURS = from_function(lambda b, h, i, j: (abs(i // 64 - j // 64) <= 6) & (abs(i % 64 - j % 64) <= 6), N)
BY_HEAD = from_function(lambda b, h, i, j: ((i - j) % (h + 2) == 0) & (GROUPS[i] == GROUPS[j]), N, heads=16)
BESIDE = NEIGHBOURS, causal_document([1000, N - 1000]), BooleanMask(np.ones((1, N), bool))


def launches(masks, operation, **changes):
    """Return the kernels of a call, and of its tables."""
    p = problem_of(masks=tuple(mask.kind for mask in masks), operation=operation, **changes)
    made = families.launch_sequence(p, operands(p), masks)
    return [*made._kernels, *(kernel for table in made._tables for kernel in table._kernels)]


def spills(kernels, arch):
    """Compile those with a function; return what uses local memory."""
    found = {}
    for kernel in (kernel for kernel in kernels if kernel._found[-1]):
        _, path, _, constants, _, exact, text = kernel._found
        used = resources(source.build(path, dict(constants), text), "sm_90a" if exact else arch, path)
        found |= {f"{path} {name}": each.stack for name, each in used.items() if each.stack}
    return found


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_spills(arch, operation, driver, monkeypatch):
    if arch != "sm_90":
        monkeypatch.setattr(call, "device_of", lambda number: H200._replace(arch=arch, shared_bytes=101376))
    kernels = launches([BY_HEAD], operation, kernel="sm90" if arch == "sm_90" else "sm80")
    assert any("mask_states" in kernel._found[1] for kernel in kernels)
    assert not spills(kernels, arch)


def test_beside_other_masks(driver):
    assert not spills(launches(BESIDE, "forward", kernel="sm90"), "sm_90")


@pytest.mark.parametrize(("n", "kind"), [(N, "boolean"), (8 * N, "function")])
def test_few_bits_are_computed_ahead(n, kind, driver):
    """The kernel that reads them is that of a boolean mask, and knows no function."""
    mask = from_function(lambda b, h, i, j: (i - j) % 7 == 0, n)
    p = problem_of(masks=("function",), heads=2, kv_heads=2, n_queries=n, n_keys=n, operation="backward")
    made = families.launch_sequence(p, operands(p), [mask])
    assert [table._problem.masks for table in made._tables] == [(kind,)]
    assert any(kernel._found[-1] for kernel in made._kernels) == (kind == "function")
    boolean = families.launch_sequence(
        dataclasses.replace(p, masks=("boolean",)), operands(p), [BooleanMask(np.broadcast_to(np.bool_(1), (n, n)))]
    )
    same = [one._found[1:4] == other._found[1:4] for one, other in zip(made._kernels, boolean._kernels, strict=True)]
    assert all(same) == (kind == "boolean")
    assert (made._tables[0].nbytes > n * n // 8) == (kind == "boolean")


PASSES = {
    "rows": ({"head_dim": 256, "options": {"softcap": 9.0, "dropout_p": 0.1, "rng": 1}}, None, "sm90/bwd_rows.cu"),
    "bias": ({"bias": bias_of(0, 1, 1, 1)}, None, "sm90/bwd_dbias.cu"),
    "arrays": ({}, "graph", "sm90/bwd_score.cu"),
}


@pytest.mark.parametrize("which", PASSES)
def test_elements_computed_ahead_are_read_as_bits(which, driver):
    """There is no boolean array then: no kernel's code depends on what its argument says of one."""
    changes, score, path = PASSES[which]
    case = sized("ahead", 300, 400, mask=lambda *_: from_function(lambda b, h, i, j: (i + j) % 3 > 0, 300, 400))
    case = case._replace(**changes)
    call = prepared(case, "backward", kernel="sm90")
    call = scored(call, SCORES[score](case)) if score else call
    made = families.launch_sequence(call.problem, call.operands, call.masks)
    assert {table._problem.masks for table in made._tables} == {("boolean",)}
    (kernel,) = (kernel for kernel in made._kernels if kernel._found[1] == path)
    text = source.build(path, dict(kernel._found[3]), kernel._found[-1])
    other = text.replace("p.boolean", "p.mask")
    assert text != other
    assert compiler.compile_cubin(text, "sm_90a", path) == compiler.compile_cubin(other, "sm_90a", path)


def test_arguments(driver):
    """What a function reads follows both structs; its arrays come behind the indices of rows and keys."""
    kernels = launches([BY_HEAD], "forward", kernel="sm90")
    main = next(kernel for kernel in kernels if kernel._found[1] == "sm90/fwd.cu")
    tables = [kernel for kernel in kernels if kernel._found[1].startswith("util/mask")]
    assert {"visible.array0", "visible.array1"} & {*main.dtype.names}
    assert main.dtype.names[: len(PARAMS.names)] == PARAMS.names
    assert all(kernel.dtype.names[: len(MASK_PARAMS.names)] == MASK_PARAMS.names for kernel in tables)
    assert not main.is_traced and main.is_placed


def test_numbers_tell_masks_apart():
    first, second = (from_function(lambda b, h, i, j, x=x: np.sin(x * i) > np.cos(j), 64) for x in (0.25, 0.5))
    assert first.layout != second.layout and first.generated["visible"].text == second.generated["visible"].text


def test_rows_and_keys_have_strides_that_merge(driver):
    mask = from_function(lambda b, h, i, j: (i - j) % (2 * b + h + 1) == 0, N, batch=2, heads=16)
    p = dataclasses.replace(problem_of(), masks=("function",))
    made = families.launch_sequence(p, operands(p), [mask])
    argument = driver.run(made, {"q": 1, "k": 2, "v": 3}, [mask], capturing=True)[0][-1].argument
    assert (argument["function.batch"][-1], argument["function.head"], argument["matrices.heads"]) == (16, 1, 16)
