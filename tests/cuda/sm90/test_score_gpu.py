"""Score functions in Hopper's forward on a GPU against the float64 oracle."""

from __future__ import annotations

import pytest

import cuattn
from cuattn.errors import UnsupportedError
from tests.cuda import scores
from tests.cuda.cases import BF16, F16, Case, bias_of, blocks_of, columns_of, same_bits, to_device
from tests.cuda.gpu import made
from tests.cuda.gpu import poisoned_memory as poisoned_memory
from tests.cuda.sm80.test_score_gpu import check

pytestmark = pytest.mark.gpu

DROPPED = {"dropout_p": 0.25, "rng": 9}
PLAIN = Case("plain", n_queries=300, n_keys=408)
CASES = [
    PLAIN,
    PLAIN._replace(name="float16 d128 causal", dtype=F16, head_dim=128, options={"is_causal": "bottom_right"}),
    PLAIN._replace(name="column dropout", head_dim=128, mask=columns_of, options=DROPPED),
    PLAIN._replace(name="grouped window", heads=4, options={"window": (60, 20, "top_left")}),
    PLAIN._replace(name="blocks", n_keys=640, mask=blocks_of(128, 64)),
    PLAIN._replace(name="softcap", options={"softcap": 6.0, "scale": -0.2}),
    PLAIN._replace(name="d256", head_dim=256),
    PLAIN._replace(name="bias", head_dim=128, bias=bias_of(0, 1, 1, 1, dtype=BF16)),
    PLAIN._replace(name="key bias", bias=bias_of(1, 0, 0, 1), options={"is_causal": "top_left"}),
]


def forward(problem, score, **more):
    """Return o, l, m with a score function."""
    options = {name: to_device(value) for name, value in problem.options.items()}
    args = tuple(map(to_device, score.args))
    more = {"kernel": "sm90", "score": score.function, "score_args": args, **more}
    return [x.get() for x in cuattn.forward(*problem.arrays()[1:], **options, **more)[:3]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", scores.SCORES)
def test_oracle(name, case):
    problem, score = made(case), scores.SCORES[name](case)
    if name == "hidden" and case.name == "blocks":  # what the function hides would be a second mask
        with pytest.raises(UnsupportedError, match="block mask alone"):
            forward(problem, score)
        return
    check(problem, score, forward(problem, score))


@pytest.mark.parametrize("kernel", ["sm90", "sm80"])
def test_an_identity_is_no_function(kernel):
    problem = made(PLAIN)
    same_bits(forward(problem, scores.Score(lambda s, b, h, i, j: s), kernel=kernel), problem.forward(kernel))
