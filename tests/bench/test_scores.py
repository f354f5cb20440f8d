"""The functions of scores and masks: the same in NumPy and PyTorch, traced and compiled; measured and summed up."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bench.cases import BOTH, TABLES, Case, select
from bench.score_samples import FORMULAS, formula
from cuattn import tracing

torch = pytest.importorskip("torch")

from bench import bars, inputs, scores, suites  # noqa: E402
from bench.compare import Comparison  # noqa: E402
from bench.harness import matches  # noqa: E402
from bench.peers import make  # noqa: E402

SHAPE = (2, 4, 192, 192)


def case(name, direction="forward", **options):
    return Case("t", direction, 2, 4, 4, 192, 192, 16, dtype="float32", score=name, **options)


def indices():
    """The grids b, h, i and j, of arrays."""
    return [x.astype(np.int32) for x in np.ogrid[tuple(map(slice, SHAPE))]]


@pytest.mark.parametrize("name", [name for name in FORMULAS if formula(case(name)).visible])
def test_what_is_visible_is_the_same_in_numpy_and_pytorch(name):
    made = inputs.make(case(name), "cpu")
    found, grid = formula(made.case), indices()
    bound = tracing.trace(lambda b, h, i, j: found.visible(b, h, i, j, **found.given), tracing.MASK).bind()
    ours = tracing.evaluate(bound, dict(zip("bhij", grid, strict=True)), limits=SHAPE)
    theirs = made.functions({})[1](*map(torch.from_numpy, grid)).expand(SHAPE).numpy()
    np.testing.assert_array_equal(np.broadcast_to(ours, SHAPE), theirs)
    assert 0.02 < theirs.mean() < 0.8
    assert made.rho < 1


@pytest.mark.parametrize("name", [name for name in FORMULAS if formula(case(name)).score])
def test_scores_are_the_same_in_numpy_and_pytorch(name):
    """Traced and differentiated by cuattn, and by PyTorch: values, slopes, gradients of arrays."""
    made = inputs.make(case(name), "cpu")
    found, grid = formula(made.case), indices()
    s, cotangent = np.random.default_rng(0).normal(size=(2, *SHAPE), scale=9.0)
    args = tuple(x.numpy() for x in made.arrays.values())
    function = tracing.trace(lambda s, b, h, i, j, *args: found.score(s, b, h, i, j, *args, **found.given), args=args)
    bound = function.bind(args)

    def ours(root, dtype=None):
        return np.broadcast_to(tracing.evaluate(bound.of(root), variables, dtype or np.float64, SHAPE), SHAPE)

    variables = {**dict(zip("bhij", grid, strict=True)), "s": s}
    arrays = {key: x.double().requires_grad_() for key, x in made.arrays.items()}
    x = torch.from_numpy(s).requires_grad_()
    result = made.functions(arrays)[0](x, *map(torch.from_numpy, grid))
    np.testing.assert_allclose(ours(bound.root), result.detach(), rtol=1e-6, atol=1e-6)
    ds, *gradients = torch.autograd.grad(result, [x, *arrays.values()], torch.from_numpy(cotangent))
    np.testing.assert_allclose(ours(tracing.derivative(bound.root)) * cotangent, ds, rtol=1e-6, atol=1e-9)
    for array, wanted in zip(args, gradients, strict=True):
        gradient = np.zeros(wanted.shape)
        (slot,) = (slot for slot, x in enumerate(bound.arrays) if x is array)
        for weight in tracing.weights(bound.root, slot):
            np.add.at(gradient, tuple(map(ours, weight.indices)), cotangent * ours(weight.weight))
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6, atol=1e-6)


def test_the_reference_differentiates_learned_arrays():
    """Its gradient of a part of an array is PyTorch's, of the whole batch."""
    made = inputs.make(case("relative", "backward", learned=True), "cpu")
    arrays = {key: x.double().requires_grad_() for key, x in made.arrays.items()}
    q, k, v, do = (x.double() for x in made.operands)
    s = made.functions(arrays)[0](q @ k.mT * 16**-0.5, *map(torch.from_numpy, indices()))
    (wanted,) = torch.autograd.grad(s.softmax(-1) @ v, arrays.values(), do)
    reference = inputs.reference(made, True, False)
    (errors,) = reference.errors({"dtable": wanted}, peer=False).values()
    assert errors["of_allowed"] < 0.01
    assert errors["distance"] < 1e-9
    (errors,) = reference.errors({"dtable": 1.001 * wanted}, peer=False).values()
    assert errors["of_allowed"] > 1


@pytest.mark.parametrize("name", ["slopes", "temperature"])
def test_single_numbers_of_all_heads_are_judged_together(name):
    """One number's error is luck, but a wrong one is seen, whose head it is."""
    made = inputs.make(replace(case(name, "backward", learned=True), dtype="bfloat16"), "cpu")
    reference = inputs.reference(made, True, False)
    (name,) = reference.sums
    heads, exact, rough = reference.gradient(name)
    assert sorted(heads) == [(h,) for h in range(made.case.heads)]
    most = (rough - exact).abs().max()
    for place in range(len(heads)):
        for error, right in ((most, True), (2.5 * most + 0.02 * exact.abs().max(), False)):
            gradient = torch.zeros_like(exact)
            for head, x in zip(heads, exact, strict=True):
                gradient[head] = x
            gradient[heads[place]] += error
            (found,) = reference.errors({name: gradient}, peer=False).values()
            assert (found["of_allowed"] <= 1) == right


