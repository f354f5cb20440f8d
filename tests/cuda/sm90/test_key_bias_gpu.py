"""What tensor cores add to scores on a Hopper GPU: biases of keys, linear functions; against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

import cuattn
from tests.cuda.cases import BF16, Case, bias_of, columns_of, same_bits, sized
from tests.cuda.gpu import made
from tests.cuda.scores import Score
from tests.cuda.sm80.test_score_gpu import check, results

pytestmark = pytest.mark.gpu

FLOAT32 = np.dtype(np.float32)
LOWEST = float(np.finfo(np.float32).min)
CASES = [
    *(sized(f"d{d}", 300, 700, d, bias=bias_of(1, 0, 0, 1)) for d in (64, 128)),
    *(sized(f"d{d} causal", 700, 700, d, bias=bias_of(1, 0, 0, 1), options={"is_causal": True}) for d in (64, 128)),
    *(sized(f"d{d} columns", 300, 700, d, bias=bias_of(1, 0, 0, 1), mask=columns_of) for d in (64, 128)),
    *(sized(f"d{d} grouped", 300, 700, d, heads=4, bias=bias_of(1, 1, 0, 1)) for d in (64, 128)),
    sized("d64 dropout", 300, 700, bias=bias_of(1, 0, 0, 1), options={"dropout_p": 0.2, "rng": 3}),
    sized("d128 negative scale", 300, 700, 128, bias=bias_of(1, 0, 0, 1, dtype=BF16), options={"scale": -0.3}),
]
PADDED = {
    "quarter": np.s_[..., 525:],
    "first": np.s_[..., :300],
    "inner": np.s_[..., 250:520],
    "sequence": np.s_[0],  # all of its keys, and some of the other's
    "every third": np.s_[..., ::3],
}


def padded(case: Case, where: str, lowest: float, rest: float | None):
    """Return a problem whose bias is `lowest` somewhere, and `rest` elsewhere, if that is given."""
    problem = made(case)
    bias = problem.options["bias"]
    if rest is not None:
        bias[...] = rest
    bias[PADDED[where]] = lowest
    if where == "sequence":
        bias[1:, ..., 600:] = lowest
    return problem


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("lowest", [-np.inf, LOWEST, -1e9])
@pytest.mark.parametrize(
    ("where", "rest"), [*((where, 0.0) for where in PADDED), ("quarter", None), ("sequence", None)]
)
def test_padding(case, lowest, where, rest):
    """Finite biases hide only beside higher ones: throughout a row they give the mean of v."""
    if case.name.endswith("scale") and lowest == LOWEST:
        lowest = -3.3895314e38  # the least bfloat16
    problem = padded(case, where, lowest, rest)
    problem.check(problem.forward("sm90"))
    # Outliers look at one key, and of what dropout keeps o, rounded, is no number of v.
    problem.check(problem.backward("sm90"), peaked="dropout" in case.name)


@pytest.mark.parametrize("options", [{}, {"is_causal": "bottom_right"}], ids=str)
@pytest.mark.parametrize("n_keys", [300, 1500])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_what_hidden_keys_hold(head_dim, n_keys, options):
    """Of tiles in which a bias hides keys here and there, NaN in their rows of k and v does not matter."""
    problem = made(sized("hidden", 300, n_keys, head_dim, bias=bias_of(1, 0, 0, 1), options=options))
    problem.options["bias"][..., ::3] = problem.options["bias"][..., 70:100] = -np.inf
    for x in problem.qkv[1:]:
        x[..., ::3, :] = x[..., 70:100, :] = np.nan
    seen = problem._replace(qkv=[problem.qkv[0], *(np.nan_to_num(x) for x in problem.qkv[1:])])
    actual = problem.forward("sm90")
    same_bits(actual, seen.forward("sm90"))
    seen.check(actual)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_bias_of_zero_is_no_bias(head_dim):
    problem = made(sized("zero", 300, 700, head_dim))
    zero = np.zeros((2, 1, 1, 700), np.float32)
    same_bits(problem.forward("sm90", bias=zero), problem.forward("sm90"))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [1e-3, 30.0, 1e3, 3e4, 1e6])
def test_sizes(head_dim, size):
    problem = made(sized(f"sized {size}", 300, 700, head_dim, bias=bias_of(1, 0, 0, 1)))
    problem.options["bias"] *= np.float32(size)
    problem.check(problem.forward("sm90"))
    # Of large ones most rows see one key, or as good as one.
    problem.check(problem.backward("sm90", deterministic=True), peaked=size > 1e3)


LINEAR = {
    "gentle": Score(lambda s, b, h, i, j, slope: s + slope[h] * (j - i), (0.1 * np.arange(-1, 3, dtype=np.float32),)),
    "steep": Score(
        lambda s, b, h, i, j, slope: s + slope[h] * (j - i), (np.array([-9, 7, 300, 0], np.int32),)
    ),  # far rows
    "sum": Score(lambda s, b, h, i, j: s + (0.03 * j - i / 17 + h - b)),
    "keys": Score(lambda s, b, h, i, j, x: s + x[b, j], (np.random.default_rng(2).normal(size=(2, 700)).astype("f"),)),
    "rows": Score(lambda s, b, h, i, j, x: s - x * i, (0.5,)),
}
FUNCTIONS = [case._replace(bias=None) for case in CASES if "dropout" not in case.name]


@pytest.mark.parametrize("case", FUNCTIONS, ids=lambda case: case.name)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_functions(name, case):
    problem, score = made(case), LINEAR[name]
    score = score._replace(args=tuple(x[: case.heads] if np.ndim(x) == 1 else x for x in score.args))
    check(problem, score, results(problem, score, name == "steep", "sm90"))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_function_of_keys_pads(head_dim):
    problem, x = made(sized("padded", 300, 700, head_dim)), np.zeros((2, 700), np.float32)
    x[0, 400:], x[1] = -np.inf, LOWEST
    bias = {"bias": x[:, None, None]}
    forward = cuattn.forward(*problem.arrays()[1:], kernel="sm90", score=lambda s, b, h, i, j: s + x[b, j])
    problem._replace(options=bias).check([part.get() for part in forward[:3]])
