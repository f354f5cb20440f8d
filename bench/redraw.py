"""Redraw everything that is shown from the committed rows, without a GPU: pictures, tables, the README's section.

python -m bench.redraw            # pictures and text
python -m bench.redraw --text     # text alone; needs no matplotlib
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.progress import track

from bench import report
from bench.cpu import best, pairs, share
from bench.sections import LONG, SECTIONS
from bench.study import RESULTS

__all__ = ["available", "readme", "tables"]

ROOT = RESULTS.parent.parent
BEGIN, END = "<!-- measured: written by python -m bench.redraw -->", "<!-- /measured -->"
CPU_BEGIN, CPU_END = "<!-- cpu: written by python -m bench.redraw -->", "<!-- /cpu -->"
VERSIONS = ("cupy-cuda13x", "cupy-cuda12x", "torch", "cuda", "cudnn", "flash-attn-4")


def available(folder: Path = RESULTS) -> Iterator[tuple[str, ModuleType, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Yield (name, section, runs, rows) of every section whose rows are there."""
    for name in SECTIONS:
        section = importlib.import_module(f"bench.sections.{name}")
        files = getattr(section, "FILES", (getattr(section, "FILE", name),))
        paths = [folder / f"{file}.json" for file in files if (folder / f"{file}.json").exists()]
        runs, rows = report.read(paths)
        if any(row["status"] == "ok" for row in rows) and section.text(rows).count("\n|") > 1:
            yield name, section, runs, rows


def _block(name: str, section: ModuleType, rows: list[dict[str, Any]], folder: Path, link: str, level: str) -> str:
    parts = [f"{level} {section.TITLE}", _fill(section.text(rows))]
    if (folder / f"{name}.png").exists():
        parts.append(f"![{section.TITLE}]({link}{name}.png)")
    return "\n\n".join([*parts, f"`{section.COMMAND}`"])


def readme(folder: Path = RESULTS) -> str:
    """Return the README's section, between its marks."""
    found = list(available(folder))
    parts = [_brief(*item[:2], item[3], folder) for item in found]
    machines: dict[str, dict[str, None]] = {}
    for name, _, runs, rows in found:
        for run in _used(runs, rows):
            machines.setdefault(_machine(run), {})[name] = None
    intro = (
        "Everything below was measured by the commands that it names; `python -m bench.reproduce` runs them all on a "
        "machine with a GPU, `python -m bench.redraw` makes the pictures and tables again from the committed rows.  "
        "Results are checked before they are timed; rivals run in turn in one process.  The long tables are in "
        "[bench/results/tables.md](bench/results/tables.md)."
    )
    return "\n\n".join(
        [
            BEGIN,
            _fill(intro),
            _fill_list(f"- {machine}: {', '.join(names)}" for machine, names in sorted(machines.items())),
            *filter(None, parts),
            END,
        ]
    )


def _brief(name: str, section: ModuleType, rows: list[dict[str, Any]], folder: Path) -> str:
    """Return what the README shows of a section; nothing where it has but a long table."""
    if name not in LONG:
        return _block(name, section, rows, folder, "bench/results/", "###")
    if not hasattr(section, "figure"):
        return ""
    parts = [_fill(section.summary(rows))] if hasattr(section, "summary") else []
    parts += [f"![{section.TITLE}](bench/results/{name}.png)"] if (folder / f"{name}.png").exists() else []
    return "\n\n".join([f"### {section.TITLE}", *parts, f"`{section.COMMAND}`"])


def _fill(text: str) -> str:
    """Wrap paragraphs; leave tables and lists alone."""
    return "\n\n".join(
        part if part.startswith(("|", "-", "!", "#")) else textwrap.fill(part, 118, break_long_words=False)
        for part in text.split("\n\n")
    )


def _fill_list(items: Iterable[str]) -> str:
    return "\n".join(textwrap.fill(item, 118, subsequent_indent="  ", break_long_words=False) for item in items)


