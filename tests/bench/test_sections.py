"""What the README shows: sections from rows, the README in step with the committed rows, one command for all."""

import argparse
import importlib
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from bench import redraw, reproduce
from bench.report import framed
from bench.rows import RESULTS
from bench.sections import LONG, SECTIONS
from bench.sections.peers import group
from bench.style import table
from cuattn import masks

ROOT = Path(__file__).resolve().parents[2]
QUIET = Console(file=io.StringIO())


def available():
    return [pytest.param(section, id=section.name) for section in redraw.available()]


def section(name, rows):
    """The section of made-up rows; what it draws is drawn."""
    found = SECTIONS[name](framed(rows))
    if found.figure and importlib.util.find_spec("matplotlib"):
        found.figure().savefig(io.BytesIO(), dpi=30)
    return found


def test_every_section_is_a_script_or_names_its_files():
    assert set(LONG) <= set(SECTIONS)
    for name, kind in SECTIONS.items():
        assert kind.title
        assert kind.command.startswith("python -m bench.")
        assert kind.files or (ROOT / "bench" / f"{name}.py").exists()


@pytest.mark.parametrize("section", available())
def test_committed_rows_have_a_table_and_a_picture(section):
    text = section.text()
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert widths
    assert "nan" not in text.lower().split()
    assert all(run["command"] and run["time"] for run in section.runs)
    if section.figure:
        pytest.importorskip("matplotlib")
        section.figure().savefig(io.BytesIO(), dpi=40)
        assert (RESULTS / f"{section.name}.png").exists()


def test_the_readme_and_the_tables_are_those_of_the_rows():
    text = (ROOT / "README.md").read_text()
    for section in (redraw.readme(), redraw.cpu()):
        assert redraw.insert(text, section) == text, "run python -m bench.redraw --text"
    if (RESULTS / "tables.md").exists():
        assert (RESULTS / "tables.md").read_text() == redraw.tables(), "run python -m bench.redraw --text"


def test_the_section_goes_between_its_marks_and_nowhere_else():
    text = f"above\n{redraw.BEGIN}\nold\n{redraw.END}\nbelow\n"
    assert redraw.insert(text, f"{redraw.BEGIN}\nnew\n{redraw.END}") == text.replace("old", "new")
    with pytest.raises(ValueError, match="no place"):
        redraw.insert("nothing here", f"{redraw.BEGIN}\nnew\n{redraw.END}")


def test_tables_have_three_digits():
    text = table(pd.DataFrame({"a": list("xyzw"), "b": [1234.5, 0.012345, None, "as it is"]}))
    assert [line.split("|")[2].strip() for line in text.splitlines()[2:]] == ["1234", "0.0123", "–", "as it is"]


def test_results_without_any_rows_show_nothing(tmp_path):
    assert list(redraw.available(tmp_path)) == []
    (tmp_path / "gpt2.json").write_text(json.dumps({"runs": [], "rows": []}))
    assert list(redraw.available(tmp_path)) == []


def arguments(budget, trees=None):
    return argparse.Namespace(budget=budget, trees=trees)


def test_reproducing_keeps_to_the_budget(monkeypatch):
    begun = []
    monkeypatch.setattr(
        reproduce.subprocess, "run", lambda command, **_: begun.append(command) or argparse.Namespace(returncode=0)
    )
    steps = {"gpt2": 60, "cpu": 1500, "hopper -x": 900}
    assert reproduce.run(arguments(300, "kernels=1"), steps, QUIET) == ["python -m bench.cpu"]
    assert [command[2] for command in begun] == ["bench.gpt2", "bench.hopper"]  # a quarter of the time is enough
    assert begun[0][-4:] == ["--budget", "300", "--trees", "kernels=1"]
    assert "-x" in begun[1]
    begun.clear()
    assert len(reproduce.run(arguments(-1), steps, QUIET)) == 3
    assert not begun


