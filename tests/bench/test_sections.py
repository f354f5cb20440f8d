"""What the READMEs show: sections from rows, both in step with the committed rows, one command for all."""

import argparse
import importlib
import io
import json
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from bench import redraw, reproduce, sparsity, traffic
from bench.cases import TABLES, select
from bench.report import framed
from bench.rows import RESULTS
from bench.sections import PEER_TABLES, SECTIONS, speed
from bench.sections.peers import ABOUT
from bench.style import table
from cuattn import masks

ROOT = Path(__file__).resolve().parents[2]
QUIET = Console(file=io.StringIO())


def shown(name, rows):
    """The README's table, or the long one, of a section of made-up rows; what it draws is drawn."""
    section, frame = SECTIONS[name], framed(list(rows))
    frame = frame[frame["table"].isin(section.tables) & (frame["status"] == "ok")]
    if section.figure and importlib.util.find_spec("matplotlib"):
        section.figure(frame).savefig(io.BytesIO(), dpi=30)
    return table((section.table or section.details)(frame))


def test_every_section_names_its_scripts_and_tables():
    for section in (SECTIONS | PEER_TABLES).values():
        assert section.title
        assert section.tables
        assert section.table or section.details or section.figure
        assert all((ROOT / "bench" / f"{command.split()[0]}.py").exists() for command in section.commands)


@pytest.mark.parametrize(("name", "section", "rows"), [pytest.param(*of, id=of[0]) for of in redraw.available()])
def test_committed_rows_have_a_table_and_a_picture(name, section, rows):
    for shows in filter(None, (section.table, section.details)):
        text = redraw.block(name, section, rows, shows, "", RESULTS)
        assert text.count("\n|") > 2
        assert "nan" not in text.lower().split()
        frame = shows(rows[rows["status"] == "ok"])  # its lines say what they are of
        assert any(frame.index.names) or not pd.api.types.is_numeric_dtype(frame.dtypes.iloc[0])
    assert rows["machine"].all()
    if section.figure:
        pytest.importorskip("matplotlib")
        section.figure(rows[rows["status"] == "ok"]).savefig(io.BytesIO(), dpi=40)
        assert (RESULTS / f"{name}.png").exists()


def test_the_pages_are_those_of_the_rows():
    for path, (mark, section) in redraw.WRITTEN.items():
        assert redraw.insert(path.read_text(), mark, section()) == path.read_text(), "run python -m bench.redraw --text"
    assert (RESULTS / "tables.md").read_text() == redraw.tables(), "run python -m bench.redraw --text"


def test_the_section_goes_between_its_marks_and_nowhere_else():
    begin, end = redraw.BEGIN.format("measured"), redraw.END.format("measured")
    text = f"above\n{begin}\nold\n{end}\nbelow\n"
    assert redraw.insert(text, "measured", "new") == f"above\n{begin}\n\nnew\n\n{end}\nbelow\n"
    with pytest.raises(ValueError, match="no place"):
        redraw.insert("nothing here", "measured", "new")


def test_tables_have_three_digits():
    text = table(pd.DataFrame({"a": list("xyzw"), "b": [1234.5, 0.012345, None, "as it is"]}))
    assert [line.split("|")[2].strip() for line in text.splitlines()[2:]] == ["1,234", "0.0123", "–", "as it is"]


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
    text = table(SECTIONS["flashmask"].details(framed(rows)))
    assert text.index("8K tokens, d 128") < text.index("32K tokens, d 64")
    line = next(line for line in text.splitlines() if "| FlexAttention | causal_document" in line)
    forward, backward, total, *others = [cell.strip() for cell in line.split("|")[4:-1]]
    assert float(total) == pytest.approx(float(forward) + float(backward), rel=0.01)
    assert others == ["400", "400", "400", "0.5"]
    assert text.count("| cuattn |") == 24
    rows = [row for row in rows if not (row["runner"] == "flex" and row["case"].endswith("backward"))]
    assert "FlexAttention" not in table(SECTIONS["flashmask"].details(framed(rows)))  # half a row is none


def test_the_summary_of_peers_counts_results_that_were_wrong():
    rows = list(peer_rows("dropout", {"cuattn": 300.0, "fa2": 200.0}))
    for row in rows:
        if row["ours"] and row["case"].endswith("d64-N4096-full-drop0.1/backward"):
            row["status"] = "wrong"
            del row["rate"]
    line = next(line for line in shown("peers", rows).splitlines() if "dropout 0.1 | backward" in line)
    assert line.endswith("| 1 of 2 | 1.50 | 1.50 (d128-N4096-full-drop0.1) |")


