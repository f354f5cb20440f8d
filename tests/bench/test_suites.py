"""The commands beside peers: what they list, measure, resume and compile; another checkout beside this one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import bars, beside, prepare, suites
from bench.cases import BOTH, TABLES, Case, select
from bench.peers import RUNNERS, make
from bench.suites import SUITES, Suite, portions

ROOT = Path(__file__).resolve().parents[2]


def test_every_suite_names_tables_and_runners_that_exist():
    for name, suite in SUITES.items():
        assert set(suite.tables) | set(suite.optional) <= set(TABLES)
        assert set(suite.peers) <= {"", *suite.tables, *suite.optional}
        assert {runner for peers in suite.peers.values() for runner in (*peers, *suite.ours)} <= set(RUNNERS)
        assert (ROOT / "bench" / f"{name}.py").exists()


@pytest.mark.parametrize(
    ("words", "names"),
    {
        "": "cuattn-sm80 cuattn cuattn-cupy cudnn fa3 fa2 sdpa",
        "--peers fa2": "cuattn-sm80 fa2",
        "--beside .": "cuattn-sm80 cuattn cuattn-cupy base-sm80 base base-cupy",
    }.items(),
)
def test_the_portable_kernel_is_measured_beside_the_choice(words, names):
    arguments = suites.parser("portable").parse_args(f"--tables decode host --tiny {words}".split())
    for cases, runners in suites.tables("portable", arguments):
        assert {runner.name for runner in runners} == set(names.split())
        assert max(case.n_keys for case in cases) == 192


def test_what_is_compiled_is_shared_by_what_compilers_make():
    cases = select(["dense", "masks-8k", "masks-32k"])
    calls = [(runner, case) for case in cases for runner in make(["cuattn", "cudnn", "fa2", "flex"])]
    found = portions(calls)
    assert len(found) == 2 * (6 + 10)  # patterns of cuattn and of flex; PyTorch's own kernels are compiled already
    expected = {(runner.name, case.name) for runner, case in calls if runner.name in ("cuattn", "flex")}
    assert {(runner.name, case.name) for portion in found for runner, case in portion} == expected
    assert [portion[0][0].name for portion in found] == ["flex"] * 16 + ["cuattn"] * 16


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Run a suite of one tiny table on the host; return its rows."""
    pytest.importorskip("torch")
    problems = [Case("tiny", direction, 2, 2, 2, 64, 64, 16, dtype="float32") for direction in BOTH]
    monkeypatch.setitem(TABLES, "tiny", problems)
    monkeypatch.setitem(
        SUITES, "tiny", Suite(about="Measure.", tables=("tiny",), peers={"": ("sdpa",)}, defaults={"device": "cpu"})
    )

    def run(*more, out="rows.json"):
        path = tmp_path / out
        assert suites.main("tiny", ["--seconds", "0", "--most", "3", "--out", str(path), *more]) == 0
        return json.loads(path.read_text()) if path.exists() else {"rows": []}

    return run


def test_the_command_measures_reports_and_resumes(tiny, capsys):
    usual = ("--ours", "--peers", "math", "fa2")
    content = tiny(*usual, "--directions", "forward", "--trees", "kernels=1,cuattn=2")
    assert content["runs"][0]["trees"] == {"kernels": "1", "cuattn": "2"}
    assert [(row["runner"], row["status"]) for row in content["rows"]] == [("math", "ok"), ("fa2", "unsupported")]
    again = tiny(*usual, "--trees", "kernels=1,cuattn=2")
    assert again["rows"][:2] == content["rows"]
    assert len(again["rows"]) == 4
    tiny(*usual, "--budget", "-1", "--trees", "kernels=3")
    assert "2 cases left" in capsys.readouterr().out


def test_another_checkout_is_measured_in_turn(tiny, capsys):
    content = tiny("--beside", str(ROOT))
    assert {row["runner"] for row in content["rows"]} == {"cuattn", "base"}
    assert {row["status"] for row in content["rows"]} == {"ok"}
    assert set(content["runs"][0]["options"]["beside"][1]) == {"kernels", "cuattn"}
    assert "tiny, cuattn: " in capsys.readouterr().out
    (line,) = bars.standings(bars.beside(content["rows"]), content["rows"])
    assert line["cases"] == 2 and line["mean"] > 0


def test_the_other_checkout_is_another_package():
    import cuattn

    base = beside.load(ROOT)
    assert base is not cuattn
    assert base.errors is not cuattn.errors
    assert Path(base.__file__) == ROOT / "cuattn" / "__init__.py"
    names = [name for name in sys.modules if name.startswith(beside.ALIAS)]
    assert base.attention.__module__ in names
    assert all(Path(sys.modules[name].__file__).is_relative_to(ROOT / "cuattn") for name in names)
    with pytest.raises(FileNotFoundError, match="expected a checkout"):
        beside.load(ROOT / "tests")


def test_modules_are_read_with_their_imports_renamed():
    source = """
import cuattn.rng
import cuattn, json
from cuattn.masks import base
x = 'cuattn.cuda', 'cuattn is'
import cuattn"""
    kept = source.replace("cuattn is", "...")
    assert beside.renamed(source).replace("cuattn is", "...") == kept.replace("cuattn", "cuattn_base")


def test_prepare_runs_its_shares_side_by_side(capfd):
    pytest.importorskip("torch")
    words = ["--tables", "cpu", "--directions", "forward", "--only", "N2048", "--ours", "cuattn", "--peers"]
    assert prepare.run("cpu", words, 2) == 0
    assert capfd.readouterr().out.count("cuattn: ") == 2
    assert prepare.run("cpu", [*words, "--budget", "0"], 2) == 1


@pytest.mark.parametrize(("suite", "table", "lines"), [("hopper", "dense", 48), ("portable", "decode", 2)])
def test_suites_list_their_cases_without_a_gpu(suite, table, lines):
    command = [sys.executable, "-m", f"bench.{suite}", "--list", "--tables", table]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == lines
