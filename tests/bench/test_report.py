"""Row files that grow and resume, and what the report says of them."""

import json
import sys
from types import SimpleNamespace

import pytest

from bench import rows
from bench.report import framed, markdown, read, tables


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


def one_table(*found):
    (table,) = tables(framed({"run": "f 000", **entry} for entry in found))
    return table


def ratios(table):
    return table[1].set_index("short")["ratio"].dropna().to_dict()


def test_the_ratio_is_to_the_best_rival():
    table = one_table(
        *raced("a", cuattn=600.0, fa4=500.0, cudnn=400.0), *raced("b", cuattn=450.0, fa4=500.0, cudnn=300.0)
    )
    assert ratios(table) == {"a": pytest.approx(1.2), "b": pytest.approx(0.9)}
    text = markdown(*table)
    assert "| a | **600** | 400 | 500 | fa4 | 1.20 | 1.0% |" in text
    assert "mean of the ratio 1.039, worst row b 0.900, 1 of 2 rows below their bar: b." in text


def test_a_stated_rival_counts_alone():
    table = one_table(*raced("a", {"rivals": ["fa2"], "bar": 1.3}, cuattn=300.0, fa2=250.0, cudnn=600.0))
    assert ratios(table) == {"a": pytest.approx(1.2)}
    assert "1 of 1 rows below their bar: a." in markdown(*table)


def test_less_time_is_better():
    table = one_table(row("t/a/forward", "cuattn", 20.0, unit="us"), row("t/a/forward", "sdpa", 10.0, unit="us"))
    assert ratios(table) == {"a": pytest.approx(0.5)}
    assert "**10**" in markdown(*table)


def test_another_run_enters_no_ratio():
    table = one_table(
        row("t/a/forward", "fa4", 700.0, run="f 000"),
        row("t/a/forward", "cuattn", 600.0, run="f 001"),
    )
    assert ratios(table) == {}
    assert "| a | **600** | (700) | – | – | 1.0% |" in markdown(*table)


def test_empty_cells_are_explained():
    table = one_table(
        row("t/a/forward", "cuattn", 600.0), row("t/a/forward", "fa4", None, status="unsupported", reason="no dropout"),
        row("t/a/forward", "fa2", None, status="wrong", reason="error of o is 3.00 of what is allowed"),
    )  # fmt: skip
    text = markdown(*table)
    assert "- fa4 unsupported: no dropout (all)" in text
    assert "- fa2 wrong: error of o is 3.00 of what is allowed (all)" in text


def test_the_cost_of_determinism_is_shown():
    table = one_table(
        row("deterministic/a/backward", "cuattn", 500.0), row("deterministic/a-deterministic/backward", "cuattn", 400.0)
    )
    assert "a-deterministic: time over the plain backward's: cuattn +25.0%" in markdown(*table)


def test_sparsity_shows_the_proportion():
    table = one_table(
        {**row("sparsity/d8-N9-full/forward", "cuattn", 1.0), "rho": 0.0, "median_us": 1000.0},
        {**row("sparsity/d8-N9-document-2/forward", "cuattn", 1.0), "rho": 0.5, "median_us": 600.0},
    )
    assert "d8-N9-document-2: ρ 0.500, 0.600 ms, 1.200 x (1 - ρ) x the unmasked time" in markdown(*table)


def test_files_are_read_plotted_and_written(tmp_path, monkeypatch):
    from bench import redraw, report

    pytest.importorskip("matplotlib")
    file = rows.RowFile(tmp_path / "hopper.json", ABOUT)
    for direction in ("forward", "backward"):
        file.add([row(f"dropout/a/{direction}", name, 500.0) for name in ("cuattn", "fa4")])
        file.add([{**row(f"sparsity/a-full/{direction}", "cuattn", 500.0), "rho": 0.0}])
    runs, found = read([file.path])
    assert [run["id"] for run in runs] == ["hopper.json 000"]
    assert len(found) == 6
    monkeypatch.setattr("sys.argv", ["redraw", "--folder", str(tmp_path), "--text"])
    redraw.main()
    assert "| a | **500** | 500 | fa4 | 1.00 |" in (tmp_path / "tables.md").read_text()
    pictures = [path.name for path in report.draw(found, tmp_path)]
    assert sorted(pictures) == ["table-dropout.png", "table-sparsity.png"]
    assert all((tmp_path / name).exists() for name in pictures)


def test_what_all_labels_share_goes_to_the_title():
    table = one_table(
        row("masks-8k/d128-N8192-full/forward", "cuattn", 1.0), row("masks-8k/d128-N8192-causal/forward", "cuattn", 1.0)
    )
    text = markdown(*table)
    assert text.startswith("### masks-8k, d128 N8192, forward (TFLOP/s)")
    assert "| full | **1** |" in text
    assert text.index("| full |") < text.index("| causal |")


def test_rows_come_in_the_order_of_the_cases():
    labels = ("unheard-of", "d64-N1024-full", "d128-N4096-causal", "d128-N1024-full")
    table = one_table(*(row(f"dense/{label}/forward", "cuattn", 1.0) for label in labels))
    assert list(table[1]["label"]) == [
        "d128-N1024-full", "d128-N4096-causal", "d64-N1024-full", "unheard-of",
    ]  # fmt: skip


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