def test_the_summary_of_speed_says_where_cuattn_is_behind():
    rows = [*peer_rows("dense", {"cuattn": 300.0, "fa4": 250.0}), *peer_rows("dropout", {"cuattn": 1.0, "fa2": 9.0})]
    rows += peer_rows("shapes", {"cuattn": 300.0, "fa3": 400.0, "cudnn": 200.0})
    text = shown("speed", rows)
    assert "| FlashAttention's sweep, full and causal | FlashAttention-4 | 1.20 (1.20) | 1.20 (1.20) |" in text
    assert "| decoding, one query | FlashAttention-3, cuDNN | 0.75 (0.75) | – |" in text
    words, slow = speed.said(framed([row for row in rows if "dropout" not in row["case"]]))
    assert (
        "In 48 of 141 cases" in words and "most often: FlashAttention-3 without masks on the GPU (93 of 93)." in words
    )
    assert "cross attention, backward: 0.75 of the fastest rival's speed" in slow


def test_every_case_behind_a_rival_is_shown():
    rows = list(peer_rows("dense", {"cuattn": 300.0, "fa4": 250.0, "cudnn": 200.0}))
    assert len(shown("behind", rows).splitlines()) == 2  # the heading alone
    for row in rows:
        p = row["problem"]
        if row["runner"] == "fa4" and p["direction"] == "backward" and p["head_dim"] == 64:
            row["rate"] = 400.0 if p["causal"] else 301.0  # 0.75 and, too near to call, 0.997
    rows += peer_rows("deterministic", {"cuattn": 300.0, "fa4": 200.0})
    rows += peer_rows("dropout", {"cuattn": 300.0, "fa2": 600.0})
    assert shown("behind", rows).splitlines()[2:] == [
        "| dropout 0.1 | backward | 2 | 0.5 | 0.5 | FlashAttention-2 |",
        "| dropout 0.1 | forward | 2 | 0.5 | 0.5 | FlashAttention-2 |",
        "| hidden size 2048, d 64 to 256, full and causal | backward | 4 | 0.75 | 0.75 | FlashAttention-4 |",
    ]


def test_every_peer_table_is_described_and_shown():
    measured = {case.table for case in select(TABLES) if not case.table.startswith("cpu")}
    assert measured | {"first-call", "scores-first-call", "scores-tables"} == set(ABOUT)
    assert set(ABOUT) - {"gpt2", "lengths"} == {name.removeprefix("table-") for name in PEER_TABLES}


def test_conclusions_are_computed():
    """What a section says follows from its rows: turned round, the rows say the opposite."""
    ((_, section, frame),) = redraw.available(sections={"loop_order": SECTIONS["loop_order"]})
    swap = {"keys-outside-o16": "queries-outside", "queries-outside": "keys-outside-o16"}
    for rows, faster in ((frame, True), (frame.assign(runner=frame["runner"].replace(swap)), False)):
        times = section.table(rows).xs("keys-outside-o16", level="runner")["times the time of queries outside"]
        assert ((times > 1) == faster).all()


def made_up(name):
    """Rows of the shape that a study writes on a GPU."""
    common = {"status": "ok", "ours": True}
    if name == "sparsity":
        for kind in sparsity.KINDS:
            for step in range(10, 20):
                rho = step / 20
                problem = {"kind": kind, "n": 32768}
                yield {"case": f"figure-4a/{kind}-{step}/both", "runner": "cuattn", "rho": rho,
                       "median_us": 1e5 * (1 - rho) + 500, "problem": problem, **common}  # fmt: skip
    elif name == "lengths":
        for case in select(["lengths"]):
            for runner, speed in {"cuattn": 1.0, "standard": 3.0, "cudnn": 0.9}.items():
                if runner == "standard" and case.n_keys > 8192:
                    continue
                yield {**common, "case": case.name, "runner": runner, "problem": case.as_dict(),
                       "median_us": speed * case.n_keys**2 / 1e3, "peak_bytes": case.n_keys * 1000}  # fmt: skip
    else:
        for call in traffic.calls():
            moved = {"hbm_read": 1e9, "hbm_write": 1e8, "l2_to_sm": 3e9, "sm_to_l2": 1e9, "seconds": 1e-3}
            row = {"case": call.case, "runner": call.kernel, "counters": moved, "theorem": 1.0, **common}
            row["problem"] = {**vars(call), **({} if call.kernel == "standard" else {"block_m": 128, "block_n": 64})}
            yield row | ({} if call.kernel == "standard" else {"expected_l2_to_sm": 3.003e9})


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sparsity", "| document | 10 | 0.05 to 0.50 | 5.5 to 50.5 | 100 | 0.5 | 1.0000 |"),
        ("lengths", "| 65,536 | 4,295 | – | 3,865 | 65.5 | – | 65.5 | 0.9 |"),
        ("traffic", "| proposition 4 | forward | cuattn, portable kernel | 0.999 | 0.999 | – | 0.367 | 0.367 | – |"),
    ],
)
def test_sections_show_what_a_gpu_will_write(name, line):
    assert line in shown(name, made_up(name)).splitlines()


