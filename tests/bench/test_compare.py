"""A comparison without a GPU: who is checked, timed, refused, resumed."""

import io
import json

import pytest
from rich.console import Console

from bench import harness
from bench.cases import Case, select
from bench.peers import RUNNERS, make
from bench.peers.base import Bound, Runner
from bench.timing import HostClock


def case(direction="forward", n=64, **options):
    dtype = options.pop("dtype", "float32")
    return Case("t", direction, 2, 2, 2, n, n, 16, dtype=dtype, **options)


class Session:
    """A comparison of some runners."""

    def __init__(self, runners, path, **options):
        from bench.compare import Comparison

        self.comparison = Comparison("cpu", seconds=0.0, least=2, most=3, **options)
        self.runners = [runner if isinstance(runner, Runner) else make([runner])[0] for runner in runners]
        self.path = path

    def measure(self, case):
        return self.comparison.measure(case, self.runners)

    def run(self, cases, budget=60.0):
        arguments = harness.parser("", "").parse_args(
            ["--device", "cpu", "--out", str(self.path), "--budget", str(budget), "--trees", "kernels=1"]
        )
        points = self.comparison.points(cases, self.runners)
        return harness.run(arguments, points, show=Console(file=io.StringIO()))


@pytest.fixture
def session(tmp_path):
    pytest.importorskip("torch")
    return lambda *runners, **options: Session(runners, tmp_path / "rows.json", **options)


class Spoilt(Runner):
    """Textbook attention, times a factor."""

    name = "spoilt"

    def __init__(self, factor=1.0, ours=False, error=None):
        self.factor, self.ours, self.error, self.bound = factor, ours, error, 0

    def unsupported_reason(self, case):
        return "no masks" if case.mask else None

    def bind(self, case, inputs):
        import torch

        self.bound += 1
        if self.error:
            raise self.error
        o = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v) * self.factor
        return Bound(lambda: o, lambda o: [o])


def test_peers_are_checked_then_timed(session, monkeypatch):
    monkeypatch.setattr("bench.compare.BRIEF", float("inf"))  # on a busy machine no call is brief
    for direction in ("forward", "backward"):
        rows = session("math", "sdpa", cold=HostClock()).measure(case(direction, causal=True))
        for row in rows.values():
            assert row["cold_us"] > 0
            assert row["status"] == "ok"
            assert len(row["samples_us"]) == 2
            assert row["rate"] > 0
            assert set(row["error"]) == ({"o"} if direction == "forward" else {"dq", "dk", "dv"})
        json.dumps(rows, allow_nan=False)


def test_both_directions_are_checked_and_counted_together(session):
    together = case("forward+backward")
    found = session("cuattn", "standard", "math", memory=True)
    rows = found.measure(together)
    for row in rows.values():
        assert set(row["error"]) == {"o", "dq", "dk", "dv"}
        assert row["flops"] == 3.5 * case().flops()
        assert row["peak_bytes"] > 0 or not row["ours"]  # PyTorch's own memory on the host is not seen
    assert "without masks" in (session("standard").measure(case(causal=True)))["standard"]["reason"]


def test_a_wrong_result_is_never_timed(session):
    rows = session(Spoilt(1.05), "math").measure(case())
    assert rows["spoilt"]["status"] == "wrong"
    assert "samples_us" not in rows["spoilt"]
    assert rows["math"]["status"] == "ok"


def test_a_result_that_is_not_finite_is_wrong_and_can_be_written(session):
    found = session(Spoilt(float("nan")))
    assert found.run([case()]) == []
    assert json.loads(found.path.read_text())["rows"][0]["reason"] == "o not finite"
    assert found.comparison.wrong == 1


def test_a_peer_must_agree_with_ours_everywhere(session):
    class Elsewhere(Spoilt):
        name = "elsewhere"

        def bind(self, case, inputs):
            bound = super().bind(case, inputs)
            bound.call()[1, 0] += 1  # a head that no reference looks at
            return bound

    rows = session(Spoilt(ours=True), Elsewhere()).measure(case(n=96))
    assert rows["spoilt"]["status"] == "ok"
    assert rows["elsewhere"]["status"] == "wrong"
    assert "away from cuattn's" in rows["elsewhere"]["reason"]


def test_one_failing_runner_does_not_stop_the_others(session):
    rows = session(Spoilt(error=RuntimeError("no such kernel\nmore")), "math").measure(case())
    assert (rows["spoilt"]["status"], rows["spoilt"]["reason"]) == ("failed", "RuntimeError: no such kernel; more")
    assert rows["math"]["status"] == "ok"
    assert (session(Spoilt()).measure(case(mask="document")))["spoilt"]["reason"] == "no masks"


def test_dropout_of_a_peer_is_judged_by_its_noise(session):
    import torch

    torch.manual_seed(0)
    dropped = case(n=256, dropout=0.2)
    rows = session("math", Spoilt()).measure(dropped)
    assert rows["math"]["status"] == "ok"
    assert rows["math"]["dropout_noise"] == pytest.approx(1, abs=0.2)
    assert rows["spoilt"]["status"] == "wrong"  # it drops nothing


