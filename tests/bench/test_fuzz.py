"""The fuzzer finds what is planted, replays what it found, and covers what it says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

import cuattn
from bench.fuzz import __main__ as command
from bench.fuzz.problems import draw_problem, draw_variant
from bench.fuzz.running import Target, run
from bench.fuzz.sharding import draw_plan
from bench.fuzz.workers import Settings, check, outcomes, problem_of
from cuattn.reference import textbook
from tests import oracle
from tests.tolerances import judge


def problems(count, seed=1):
    return [problem_of(Settings(seed), index) for index in range(count)]


def complaints(found):
    return [what for _, outcome in found for what, _ in outcome.complaints]


def test_a_problem_is_its_seed_and_number():
    for one, other in zip(problems(20), problems(20), strict=True):
        assert one.variant == other.variant
        assert one.q.tobytes() == other.q.tobytes() and one.checks == other.checks and one.layouts == other.layouts
    assert problem_of(Settings(2), 0).describe() != problem_of(Settings(1), 0).describe()


def test_everything_that_the_api_takes_comes_up():
    met = set().union(*(problem.features for problem in problems(1500)))
    expected = {
        "float16", "bfloat16", "float32", "float64", "d != dv", "zero size", "rank 2", "grouped", "broadcast",
        "dropout", "softcap", "scale 0", "scale -0.2", "out_dtype", "precision", "dlse", "shards", "out", "twice",
        "deterministic",
        "mask boolean", "mask column", "mask block", "mask and", "mask share_question", "mask random_eviction",
        "bias padding", "bias holes", "bias heads", "band causal", "band window", "bottom_right", "values saturated",
        "values large", "strides negative", "strides spread", "strides unaligned",
    }  # fmt: skip
    assert expected <= met
    assert {name for name in cuattn.masks.__all__ if f"mask {name}" in met} >= {"document", "qk_sparse", "eviction"}


def test_some_problems_hold():
    assert complaints(check(Settings(1), range(60))) == []


PLANTED = {
    "an error of a thousandth": lambda fwd: fwd._replace(o=fwd.o + fwd.o.dtype.type(1e-3)),
    "one wrong row": lambda fwd: fwd._replace(o=np.where(np.arange(fwd.o.shape[-2])[:, None] == 0, 2, fwd.o)),
    "a leaking NaN": lambda fwd: fwd._replace(o=fwd.o * np.nan),
    "a maximum rounded to 16 bits": lambda fwd: fwd._replace(m=fwd.m.astype(np.float16).astype(fwd.m.dtype)),
    "l of another maximum": lambda fwd: fwd._replace(l=2 * fwd.l),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_found(name, monkeypatch):
    forward = cuattn.forward
    monkeypatch.setattr(cuattn, "forward", lambda *arrays, **options: PLANTED[name](forward(*arrays, **options)))
    rng = np.random.default_rng(5)
    variant = draw_variant(rng)
    while variant.dtype != np.float32 or variant.precision or variant.mask != "none" or not variant.head_dim_v:
        variant = draw_variant(rng)
    problem = draw_problem(variant, rng)
    while not problem.do.size or not problem.k.size or "values normal" not in problem.features:
        problem = draw_problem(variant, rng)
    assert run(problem, Target("cpu")).complaints


def test_wrong_gradients_shards_and_bits_are_found(monkeypatch):
    backward, noise = cuattn.backward, np.random.default_rng(0)

    def wrong(*arrays, origin=None, **options):  # drops the origin and is never the same twice
        grads = backward(*arrays, **options)
        return grads._replace(dv=grads.dv + (1e-7 * noise.standard_normal(grads.dv.shape)).astype(grads.dv.dtype))

    monkeypatch.setattr(cuattn, "backward", wrong)
    found = set(complaints(check(Settings(1), range(150))))
    assert "deterministic" in found
    assert any(what.endswith("of shards") for what in found)


def test_the_rule_of_tf32_allows_its_bits_and_no_fewer():
    rng = np.random.default_rng(4)
    names = ("o", "l", "m", "dq", "dk", "dv")
    for problem in problems(120):
        problem = draw_problem(replace(problem.variant, dtype=np.dtype(np.float32), bias=None), rng)
        operands = problem.q, problem.k, problem.v, problem.do
        options = {"visible": problem.visible, "scale": problem.variant.scale, "softcap": problem.variant.softcap}
        exact = oracle.solve(*operands, **options)
        rough = oracle.solve(*operands, **options, dtype=np.float32, precision="tf32")
        floors = oracle.floors(exact, *operands, **options, precision="tf32")

        def share(bits, operands=operands, options=options, exact=exact, rough=rough, floors=floors):
            """Return the largest share of what is allowed with factors wrong by half a unit of so many bits."""

            def wrong(x):
                return x * (1 + rng.choice([-1, 1], x.shape) * 2.0 ** -(1 + bits)).astype(np.float32)

            found = textbook.solve(*operands, **options, low=np.float32, operand=wrong)
            triples = zip(names, *([getattr(x, name) for name in names] for x in (found, exact, rough)), strict=True)
            return max(judge(*triple, floors[triple[0]], np.float32).share for triple in triples)

        assert share(10) <= 1, problem.describe()
        if min(exact.s.shape) > 1 and "values normal" in problem.features and problem.variant.scale is None:
            assert share(5) > 1, problem.describe()


def test_the_parts_of_a_problem_cover_it():
    rng = np.random.default_rng(3)
    for problem in problems(200):
        plan = draw_plan(problem, rng)
        unit = 16 if problem.variant.dropout_p else 1
        for parts, length in ((plan.rows, problem.q.shape[-2]), (plan.keys, problem.k.shape[-2])):
            indices = np.concatenate([np.arange(*piece) for part in parts for piece in part])
            assert np.array_equal(np.sort(indices), np.arange(length))
            assert all(start % unit == 0 for part in parts for start, _ in part)
        heads = np.zeros(problem.lead, int)
        for lead in plan.leading:
            heads[lead] += 1
        assert (heads == 1).all()


def test_processes_report_and_go_on():
    settings = Settings(1)
    found = dict(outcomes(settings, workers=2, first=0, most=45, seconds=60))
    assert sorted(found) == list(range(45))
    assert complaints(found.items()) == []


def test_the_report_says_how_to_replay(tmp_path, monkeypatch):
    def one_bad(settings, workers, first, most, seconds):
        for index in range(first, first + most):
            outcome = run(problem_of(settings, index), Target("cpu"))
            outcome.complaints += [("o", "planted")] * (index == 3)
            yield index, outcome

    monkeypatch.setattr(command, "outcomes", one_bad)
    path = tmp_path / "fuzz.json"
    assert command.main(["--seed", "1", "--problems", "6", "--quiet", "--report", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["complaints"] == [{"replay": "python -m bench.fuzz --replay 1:3", "what": "o", "message": "planted"}]
    assert (report["problems"], report["kernels"]) == (6, {"chosen": 6})
    assert math.isfinite(report["seconds"]) and report["features"] and report["versions"]
    assert command.main(["--replay", "1:3"]) == 0