def rows(**times):
    """Rows of one case, by runner."""
    return [
        {"case": "scores/d128-N4096-causal-softcap/forward", "runner": name.replace("_", "-"), "median_us": us}
        for name, us in times.items()
    ]


def test_bars_are_counted_beside_the_fastest_peer():
    lines = {
        line["what"]: line
        for line in bars.standings(bars.BARS["scores"], rows(cuattn=10, cuattn_without=8, flex=15, fa4=12))
    }
    assert lines["every score"]["mean"] == pytest.approx(1.2)
    assert not lines["every score"]["met"]
    assert lines["softcap, causal, N 4096, d 128: forward"]["met"]
    failed = [{"case": "scores/d64/backward", "runner": "cuattn"}, {"case": "scores/d64/backward", "runner": "flex"}]
    failed[1]["median_us"] = 3.0
    assert bars.standings(bars.BARS["scores"], failed)[0]["worst"] == 0


def test_limits_of_the_host_are_pytorchs_time_where_the_machine_is_slow():
    ours = {"case": "host/d64-N256-full/backward", "runner": "cuattn", "rate": 35.0}
    for plain, limit, met in ((10.0, "<= 25", False), (18.0, "<= 36", True)):
        case, runner = bars.PLAIN
        rows = [ours, {"case": case, "runner": runner, "rate": plain}]
        (line,) = bars.standings(bars.BARS["portable"], rows)
        assert (line["to reach"], line["met"]) == (limit, met)


def test_limits_count_what_a_function_costs_beyond_the_plain_call():
    plain, alibi = ({"case": f"scores-host/d64-N256-full{end}/forward", "runner": "cuattn", "rate": rate}
                    for end, rate in (("", 9.0), ("-alibi", 10.5)))  # fmt: skip
    (line,) = bars.standings(bars.BARS["scores"], [plain, alibi])
    assert line["worst"] == pytest.approx(1.5)
    assert line["met"]


@pytest.mark.parametrize("name", ["document_ids", "natten"])
def test_making_tables_is_measured(name):
    (row,) = scores.measure(name, 192, "cpu").values()
    assert row["median_us"] > 0
    assert row["mask_bytes"] >= 0
    assert ("ColumnMask" in row["mask"]) == (name == "document_ids")


def test_quick_cases_and_those_of_bars_exist():
    tables = suites.parser("scores").parse_args(["--device", "cuda"])
    names = [case.name for case in select(TABLES)] + [point.case for point in scores.points(tables)]
    for pattern in suites.SUITES["scores"].quick:
        assert any(matches(name, [pattern]) for name in names), pattern
    for bar in itertools.chain(*bars.BARS.values()):
        known = bar.cases.startswith("scores-first-call")
        assert known or any(matches(name, bar.cases.split()) for name in names), bar


def measured(name, direction, runners, **options):
    """The rows of a tiny case on the host, in the bench's dtype."""
    learned = bool(formula(case(name)).arrays)
    problem = replace(case(name, direction, **{"learned": learned, **options}), dtype="bfloat16")
    rows = Comparison("cpu", seconds=0.0, least=2, most=2).measure(problem, make(runners))
    return {name: (row["status"], row.get("reason")) for name, row in rows.items()}, rows


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("name", ["keys", "pairs", "all_pairs"])
def test_biases_are_measured_beside_pytorch(name, direction):
    status, rows = measured(name, direction, ["cuattn", "cuattn-without", "math", "fa2"])
    assert [status[name][0] for name in ("cuattn", "cuattn-without", "math")] == ["ok"] * 3, status
    assert ("dbias" in rows["math"]["error"]) == (direction == "backward")
    assert status["fa2"][0] == "unsupported"


@pytest.mark.parametrize("way", ["function", "boolean", "array"])
def test_a_column_mask_is_measured_in_other_words(way):
    for direction in BOTH:
        problem = Case("t", direction, 2, 2, 2, 192, 192, 16, dtype="float32", mask="causal_document")
        rows = Comparison("cpu", seconds=0.0, least=2, most=2).measure(problem, make(["cuattn", f"cuattn-{way}"]))
        assert [row["status"] for row in rows.values()] == ["ok", "ok"], rows


@pytest.mark.parametrize("name", FORMULAS)
def test_functions_are_measured(name):
    """Gradients are right by the reference, those of learned arrays among them."""
    status, rows = measured(name, "backward", ["cuattn"])
    assert status == {"cuattn": ("ok", None)}
    assert {f"d{array}" for array in formula(case(name)).arrays} <= set(rows["cuattn"]["error"])


@pytest.mark.parametrize("name", ["relative", "natten_bias", "alibi"])
def test_arrays_that_are_fixed_and_grouped_heads_are_measured(name):
    problem = replace(case(name, "backward"), kv_heads=2, causal=name == "alibi")
    (row,) = Comparison("cpu", seconds=0.0, least=2, most=2).measure(problem, make(["cuattn"])).values()
    assert row["status"] == "ok", row
    assert set(row["error"]) == {"dq"}  # dk and dv are sums over a group, which peers are compared by