def test_what_every_call_moves_is_listed():
    text = table(SECTIONS["traffic"].details(framed(list(made_up("traffic")))))
    assert "| proposition 4 | forward | 4,096 | 64 | 0.25 | cuattn, portable kernel | 128 | 3 | 3 | 1.1 |" in text


def test_shapes_without_a_mask_are_drawn_and_summed_up():
    rows = list(peer_rows("dense", {"cuattn": 600.0, "cudnn": 500.0, "fa4": 500.0}))
    for row in rows:
        if row["case"] == "dense/d64-N1024-causal/forward" and row["ours"]:
            row["rate"] = 250.0
    text = shown("peers", rows)
    assert "| forward | cuDNN, FlashAttention-4 | 23 of 24 | 1.16 | 0.50 (d64-N1024-causal) |" in text
    assert "| backward | cuDNN, FlashAttention-4 | 24 of 24 | 1.20 | 1.20 (" in text
    if importlib.util.find_spec("matplotlib"):
        SECTIONS["dense"].figure(framed(rows)).savefig(io.BytesIO(), dpi=30)


def test_the_summary_of_masks_is_drawn_and_said():
    rows = list(peer_rows("masks-8k", {"cuattn": 500.0, "flex": 400.0, "fa4": 625.0}))
    rows = [row for row in rows if row["runner"] != "fa4" or row["problem"]["mask"] == "causal"]
    line = "| twelve masks, 8K tokens, d 128 | 500 | 500 | 11 of 12 | 1.20 | 0.80 (causal) |"
    assert line in shown("flashmask", rows)


def test_shapes_are_summed_up_by_what_calls_them():
    text = shown("shapes", peer_rows("shapes", {"cuattn": 600.0, "fa3": 500.0}))
    assert "| few | backward | 4 | 4 of 4 | 1.20 | 1.20 (few-1x8-d128-N8192-causal) |" in text


def test_the_cost_of_determinism_is_shown():
    rows = list(peer_rows("deterministic", {"cuattn": 300.0, "fa4": 400.0}))
    for row in rows:
        if row["ours"] and row["problem"]["deterministic"]:
            row["median_us"] *= 1.2 if row["problem"]["causal"] else 1.1
    text = shown("deterministic", rows)
    assert "| d128-N8192-causal | 20.0% | 0.0% |" in text
    assert "| d128-N8192-full | 10.0% | 0.0% |" in text


def cpu_rows():
    """Rows of `bench.cpu` with made-up times: ours is faster, but for the smallest problem."""
    for case in select(["cpu", "cpu-torch", "cpu-small"]):
        speeds = {"cuattn": 1.0, "sdpa-dense": 2.0, "numpy": 1.25, "sdpa-documents": 0.8}
        for runner, time in speeds.items():
            if runner == "numpy" and case.table != "cpu-small":
                continue
            us = 1e3 * time + (400.0 if runner == "cuattn" and case.heads == 64 else 0.0)
            row = {"case": case.name, "runner": runner, "ours": runner == "cuattn", "status": "ok"}
            yield {**row, "run": "cpu.json 000", "problem": case.as_dict(), "median_us": us, "samples_us": [us] * 3}


def test_the_cpu_is_summed_up_from_its_rows():
    rows = list(cpu_rows())
    text = table(SECTIONS["cpu"].details(framed(rows)))
    assert "| 1x8-d64-N4096-full-float32 | forward | cuattn | 1 | 2 | 0.8 | – |" in text
    said = shown("cpu", rows)
    assert "| many tiles | without a mask | PyTorch, dense mask | 4 | 2 | 2 | 0.45 |" in said
    assert "| many tiles | with a mask | PyTorch, a call per document | 6 | 0.8 | 0.8 | 1.12 |" in said
    assert "| problems of a few rows | without a mask | NumPy formula | 20 | 0.893 | 1.25 | 1.04 |" in said


def test_every_mask_is_in_the_gallery():
    pytest.importorskip("matplotlib")
    from bench import mask_gallery

    drawn = {make.__name__ for make, *_ in mask_gallery.CASES}
    assert drawn >= {*masks.CONSTRUCTORS}
    mask_gallery.figure().savefig(io.BytesIO(), dpi=20)
