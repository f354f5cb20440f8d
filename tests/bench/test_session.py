"""A run without a GPU: who is checked, timed, refused, resumed; and the scripts' command lines."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bench.cases import Case, select
from bench.peers import RUNNERS, make
from bench.peers.base import Bound, Runner
from bench.rows import RowFile

ROOT = Path(__file__).resolve().parents[2]
RUN = {"device": "here", "driver": None, "versions": {}, "trees": {}, "options": {}}


def case(direction="forward", n=64, **options):
    dtype = options.pop("dtype", "float32")
    return Case("t", direction, 2, 2, 2, n, n, 16, dtype=dtype, **options)


@pytest.fixture
def session(tmp_path):
    pytest.importorskip("torch")
    from bench.session import Session

    def build(*runners):
        file = RowFile(tmp_path / "rows.json", RUN)
        console = Console(file=io.StringIO(), width=200)
        found = [runner if isinstance(runner, Runner) else make([runner])[0] for runner in runners]
        return Session(found, "cpu", file, seconds=0.0, least=2, most=3, console=console)

    return build


class Spoilt(Runner):
    """Textbook attention, times a factor."""

    name = "spoilt"

    def __init__(self, factor=1.0, ours=False, error=None):
        self.factor, self.ours, self.error, self.bound = factor, ours, error, 0

    def why_not(self, case):
        return "no masks" if case.mask else None

    def bind(self, case, inputs):
        import torch

        self.bound += 1
        if self.error:
            raise self.error
        o = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v) * self.factor
        return Bound(lambda: o, lambda o: {"o": o})


def by_runner(rows):
    return {row["runner"]: row for row in rows}


def test_peers_are_checked_then_timed(session):
    for direction in ("forward", "backward"):
        rows = by_runner(session("math", "sdpa").measure(case(direction, causal=True)))
        for row in rows.values():
            assert row["status"] == "ok"
            assert len(row["samples_us"]) == 2
            assert row["rate"] > 0
            assert set(row["error"]) == ({"o"} if direction == "forward" else {"dq", "dk", "dv"})
        json.dumps(rows, allow_nan=False)


def test_both_directions_are_checked_and_counted_together(session):
    together = case("forward+backward")
    found = session("cuattn", "standard", "math")
    found.memory = True
    rows = by_runner(found.measure(together))
    for row in rows.values():
        assert set(row["error"]) == {"o", "dq", "dk", "dv"}
        assert row["flops"] == 3.5 * case().flops()
        assert row["peak_bytes"] > 0 or not row["ours"]  # PyTorch's own memory on the host is not seen
    assert "without masks" in by_runner(session("standard").measure(case(causal=True)))["standard"]["reason"]


def test_a_wrong_result_is_never_timed(session):
    rows = by_runner(session(Spoilt(1.05), "math").measure(case()))
    assert rows["spoilt"]["status"] == "wrong"
    assert "samples_us" not in rows["spoilt"]
    assert rows["math"]["status"] == "ok"


def test_a_result_that_is_not_finite_is_wrong_and_can_be_written(session):
    found = session(Spoilt(float("nan")))
    assert found.run([case()], 60) == []
    assert json.loads(found.file.path.read_text())["rows"][0]["reason"] == "o not finite"


def test_a_peer_must_agree_with_ours_everywhere(session):
    class Elsewhere(Spoilt):
        name = "elsewhere"

        def bind(self, case, inputs):
            bound = super().bind(case, inputs)
            bound.call()[1, 0] += 1  # a head that no reference looks at
            return bound

    rows = by_runner(session(Spoilt(ours=True), Elsewhere()).measure(case()))
    assert rows["spoilt"]["status"] == "ok"
    assert rows["elsewhere"]["status"] == "wrong"
    assert "away from cuattn's" in rows["elsewhere"]["reason"]


def test_one_failing_runner_does_not_stop_the_others(session):
    rows = by_runner(session(Spoilt(error=RuntimeError("no such kernel\nmore")), "math").measure(case()))
    assert (rows["spoilt"]["status"], rows["spoilt"]["reason"]) == ("failed", "RuntimeError: no such kernel; more")
    assert rows["math"]["status"] == "ok"
    assert by_runner(session(Spoilt()).measure(case(mask="document")))["spoilt"]["reason"] == "no masks"


def test_dropout_of_a_peer_is_judged_by_its_noise(session):
    import torch

    torch.manual_seed(0)
    dropped = case(n=256, dropout=0.2)
    rows = by_runner(session("math", Spoilt()).measure(dropped))
    assert rows["math"]["status"] == "ok"
    assert rows["math"]["dropout_noise"] == pytest.approx(1, abs=0.2)
    assert rows["spoilt"]["status"] == "wrong"  # it drops nothing


def test_a_run_stops_at_its_budget_and_the_next_goes_on(session):
    cases = [case(n=n) for n in (32, 48, 64)]
    first = session("math")
    left = first.run(cases, -1.0)
    assert left == cases
    assert session("math").run(cases[:2], 60) == []
    runner = Spoilt()
    runner.name = "math"
    assert session(runner).run(cases, 60) == []
    assert runner.bound == 1  # only the third was missing


def test_cases_of_one_problem_share_inputs(session):
    found = session("math")
    found.run([case(), case(n=32), case("backward")], 60)
    assert [row["case"] for row in found.file.rows] == [
        "t/d16-N64-full-float32/forward",
        "t/d16-N64-full-float32/backward",
        "t/d16-N32-full-float32/forward",
    ]


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_jax_runs_beside_us(session, direction, dtype):
    pytest.importorskip("jax")
    rows = by_runner(session("cuattn", "jax").measure(case(direction, causal=True, dtype=dtype)))
    assert {name: row["status"] for name, row in rows.items()} == {"cuattn": "ok", "jax": "ok"}


def test_compiling_calls_a_runner_once_on_zeros_and_writes_no_rows(session):
    found, failing = Spoilt(), Spoilt(error=RuntimeError("no such kernel"))
    running = session(found)
    running.compile(found, case())
    running.compile(failing, case("backward", mask="document"))
    assert (found.bound, failing.bound) == (1, 1)
    assert not running.file.path.exists()
    assert "no such kernel" in running.console.file.getvalue()


def test_what_is_compiled_is_shared_by_what_compilers_make():
    from bench.command import units

    cases = select(["dense", "masks-8k", "masks-32k"])
    calls = [(runner, case) for case in cases for runner in make(["cuattn", "cudnn", "fa2", "flex"])]
    portions = units(calls)
    assert len(portions) == 2 * (6 + 10)  # patterns of cuattn and of flex; PyTorch's own kernels are compiled already
    expected = {(runner.name, case.name) for runner, case in calls if runner.name in ("cuattn", "flex")}
    assert {(runner.name, case.name) for portion in portions for runner, case in portion} == expected
    assert [portion[0][0].name for portion in portions] == ["flex"] * 16 + ["cuattn"] * 16


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
    assert (blank.samples, blank.rho, blank.blank, real.blank) == (real.samples, real.rho, True, False)


def test_every_runner_says_what_it_cannot_do():
    cases = select(["dense", "masks-8k", "dropout", "deterministic", "portable", "decode"])
    for name in RUNNERS:
        (runner,) = make([name])
        assert runner.name == name
        for problem in cases:
            reason = runner.why_not(problem)
            assert reason is None or reason.strip()
    (cudnn, fa2, ours) = make(["cudnn", "fa2", "cuattn"])
    assert not [problem.name for problem in cases if ours.why_not(problem)]
    assert "float64" in cudnn.why_not(case(dtype="float64"))
    assert fa2.why_not(case(dtype="bfloat16", dropout=0.1)) is None
    assert "N x N" in fa2.why_not(case(dtype="bfloat16", mask="document"))
    with pytest.raises(ValueError, match="'fa9'"):
        make(["fa9"])


def test_the_command_measures_reports_and_resumes(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    from bench import cases, command

    monkeypatch.setitem(cases.TABLES, "tiny", lambda: [case(direction) for direction in cases.BOTH])
    arguments = ["--device", "cpu", "--peers", "math", "fa2", "--seconds", "0", "--out", str(tmp_path / "rows.json")]

    def run(*more):
        found = command.parser("Measure.", ("tiny",), (), "unused.json").parse_args([*arguments, *more])
        return command.run(found, {"": ("sdpa",)})

    assert run("--ours", "--directions", "forward", "--trees", "kernels=1,cuattn=2") == 0
    content = json.loads((tmp_path / "rows.json").read_text())
    assert content["runs"][0]["trees"] == {"kernels": "1", "cuattn": "2"}
    assert [(entry["runner"], entry["status"]) for entry in content["rows"]] == [("math", "ok"), ("fa2", "unsupported")]
    assert run("--ours", "--trees", "kernels=1,cuattn=2") == 0
    again = json.loads((tmp_path / "rows.json").read_text())
    assert again["rows"][:2] == content["rows"]
    assert len(again["rows"]) == 4
    assert run("--ours", "--budget", "-1", "--trees", "kernels=3") == 0
    assert "2 cases left" in capsys.readouterr().out
    with open(os.devnull) as nothing, monkeypatch.context() as patched:
        patched.setattr("sys.stdin", nothing)
        assert run("--ours", "--compile", "--out", str(tmp_path / "none.json")) == 0
    assert not (tmp_path / "none.json").exists()


def test_prepare_runs_its_shares_side_by_side(capfd):
    from bench import prepare

    assert prepare.run("hopper", ["--list", "--tables", "dropout"], 2, 60) == 0
    assert capfd.readouterr().out.count("dropout/d64") == 4
    assert prepare.run("hopper", ["--tables", "no-such-table"], 2, 60) == 2


@pytest.mark.parametrize(("script", "lines"), [("hopper", 36), ("portable", 2)])
def test_scripts_list_their_cases_without_a_gpu(script, lines):
    table = "dense" if script == "hopper" else "decode"
    command = [sys.executable, "-m", f"bench.{script}", "--list", "--tables", table]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == lines
