"""Row files that grow and resume, and what the report says of them."""

import io
import json
import sys
from types import SimpleNamespace

import pytest

from bench import redraw, rows
from bench.report import framed, lines, read, standing
from bench.sections.peers import PEER_TABLES, cases
from bench.style import table


def row(case, runner, rate, *, unit="TFLOP/s", status="ok", ours=None, **more):
    ours = runner.startswith("cuattn") if ours is None else ours
    found = {"case": case, "runner": runner, "ours": ours, "status": status, "problem": more.pop("problem", {}), **more}
    if rate is None:
        return found
    return {**found, "rate": rate, "unit": unit, "median_us": 100.0, "q1_us": 99.0, "q3_us": 101.0}


RUN = {"device": "A GPU", "driver": "1", "versions": {"torch": "2"}, "trees": {"kernels": "ab"}, "options": {}}
ABOUT = {**RUN, "time": "now", "command": "python -m bench.hopper"}


def test_a_file_resumes_only_on_the_same_machine_and_source(tmp_path):
    path = tmp_path / "sub" / "rows.json"
    rows.RowFile(path, RUN).add(raced("a", cuattn=1.0, fa2=1.0))
    again = rows.RowFile(path, RUN)
    assert again.done("t/a/forward", ["cuattn", "fa2"])
    assert not again.done("t/a/forward", ["cuattn", "fa4"])
    assert not again.done("t/b/forward", ["cuattn"])
    changed = rows.RowFile(path, {**RUN, "trees": {"kernels": "cd"}})
    assert not changed.done("t/a/forward", ["cuattn"])
    changed.add(raced("a", cuattn=2.0))
    content = json.loads(path.read_text())
    assert [(entry["run"], entry["runner"], entry["rate"]) for entry in content["rows"]] == [
        (0, "fa2", 1.0),
        (1, "cuattn", 2.0),
    ]
    assert [run["id"] for run in content["runs"]] == [0, 1]
    assert [item.name for item in path.parent.iterdir()] == ["rows.json"]


def test_a_case_is_not_done_by_two_different_runs(tmp_path):
    path = tmp_path / "rows.json"
    rows.RowFile(path, RUN).add(raced("a", cuattn=1.0))
    rows.RowFile(path, RUN).add(raced("a", fa2=1.0))
    assert not rows.RowFile(path, RUN).done("t/a/forward", ["cuattn", "fa2"])


def test_files_of_two_machines_become_one(tmp_path):
    here, there, both = (tmp_path / f"{name}.json" for name in ("here", "there", "both"))
    rows.RowFile(here, RUN).add([*raced("a", cuattn=1.0), *raced("b", cuattn=1.0)])
    rows.RowFile(there, {**RUN, "device": "another"}).add(raced("b", cuattn=2.0))
    rows.merge(both, [here, there])
    content = json.loads(both.read_text())
    assert [run["device"] for run in content["runs"]] == ["A GPU", "another"]
    assert [(entry["run"], entry["case"], entry["rate"]) for entry in content["rows"]] == [
        (0, "t/a/forward", 1.0),
        (1, "t/b/forward", 2.0),
    ]


def test_not_a_number_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        rows.RowFile(tmp_path / "rows.json", RUN).add(raced("a", cuattn=float("nan")))


def test_trees_are_handed_in_or_asked_from_git():
    assert rows.sources("commit=56,kernels=12,cuattn=34") == ("56", {"kernels": "12", "cuattn": "34"})
    assert all(len(value.rstrip("+")) == 40 for value in rows.sources()[1].values())


def test_the_environment_hands_in_what_git_cannot_say(monkeypatch):
    monkeypatch.setenv("CUATTN_TREES", "kernels=12")
    assert rows.sources() == (None, {"kernels": "12"})


def raced(label, problem=None, **rates):
    """Rows of one case, by runner."""
    return [row(f"t/{label}/forward", runner, rate, problem=problem or {}) for runner, rate in rates.items()]


def compared(*found):
    """The line of each case, and its table."""
    frame = framed([{"run": "f 000", **entry} for entry in found])
    return lines(frame).set_index("label"), table(cases(frame))


def test_the_ratio_is_to_the_best_rival():
    found, text = compared(
        *raced("a", cuattn=600.0, fa4=500.0, cudnn=400.0), *raced("b", cuattn=450.0, fa4=500.0, cudnn=300.0)
    )
    assert found["ratio"].to_dict() == {"a": pytest.approx(1.2), "b": pytest.approx(0.9)}
    assert "| forward | a | 600 | 500 | 400 | – | FlashAttention-4 | 1.2 | 1.0% |" in text
    assert standing(found["ratio"]) == {"ahead in": "1 of 2", "geometric mean": "1.04", "worst": "0.90 (b)"}