def test_a_run_stops_at_its_budget_and_the_next_goes_on(session):
    cases = [case(n=n) for n in (32, 48, 64)]
    first = session("math")
    left = first.run(cases, -1.0)
    assert left == [case.name for case in cases]
    assert session("math").run(cases[:2]) == []
    runner = Spoilt()
    runner.name = "math"
    assert session(runner).run(cases) == []
    assert runner.bound == 1  # only the third was missing


def test_cases_of_one_problem_share_inputs(session):
    found = session("math")
    found.run([case(), case(n=32), case("backward")])
    assert [row["case"] for row in json.loads(found.path.read_text())["rows"]] == [
        "t/d16-N64-full-float32/forward",
        "t/d16-N64-full-float32/backward",
        "t/d16-N32-full-float32/forward",
    ]


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_runs_beside_us(session, direction, dtype):
    pytest.importorskip("jax")
    rows = session("cuattn", "jax").measure(case(direction, causal=True, dtype=dtype))
    assert {name: row["status"] for name, row in rows.items()} == {"cuattn": "ok", "jax": "ok"}


def test_compiling_calls_a_runner_once_on_zeros(session):
    found, failing = Spoilt(), Spoilt(error=RuntimeError("no such kernel"))
    comparison = session(found).comparison
    assert comparison.compile(found, case()).startswith("t/d16-N64-full-float32/forward spoilt: ")
    assert "no such kernel" in comparison.compile(failing, case("backward", mask="document"))
    assert (found.bound, failing.bound) == (1, 1)


def test_blank_inputs_share_their_memory():
    pytest.importorskip("torch")
    from bench import inputs

    grouped = Case("t", "forward", 2, 4, 2, 8, 40, 16, dtype="float16", mask="document")
    blank, real = inputs.make(grouped, "cpu", blank=True), inputs.make(grouped, "cpu")
    for name in ("q", "k", "v", "do"):
        mine, other = getattr(blank, name), getattr(real, name)
        assert (mine.shape, mine.stride(), mine.dtype) == (other.shape, other.stride(), other.dtype)
        assert mine.data_ptr() == blank.q.data_ptr()
        assert not mine.any()
    assert (blank.samples, blank.rho) == (real.samples, real.rho)


def test_every_runner_says_what_it_cannot_do():
    cases = select(["dense", "masks-8k", "dropout", "deterministic", "portable", "decode"])
    for name in RUNNERS:
        (runner,) = make([name])
        assert runner.name == name
        for problem in cases:
            reason = runner.unsupported_reason(problem)
            assert reason is None or reason.strip()
    (cudnn, fa2, ours) = make(["cudnn", "fa2", "cuattn"])
    assert not [problem.name for problem in cases if ours.unsupported_reason(problem)]
    assert "float64" in cudnn.unsupported_reason(case(dtype="float64"))
    assert fa2.unsupported_reason(case(dtype="bfloat16", dropout=0.1)) is None
    assert "N x N" in fa2.unsupported_reason(case(dtype="bfloat16", mask="document"))
    with pytest.raises(ValueError, match="'fa9'"):
        make(["fa9"])


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_the_formula_in_numpy_is_attention(session, direction):
    rows = session("cuattn", "numpy", "standard").measure(case(direction))
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(("cuattn", "numpy", "standard"), "ok")
    refused = session("numpy").measure(case(direction, dtype="bfloat16"))
    assert "bfloat16" in refused["numpy"]["reason"]


@pytest.mark.parametrize(
    "options", [{"score": "keys"}, {"score": "matrix"}, {"mask": "random"}, {"mask": "document"}], ids=str
)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_pytorch_takes_dense_masks_and_biases_on_the_host(session, options, direction):
    rows = session("cuattn-attention", "cuattn", "sdpa-dense", "sdpa").measure(case(direction, n=96, **options))
    assert {name for name, row in rows.items() if row["status"] == "ok"} >= {"cuattn", "sdpa-dense"}
    assert rows["cuattn-attention"]["status"] == ("ok" if direction == "forward" else "unsupported")
    assert ("mask" in options) == ("N x N" in rows["sdpa"].get("reason", ""))


def test_documents_one_by_one_are_the_mask(session):
    found = Case("t", "forward+backward", 1, 2, 2, 640, 640, 16, dtype="float32", mask="causal_document")
    rows = session("cuattn", "sdpa-documents").measure(found)
    assert {name: row["status"] for name, row in rows.items()} == {"cuattn": "ok", "sdpa-documents": "ok"}


def test_small_heads_are_judged_together(session):
    tiny = Case("t", "backward", 2, 8, 8, 1, 40, 8, dtype="float32")
    found = session("numpy")
    assert found.measure(tiny)["numpy"]["status"] == "ok"
    (reference,) = found.comparison._references.values()
    assert reference.pooled
    assert len(reference.exact) == 16