def _used(runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    used = {row["run"] for row in rows if row["status"] != "unsupported"}
    return [run for run in runs if run["id"] in used]


def _machine(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in VERSIONS if name in run["versions"])
    driver = f", driver {run['driver']}" if run.get("driver") else ""
    trees = ", ".join(f"{name} {tree[:12]}" for name, tree in run["trees"].items() if name in ("kernels", "cuattn"))
    commit = f"commit {run['commit']}" if run.get("commit") else f"trees {trees}"
    return f"{run['device']}{driver}, {versions}, {commit}"


def tables(folder: Path = RESULTS) -> str:
    """Return ``tables.md``: every case beside every peer, then the studies' long tables."""
    parts = ["# Every table", "Written by `python -m bench.redraw` from the rows beside this file."]
    for file in ("hopper", "portable"):
        if (folder / f"{file}.json").exists():
            _, rows = report.read([folder / f"{file}.json"])
            parts.append(f"## {file}")
            parts += _with_pictures(report.tables(rows), folder)
    for name, section, _, rows in available(folder):
        if name in LONG:
            parts.append(_block(name, section, rows, folder, "", "##"))
    return "\n\n".join(parts) + "\n"


def _with_pictures(found: list[report.Table], folder: Path) -> Iterator[str]:
    """Yield every table, and before the first of a name its picture."""
    seen = set()
    for table in found:
        path = folder / report.picture(table.name)
        if table.name not in seen and path.exists():
            yield f"![{table.name}]({path.name})"
        seen.add(table.name)
        yield report.markdown(table).rstrip()


def insert(text: str, section: str) -> str:
    """Return a README with the section replaced that begins and ends with the same marks."""
    first, last = section.splitlines()[0], section.splitlines()[-1]
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not (begin and end):
        raise ValueError(f"the README has no place for the results: expected {first} and {last}")
    return before + section + after


def cpu(folder: Path = RESULTS) -> str:
    """Return the README's paragraph on the CPU, between its marks."""
    found = json.loads((folder / "cpu.json").read_text())
    plain = {row["direction"]: (pairs(row), _of_the_fastest(row)) for row in found["rows"] if row["mask"] == "none"}
    masked = [pairs(row) for row in found["rows"] if row["mask"] != "none"]
    medians, fastest = (", ".join(f"{of[n]:.2f}" for of in plain.values()) for n in (0, 1))
    about = found["environment"]
    text = (
        f"Beside PyTorch's `scaled_dot_product_attention`, which takes masks as dense matrices, in one run on "
        f"{about['cores']} cores of a shared machine ({about['cpu']}; `python bench/cpu.py`, "
        f"{len(found['rows'][0]['seconds']['torch'])} turns; all samples are in `bench/results/cpu.json`).  PyTorch's "
        f"time over cuattn's without a mask, forward, forward with l and m, forward and backward: {medians} in the "
        f"median of the turns, {fastest} between the fastest calls of each.  With a mask cuattn computes only the "
        f"tiles that somebody sees, and has {min(masked):.1f} to {max(masked):.1f} times the speed (medians).  Its own "
        f"time under a mask over that without, median of the turns, for the share of 128 x 128 tiles that is visible: "
        f"{_shares(found)}.  Extra memory at N = 16384 is "
        f"{max(found['memory_mb_per_thread'].values()):.0f} MB a thread."
    )
    return "\n\n".join([CPU_BEGIN, _fill(text), CPU_END])


def _shares(found: dict[str, Any]) -> str:
    by_length = {}
    for row in found["rows_alone"]:
        if row["mask"] != "none" and row["direction"] == "forward":
            cell = f"{share(row, found)[1]:.3f} for {1 - row['rho']:.3f} ({row['mask']})"
            by_length.setdefault(row["n"], []).append(cell)
    return "; ".join(f"forward at N = {n} {', '.join(cells)}" for n, cells in by_length.items())


def _of_the_fastest(row: dict[str, Any]) -> float:
    return best(row, "torch") / best(row, "cuattn")


def draw(console: Console, folder: Path = RESULTS) -> None:
    """Draw every picture."""
    for name, section, _, rows in track(list(available(folder)), "pictures", console=console, transient=True):
        if hasattr(section, "figure"):
            section.figure(rows).savefig(folder / f"{name}.png", dpi=110, facecolor="white")
    from bench import plots

    for file in ("hopper", "portable"):
        if (folder / f"{file}.json").exists():
            plots.draw(report.tables(report.read([folder / f"{file}.json"])[1]), folder)
    for command in (("bench.mask_gallery",), ("bench.cpu", "--plot")):
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = json.loads((folder / "denoise.json").read_text())["rows"] if (folder / "denoise.json").exists() else []
    if rows:
        from bench import denoise

        denoise.picture(denoise.photograph(), folder / "denoise.png")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", action="store_true", help="leave the pictures as they are")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.text:
        draw(console)
    (RESULTS / "tables.md").write_text(tables())
    path = ROOT / "README.md"
    path.write_text(insert(insert(path.read_text(), readme()), cpu()))
    console.print(f"{path.relative_to(ROOT)} and bench/results/ are up to date")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