def test_a_stated_rival_counts_alone():
    found, text = compared(*raced("a", {"rivals": ["fa2"]}, cuattn=300.0, fa2=250.0, cudnn=600.0))
    assert found["ratio"].to_dict() == {"a": pytest.approx(1.2)}
    assert "| FlashAttention-2 | 1.2 | 1.0% |" in text


def test_the_kernel_that_cuattn_chooses_is_compared():
    found, _ = compared(*raced("a", **{"cuattn": 300.0, "cuattn-sm80": 400.0, "fa2": 200.0}))
    assert found[["best", "ratio"]].loc["a"].to_list() == ["cuattn", 1.5]


def test_less_time_is_better():
    found, _ = compared(row("t/a/forward", "cuattn", 20.0, unit="us"), row("t/a/forward", "sdpa", 10.0, unit="us"))
    assert found["ratio"].to_dict() == {"a": pytest.approx(0.5)}


def test_another_run_enters_no_ratio():
    found, text = compared(
        row("t/a/forward", "fa4", 700.0, run="f 000"),
        row("t/a/forward", "cuattn", 600.0, run="f 001"),
    )
    assert found["ratio"].isna().all()
    assert "700" not in text
    assert "| a | 600 | – | – | – | 1.0% |" in text


def test_empty_cells_are_explained(tmp_path):
    rows.RowFile(tmp_path / "hopper.json", ABOUT).add([
        row("dropout/a/forward", "cuattn", 600.0),
        row("dropout/a/forward", "fa4", None, status="unsupported", reason="no dropout"),
        row("dropout/a/forward", "fa2", None, status="wrong", reason="error of o is 3.00 of what is allowed"),
    ])  # fmt: skip
    text = redraw.tables(tmp_path)
    assert "| FlashAttention-4 | unsupported | no dropout | a |" in text
    assert "| FlashAttention-2 | wrong | error of o is 3.00 of what is allowed | a |" in text


def test_files_are_read_plotted_and_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = rows.RowFile(tmp_path / "hopper.json", ABOUT)
    for direction in ("forward", "backward"):
        file.add([row(f"dropout/a/{direction}", name, 500.0) for name in ("cuattn", "fa4")])
    found = read(file.path)
    assert [(entry["run"], entry["machine"]) for entry in found] == [
        ("hopper.json 000", "A GPU, driver 1, torch 2")
    ] * 4
    for _, section, frame in redraw.available(tmp_path, PEER_TABLES):
        section.figure(frame).savefig(io.BytesIO(), dpi=30)
    (tmp_path / "table-dropout.png").touch()
    monkeypatch.setattr("sys.argv", ["redraw", "--folder", str(tmp_path), "--text"])
    redraw.main()
    text = (tmp_path / "tables.md").read_text()
    assert "| forward | a | 500 | 500 | – | FlashAttention-4 | 1 | 1.0% |" in text
    assert text.count("(table-dropout.png)") == 1


def test_rows_come_in_the_order_of_the_cases():
    labels = ("unheard-of", "d64-N1024-full", "d128-N4096-causal", "d128-N1024-full")
    found, _ = compared(*(row(f"dense/{label}/forward", "cuattn", 1.0) for label in labels))
    assert list(found.index) == ["d128-N1024-full", "d128-N4096-causal", "d64-N1024-full", "unheard-of"]


@pytest.mark.parametrize(("visible", "gpu"), [(None, "0"), ("", "0"), ("1", "1"), ("GPU-12ab, 0", "GPU-12ab")])
def test_clocks_are_of_the_gpu_in_use(monkeypatch, visible, gpu):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    asked = []
    calls = dict.fromkeys(("ClockInfo", "PowerUsage", "Temperature"), lambda *_: 2000)
    calls |= {"HandleByIndex": lambda i: asked.append(str(i)), "HandleByUUID": asked.append}
    nvml = SimpleNamespace(**{f"nvmlDeviceGet{name}": call for name, call in calls.items()}, nvmlInit=lambda: None)
    nvml.NVML_CLOCK_SM = nvml.NVML_CLOCK_MEM = nvml.NVML_TEMPERATURE_GPU = 0
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert rows.clocks() == {"sm_mhz": 2000, "memory_mhz": 2000, "watts": 2.0, "celsius": 2000}
    assert asked == [gpu]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert rows.clocks() is None
