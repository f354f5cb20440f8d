"""Studies: points that resume, fail alone and keep to a budget; counters read from ncu's text; memory."""

import io
import json
import subprocess

import numpy as np
import pytest
from rich.console import Console

from bench import counters, harness, timing
from bench.harness import Point

QUIET = Console(file=io.StringIO())


def arguments(tmp_path, *more):
    return harness.parser("Ask.", "asked").parse_args(["--device", "cpu", "--out", str(tmp_path / "rows.json"), *more])


def rows(tmp_path):
    return json.loads((tmp_path / "rows.json").read_text())["rows"]


def test_points_are_measured_once_and_failures_again(tmp_path):
    asked = []

    def measure(name):
        asked.append(name)
        if name == "b" and asked.count("b") == 1:
            raise RuntimeError("not today")
        return {"cuattn": timing.timed([1e-3, 2e-3, 3e-3])}

    points = [Point(f"s/{name}/x", ("cuattn",), lambda name=name: measure(name)) for name in "ab"]
    assert harness.run(arguments(tmp_path), points, show=QUIET) == []
    first, second = rows(tmp_path)
    assert (first["median_us"], first["ours"], first["status"]) == (2000.0, True, "ok")
    assert (second["status"], second["reason"]) == ("failed", "RuntimeError: not today")
    harness.run(arguments(tmp_path), points, show=QUIET)
    assert asked == ["a", "b", "b"]
    assert [row["status"] for row in rows(tmp_path)] == ["ok", "ok"]


def test_a_budget_and_a_selection_leave_points(tmp_path):
    points = [Point(f"s/{name}/x", ("r",), lambda: {"r": {}}) for name in ("near", "far", "farther")]
    assert harness.run(arguments(tmp_path, "--budget", "-1"), points, show=QUIET) == [
        "s/near/x",
        "s/far/x",
        "s/farther/x",
    ]
    assert harness.run(arguments(tmp_path, "--only", "far*"), points, show=QUIET) == []
    assert [row["case"] for row in rows(tmp_path)] == ["s/far/x", "s/farther/x"]
    assert harness.run(arguments(tmp_path, "--list"), points, show=QUIET) == []


def test_trials_leave_the_committed_rows_alone():
    parser = harness.parser("Ask.", "asked", {"--beside": {}})
    for words, name in (("", "asked"), ("--tiny", "tiny-asked"), ("--beside x", "beside-asked"), ("--out y", "y")):
        assert harness.destination(parser.parse_args(words.split())).stem == name


TEXT = """==PROF== Connected to process 9
"ID","thread Domain:Push/Pop_Range:PL_Type","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","t.sum"
"","","","Mbyte","byte","ns"
"0","9  ""<default domain>:d64/a:none:none:none:none:none:none"" ","copy(int, float)","1.5","1,024","2,000"
"1","9  ""<default domain>:d64/a:none:none:none:none:none:none"" ","add(int)","0.5","n/a","1"
"2","9  ""<default domain>:d64/ab:none:none:none:none:none:none"" ","add(int)","3","0","1"
==PROF== Disconnected
"""


def test_counts_are_read_by_range_in_bytes_and_seconds():
    names = ("d64/a", "d64/ab", "d64/c")
    metrics = {"read": "dram__bytes_read.sum", "write": "dram__bytes_write.sum", "seconds": "t.sum", "none": "x.sum"}
    found = counters.parse(TEXT, names, metrics)
    assert found["d64/a"] == [
        {"kernel": "copy", "read": 1.5e6, "write": 1024.0, "seconds": pytest.approx(2e-6)},
        {"kernel": "add", "read": 0.5e6, "seconds": pytest.approx(1e-9)},
    ]
    assert counters.total(found["d64/a"])["read"] == 2e6
    assert len(found["d64/ab"]) == 1
    assert found["d64/c"] == []


@pytest.mark.parametrize(("found", "said"), [(None, "is not installed"), ("ncu", "no counters here")])
def test_a_missing_or_failing_profiler_is_said(monkeypatch, found, said):
    done = subprocess.CompletedProcess([], 1, stdout="", stderr="no counters here")
    monkeypatch.setattr(counters.shutil, "which", lambda _: found)
    monkeypatch.setattr(counters.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match=said):
        counters.count("bench.gpt2", "a", ("a",))


def test_memory_is_the_peak_beyond_the_start():
    kept = np.ones(1 << 22, np.uint8)
    with harness.peak("cpu") as found:
        np.ones(1 << 20, np.uint8).sum()
        np.ones(1 << 21, np.uint8).sum()
    assert 1 << 21 <= found.bytes < 3 << 20
    assert kept.size