def test_a_failed_step_is_left(monkeypatch):
    monkeypatch.setattr(reproduce.subprocess, "run", lambda *_, **__: argparse.Namespace(returncode=1))
    assert reproduce.run(arguments(100), {"gpt2": 60}, QUIET) == ["python -m bench.gpt2"]


def test_every_step_is_a_script():
    for step in reproduce.STEPS:
        script = step.split()[0]
        assert (ROOT / "bench" / f"{script}.py").exists()
        assert importlib.util.find_spec(f"bench.{script}")


def peer_rows(table, rates):
    """Rows of a table's cases as `bench.hopper` writes them, with made-up times."""
    from bench.cases import select

    for case in select([table]):
        for runner, rate in rates.items():
            rho = 0.5 if case.mask else 0.0
            yield {
                "run": "hopper.json 000",
                "case": case.name,
                "runner": runner,
                "ours": runner == "cuattn",
                "status": "ok",
                "problem": case.as_dict(),
                "rho": rho,
                "flops": case.flops(rho),
                "median_us": case.flops(rho) / rate / 1e6,
                "rate": rate,
                "unit": case.unit,
            }


def test_the_papers_tables_come_from_the_peers_rows():
    rows = [*peer_rows("masks-8k", {"cuattn": 500.0, "flex": 400.0}), *peer_rows("masks-32k-d64", {"cuattn": 300.0})]
    text = section("flashmask", rows).text()
    assert text.index("8K tokens, head dimension 128") < text.index("32K tokens, head dimension 64")
    line = next(line for line in text.splitlines() if line.startswith("| FlexAttention, causal_document"))
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    forward, backward, total = map(float, cells[:3])
    assert total == pytest.approx(forward + backward, rel=0.01)
    assert cells[3:] == ["400", "400", "400", "0.50"]
    assert text.count("\n| cuattn,") == 24
    rows = [row for row in rows if not (row["runner"] == "flex" and row["case"].endswith("backward"))]
    assert "FlexAttention" not in SECTIONS["flashmask"](framed(rows)).text()  # half a row is none


def test_the_summary_of_peers_says_where_cuattn_is_behind():
    rows = list(peer_rows("dropout", {"cuattn": 300.0, "fa2": 200.0, "cudnn": 400.0}))
    assert "| dropout 0.1, forward | FlashAttention-2, cuDNN | 0 of 2 | 0.75 | 0.75 (" in section("peers", rows).text()
    rows = list(peer_rows("dropout", {"cuattn": 300.0, "fa2": 200.0}))
    assert "| dropout 0.1, backward | FlashAttention-2 | 2 of 2 | 1.50 | 1.50 (" in section("peers", rows).text()


def test_the_summary_of_peers_counts_results_that_were_wrong():
    rows = list(peer_rows("dropout", {"cuattn": 300.0, "fa2": 200.0}))
    for row in rows:
        if row["ours"] and row["case"].endswith("d64-N4096-full-drop0.1/backward"):
            row["status"] = "wrong"
            del row["rate"]
    line = next(line for line in section("peers", rows).text().splitlines() if "dropout 0.1, backward" in line)
    assert line.endswith("| 1 of 2 | 1.50 | 1.50 (d128-N4096-full-drop0.1) | d64-N4096-full-drop0.1 |")
    assert "the error was above the bound" in section("peers", rows).text()


def test_every_case_behind_a_rival_is_shown_in_one_group():
    rows = list(peer_rows("dense", {"cuattn": 300.0, "fa4": 250.0, "cudnn": 200.0}))
    assert section("behind", rows).text() == "In no case that was measured."
    for row in rows:
        p = row["problem"]
        if row["runner"] == "fa4" and p["direction"] == "backward" and p["head_dim"] == 64:
            row["rate"] = 400.0 if p["causal"] else 301.0  # 0.75 and, too near to call, 0.997
    rows += peer_rows("deterministic", {"cuattn": 300.0, "fa4": 200.0})
    rows += peer_rows("dropout", {"cuattn": 300.0, "fa2": 600.0})
    lines = [line for line in section("behind", rows).text().splitlines() if line.startswith("| ")][1:]
    assert lines == [
        "| dropout, forward | 2 of 2 | 0.50 to 0.50 | FlashAttention-2 |",
        "| dropout, backward | 2 of 2 | 0.50 to 0.50 | FlashAttention-2 |",
        "| backward, d 64, no mask | 3 of 6 | 0.75 to 0.75 | FlashAttention-4 |",
    ]


