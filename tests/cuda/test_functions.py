"""Score functions as kernels take them: their text in place of its stub, their arguments behind ``CoreParams``."""

import dataclasses

import numpy as np
import pytest

from cuattn.cuda import source
from cuattn.cuda.functions import Functions
from cuattn.cuda.params import PARAMS, derived
from cuattn.masks import from_function
from cuattn.problem import ScoreFunction
from cuattn.tracing import SCORE, facts, trace
from tests.cuda.cases import case_of
from tests.cuda.nvrtc import compile_log
from tests.cuda.sm80.test_forward_plan import problem_of

TABLE, DOC = np.zeros((4, 99), np.float16), np.zeros((2, 3, 500), np.int64)
PLACES = np.arange(100) % 7


def functions_of(function, args=(), name="d64"):
    """Return what kernels take of a score function, and its numbers."""
    bound = trace(function, SCORE, args).bind(args)
    problem = problem_of(case_of(name))
    problem = dataclasses.replace(problem, score=ScoreFunction(bound.root, facts(bound)))
    arrays = dict(zip(problem.score.names, bound.arrays, strict=True))
    return Functions(problem, arrays), bound.numbers


def everything(s, b, h, i, j, table, doc, cap, flag, step):
    read = table[h, i - j + 40] + 0.5 * doc[b, h, j]
    return np.where(flag, cap * np.tanh(s / cap), s) + read * 1.5 + i * step


def visible(b, h, i, j):
    return (j - i) % (4 + h) < 3


def near(b, h, i, j):
    return np.sin(0.25 * i) + PLACES[j] > h


@pytest.mark.parametrize("shown", [None, visible, near])
@pytest.mark.parametrize(
    ("score", "args"),
    [
        (everything, (TABLE, DOC, 30.0, True, 2**40)),
        (lambda s, b, h, i, j, x: s + x, (0.75,)),  # a number of the sums' type alone
        (lambda s, b, h, i, j: s + h, ()),
    ],
    ids=["everything", "a number", "nothing"],
)
@pytest.mark.parametrize("name", ["d64", "float64 d64"])
def test_the_structs_are_what_python_fills(name, score, args, shown):
    """Each function's arguments, and what a kernel takes behind them."""
    made, _ = functions_of(score, args, name)
    mask = shown and from_function(shown, 100, heads=2).generated["visible"]
    both = derived(made.dtype, mask.arguments.dtype, "traced::mask.") if mask else made.dtype
    dtype = derived(both, np.dtype([("last", np.int32), ("behind", np.uint64)], align=True), "Own.")
    lines = ["struct Own { i32 last; u64 behind; };", "struct All : Params, Own {};"]
    lines += [f"static_assert(sizeof(CoreParams) == {PARAMS.itemsize});"]
    lines += [f"static_assert(sizeof(Params) == {both.itemsize});", f"static_assert(sizeof(All) == {dtype.itemsize});"]
    for number, field in enumerate(dtype.names[len(PARAMS) :]):
        struct, _, member = field.rpartition(".")
        of = "Own" if struct == "Own" else f"{struct}::Arguments"
        lines.append(f"struct Of{number} : All {{ using {of}::{member}; }};")  # one of two members of that name
        at = dtype.fields[field][1]
        lines.append(f'static_assert(__builtin_offsetof(Of{number}, {member}) == {at}, "{field}");')
    texts = source.functions_text(made.text, mask.text if mask else "")
    text = source.flatten_text('#include "attn/params.cuh"\n' + "\n".join(lines), "check.cu", None, texts)
    compile_log(text, "sm_80")


def test_arrays_lie_where_operands_do():
    made, _ = functions_of(everything, (TABLE, DOC, 30.0, True, 2**40))
    assert made.slots == {"traced.array0": "score0", "traced.array1": "score1"}
    assert made.values["traced.stride1_1"] == 500


def test_without_functions_nothing_follows():
    program = source.flatten_text('#include "attn/params.cuh"\nstatic_assert(sizeof(Params) == sizeof(CoreParams));\n')
    compile_log(program, "sm_80")


def test_numbers_are_told_apart():
    made, (*_, half) = functions_of(lambda s, b, h, i, j, x, y: s * x + (y + 1.0) * 0.5, (1.0, 0.5))
    words = [made.changes((x, 3.0, half)) for x in (0.0, -0.0, 0.0)]
    assert words[0] == words[2] != words[1]
    record = np.zeros((), made.dtype)
    halves = record.reshape(1).view(np.uint32)
    for word, value in words[1]:
        halves[word] = value
    fields = {field for field in made.dtype.names if field.startswith("traced.number")}
    assert sorted(str(float(record[field])) for field in fields) == ["-0.0", "2.0"]
    assert all(not record[field].any() for field in set(made.dtype.names) - fields)


def test_equal_functions_share_a_text():
    first, second = functions_of(lambda s, b, h, i, j: s + 0.25 * j), functions_of(lambda s, b, h, i, j: s + 7.5 * j)
    assert first[0].text == second[0].text and first[1] != second[1]
