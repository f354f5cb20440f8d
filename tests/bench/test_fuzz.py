"""The fuzzer finds what is planted, replays what it found, and covers what it says."""

import itertools
import json
import math
from functools import wraps

import numpy as np
import pytest

import cuattn
from bench.fuzz import __main__ as command
from bench.fuzz.problems import LAYOUTS, draw_problem
from bench.fuzz.running import Target, lay, run
from bench.fuzz.sharding import draw_parts
from bench.fuzz.workers import CHUNK, Settings, check, outcomes, problem_of
from cuattn.reference import textbook
from tests import oracle
from tests.tolerances import judge


def problems(count, seed=1):
    return [problem_of(Settings(seed), index) for index in range(count)]


def complaints(found):
    return [what for _, outcome in found for what, _ in outcome.complaints]


def test_a_problem_is_its_seed_and_number():
    for one, other in zip(problems(20), problems(20), strict=True):
        assert (one.features, one.checks, one.layouts) == (other.features, other.checks, other.layouts)
        assert [x.tobytes() for x in one.arrays.values()] == [x.tobytes() for x in other.arrays.values()]
    assert problem_of(Settings(2), 0).describe() != problem_of(Settings(1), 0).describe()


def test_a_chunk_shares_what_a_gpu_compiles_for():
    settings = Settings(1, "cuda")
    for first in range(0, 4 * CHUNK, CHUNK):
        drawn = [problem_of(settings, index) for index in range(first, first + 10)]
        fixed = {(x.dtype, x.arrays["q"].shape[-1], "bias" in x.arrays, x.options.get("softcap")) for x in drawn}
        assert len(fixed) == 1 and len({x.shape for x in drawn}) > 1


@pytest.mark.parametrize("kind", LAYOUTS)
def test_strides_change_no_number(kind):
    for shape in ((), (0,), (5,), (3, 4), (2, 3, 4), (2, 1, 3, 4), (2, 0, 3)):
        x = np.arange(np.prod(shape)).reshape(shape).astype(np.float32)
        if kind == "spread" and len(shape) > 2:
            x[...] = x[:1]
        assert np.array_equal(lay(np.asarray, x, kind), x)


def test_everything_that_the_api_takes_comes_up():
    met = set().union(*(problem.features for problem in problems(1500)))
    expected = {
        "float16", "bfloat16", "float32", "float64", "d != dv", "zero size", "rank 2", "grouped", "broadcast",
        "dropout", "softcap", "scale 0", "scale -0.2", "out_dtype", "precision", "dlse", "shards", "out", "twice",
        "deterministic", "tangents",
        "mask boolean", "mask column", "mask block", "mask function", "mask and", "mask share_question",
        "mask random_eviction", "score s", "score np.where",
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

    @wraps(forward)
    def planted(*arrays, **options):
        return PLANTED[name](forward(*arrays, **options))

    monkeypatch.setattr(cuattn, "forward", planted)
    rng = np.random.default_rng(5)
    plain = {"float32", "values normal"}
    problem = draw_problem(rng, rng)
    while not plain <= problem.features or problem.options or problem.mask is not None or not problem.arrays["v"].size:
        problem = draw_problem(rng, rng)
    assert {what for what, _ in run(problem, Target("cpu")).complaints} & {"o", "l", "m"}


def test_wrong_gradients_shards_and_bits_are_found(monkeypatch):
    backward, noise = cuattn.backward, np.random.default_rng(0)

    @wraps(backward)
    def wrong(*arrays, origin=None, **options):  # drops the origin and is never the same twice
        grads = backward(*arrays, **options)
        return grads._replace(dv=grads.dv + (1e-7 * noise.standard_normal(grads.dv.shape)).astype(grads.dv.dtype))

    monkeypatch.setattr(cuattn, "backward", wrong)
    found = set(complaints(check(Settings(1), range(150))))
    assert "backward twice" in found
    assert any(what.endswith("of shards") for what in found)


def test_wrong_derivatives_are_found(monkeypatch):
    jvp = cuattn.jvp

    @wraps(jvp)
    def wrong(*arrays, **options):
        found = jvp(*arrays, **options)
        return found._replace(to=found.to * found.to.dtype.type(1.001))

    monkeypatch.setattr(cuattn, "jvp", wrong)
    found = complaints(check(Settings(1), range(60)))
    assert "to along tangents" in found


def test_the_rule_of_tf32_allows_its_bits_and_no_fewer():
    rng = np.random.default_rng(4)
    names = ("o", "l", "m", "dq", "dk", "dv")
    for problem in [problem for problem in problems(200) if problem.dtype == np.float32]:
        operands = [problem.arrays[name] for name in ("q", "k", "v", "do")]
        options = {name: problem.options.get(name) for name in ("scale", "softcap")} | {"visible": problem.visible}
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
        plain = "values normal" in problem.features and "scale" not in problem.options
        if min(exact.s.shape) > 1 and exact.l.any() and plain:
            assert share(5) > 1, problem.describe()


def test_the_parts_of_a_problem_cover_it():
    rng = np.random.default_rng(3)
    for problem in problems(200):
        unit = 16 if "dropout_p" in problem.options else 1
        scores = np.zeros(problem.shape, int)
        for part in itertools.chain.from_iterable(draw_parts(problem, rng)):
            assert all(start % unit == 0 for axis in "rk" for start, _ in part.cuts[axis])
            scores[part.index("bias", scores)] += 1
        assert (scores == 1).all()


def test_processes_report_and_go_on():
    settings = Settings(1)
    found = dict(outcomes(settings, [range(30), range(30, 45)], 2, 60))
    assert sorted(found) == list(range(45))
    assert complaints(found.items()) == []


def test_the_report_says_how_to_replay(tmp_path, monkeypatch):
    def one_bad(settings, chunks, workers, seconds):
        for index in itertools.chain.from_iterable(chunks):
            outcome = run(problem_of(settings, index), Target("cpu"))
            outcome.complaints += [("o", "planted")] * (index == 3)
            yield index, outcome

    monkeypatch.setattr(command, "outcomes", one_bad)
    path = tmp_path / "fuzz.json"
    assert command.main(["--seed", "1", "--problems", "6", "--quiet", "--report", str(path)]) == 1
    report = json.loads(path.read_text())
    assert report["complaints"] == [{"replay": "python -m bench.fuzz --replay 1:3", "what": "o", "message": "planted"}]
    assert report["problems"] == 6 and set(report["kernels"]) <= {"forward cpu", "backward cpu"}
    assert math.isfinite(report["seconds"]) and report["features"] and report["versions"]
    assert command.main(["--replay", "1:3,4"]) == 0