def test_every_peer_case_has_a_group():

    from bench.cases import TABLES, select

    cases = [case for case in select(TABLES) if not case.table.startswith(("sparsity", "cpu"))]
    frame = framed({"case": case.name, "problem": case.as_dict()} for case in cases)
    labels = set(frame.apply(group, axis=1))
    assert {"deterministic gradients", "float64", "host time", "one query", "backward, d 64, masks"} <= labels
    assert len(labels) < 30


def test_conclusions_are_computed(tmp_path):
    """A section's words follow from its rows: turned round, the rows say the opposite."""
    (shown,) = redraw.available(names=["loop_order"])
    assert shown.summary().startswith("Yes: ")
    swap = {"keys-outside-o16": "queries-outside", "queries-outside": "keys-outside-o16"}
    frame = shown.frame
    turned = frame.assign(runner=frame["runner"].replace(swap))
    assert SECTIONS["loop_order"](turned).summary().startswith("No: ")


def made_up(name):
    """Rows of the shape that a study writes on a GPU."""
    from bench import sparsity, traffic
    from bench.cases import select

    if name == "sparsity":
        for kind in sparsity.KINDS:
            for step in range(10, 20):
                rho = step / 20
                problem = {"kind": kind, "n": 32768}
                yield {"case": f"figure-4a/{kind}-{step}/both", "runner": "cuattn", "status": "ok", "rho": rho,
                       "median_us": 1e5 * (1 - rho) + 500, "problem": problem}  # fmt: skip
    elif name == "lengths":
        for case in select(["lengths"]):
            for runner, speed in {"cuattn": 1.0, "standard": 3.0, "cudnn": 0.9}.items():
                if runner == "standard" and case.n_keys > 8192:
                    continue
                yield {"case": case.name, "runner": runner, "status": "ok", "problem": case.as_dict(),
                       "median_us": speed * case.n_keys**2 / 1e3, "peak_bytes": case.n_keys * 1000}  # fmt: skip
    else:
        for call in traffic.calls():
            moved = {"hbm_read": 1e9, "hbm_write": 1e8, "l2_to_sm": 3e9, "sm_to_l2": 1e9, "seconds": 1e-3}
            row = {"case": call.case, "runner": call.kernel, "status": "ok", "counters": moved, "theorem": 1.0}
            row["problem"] = {**vars(call), **({} if call.kernel == "standard" else {"block_m": 128, "block_n": 64})}
            yield row | ({} if call.kernel == "standard" else {"expected_l2_to_sm": 3.003e9})


@pytest.mark.parametrize("name", ["sparsity", "lengths", "traffic"])
def test_sections_show_what_a_gpu_will_write(name):
    shown = section(name, made_up(name))
    text = shown.text()
    expected = {
        "sparsity": "| document | 10 | 0.50 to 0.95 | 100 | 0.5 | 1.0000 |",
        "lengths": "| 65,536 | 4295 | – | 3865 | 65.5 |",
        "traffic": "| block-sparse, N 4096, d 64, s 0.25: cuattn, portable kernel | 128 | 3 | 3 | 1.1 |",
    }
    assert any(line.replace(" ", "").startswith(expected[name].replace(" ", "")) for line in text.splitlines()), text
    if shown.summary:
        said = {"lengths": "At 8,192 tokens, the longest that standard attention", "traffic": "within 0.1% over all"}
        assert said[name] in shown.summary()


def test_shapes_without_a_mask_are_drawn_and_summed_up():
    rows = list(peer_rows("dense", {"cuattn": 600.0, "cudnn": 500.0, "fa4": 500.0}))
    for row in rows:
        if row["case"] == "dense/d64-N1024-causal/forward" and row["ours"]:
            row["rate"] = 250.0
    dense = section("dense", rows)
    assert "| d 64, N 1024, causal | 250 | 500 | 500 | 600 | 500 | 500 |" in dense.text()
    said = dense.summary()
    assert "Forward, cuattn is the fastest in 17 of 18 shapes, 0.50 times" in said
    assert "(d 64, N 1024, causal)" in said
    assert "Backward, cuattn is the fastest in 18 of 18 shapes, 1.20 times" in said


def test_the_summaries_of_peers_and_masks_are_drawn_and_said():
    rows = list(peer_rows("masks-8k", {"cuattn": 500.0, "flex": 400.0, "fa4": 625.0}))
    rows = [row for row in rows if row["runner"] != "fa4" or row["problem"]["mask"] == "causal"]
    line = "| 8K tokens, d 128 | 500 to 500 | 11 of 12 | 1.20 | 0.80 (causal) |"
    assert line in section("flashmask", rows).summary()
    section("peers", rows)


def test_every_picture_of_a_table_is_shown_once(tmp_path):
    (tmp_path / "hopper.json").write_text(
        json.dumps({"runs": [], "rows": [row | {"run": 0} for row in peer_rows("dropout", {"cuattn": 300.0})]})
    )
    (tmp_path / "table-dropout.png").touch()
    assert redraw.tables(tmp_path).count("![dropout](table-dropout.png)") == 1


def test_the_summary_of_peers_says_what_determinism_costs():
    rows = list(peer_rows("deterministic", {"cuattn": 300.0, "fa4": 400.0}))
    for row in rows:
        if row["ours"] and row["problem"]["deterministic"]:
            row["rate"] = 250.0 if row["problem"]["causal"] else 270.0
    assert (
        "`deterministic=True`, in the plain backward's time, costs cuattn 11% to 20%, FlashAttention-4 0% to 0%."
        in (section("peers", rows).text())
    )


def cpu_rows():
    """Rows of `bench.cpu` with made-up times: ours is faster, but for the smallest problem."""
    from bench.cases import select

    for case in select(["cpu", "cpu-torch", "cpu-small"]):
        speeds = {"cuattn": 1.0, "sdpa-dense": 2.0, "numpy": 1.25, "sdpa-documents": 0.8}
        for runner, time in speeds.items():
            if runner == "numpy" and case.table != "cpu-small":
                continue
            us = 1e3 * time + (400.0 if runner == "cuattn" and case.heads == 64 else 0.0)
            row = {"case": case.name, "runner": runner, "ours": runner == "cuattn", "status": "ok"}
            yield {**row, "run": "cpu.json 000", "problem": case.as_dict(), "median_us": us, "samples_us": [us] * 3}


def test_the_cpu_is_summed_up_from_its_rows():
    cpu = section("cpu", cpu_rows())
    text = cpu.text()
    assert "| 1x8-d64-N4096-full-float32, forward, cuattn | 1 | 2 | 0.8 | – |" in text
    said = cpu.summary()
    assert "PyTorch's time over cuattn's without a mask: 2.00 to 2.00." in said
    assert "PyTorch by document's time over cuattn's with one, which PyTorch takes as a dense matrix: 0.80" in said
    assert "at most 1.04 times the three lines of NumPy and 0.1 ms (1x64-d32-N32-full-float32, " in said


def test_every_mask_is_in_the_gallery():
    pytest.importorskip("matplotlib")
    from bench import mask_gallery

    drawn = {make.__name__ for make, *_ in mask_gallery.CASES}
    assert drawn >= {name for name in masks.__all__ if name.islower()}
    mask_gallery.figure().savefig(io.BytesIO(), dpi=20)
