"""Turn committed rows into markdown tables and plots; needs no GPU.

``python -m bench.report bench/results/hopper.json --out bench/results/hopper.md --plots bench/results``

A ratio compares cuattn with the best rival of the same run; what an earlier run measured stands in parentheses and
enters no ratio.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cases import TABLES, select
from bench.peers import RUNNERS

__all__ = [
    "Line", "Table", "costs_of_determinism", "geometric_mean", "markdown", "picture", "read", "tables",
]  # fmt: skip

LOWER_IS_BETTER = ("us", "s")


@dataclass(frozen=True)
class Line:
    """One case: the rows of all runners and the comparison.

    Attributes
    ----------
    label : str
        The case without table and direction.
    rows : dict of str to dict
        Row by runner.
    run : int
        The run whose rows are compared: the latest of ours, or the latest of all.
    """

    label: str
    rows: dict[str, dict[str, Any]]
    run: tuple[str, int]

    def rate(self, name: str) -> float | None:
        """Return a runner's rate in the line's run, or None."""
        row = self.rows.get(name, {})
        return row.get("rate") if row.get("run") == self.run else None

    @property
    def unit(self) -> str:
        """The rows' unit."""
        return next((row["unit"] for row in self.rows.values() if "unit" in row), "")

    def best(self, ours: bool) -> str | None:
        """Return the fastest rival; or of ours the one that chooses its kernel itself, if timed, else the fastest."""
        if ours and "cuattn" in self.compared(ours):
            return "cuattn"
        pick = min if self.unit in LOWER_IS_BETTER else max
        return pick(self.compared(ours), key=lambda name: self.rate(name), default=None)

    def compared(self, ours: bool) -> list[str]:
        """Return cuattn's runners that were timed, or the rivals: those that the case names, else all."""
        names = [name for name, row in self.rows.items() if row["ours"] == ours and self.rate(name) is not None]
        rivals = next((row["problem"].get("rivals") for row in self.rows.values()), None)
        if not ours and rivals:
            return [name for name in names if name in rivals] or names
        return names

    @property
    def ratio(self) -> float | None:
        """How many times faster cuattn is than the best rival."""
        ours, rival = self.best(True), self.best(False)
        if ours is None or rival is None:
            return None
        quotient = self.rate(ours) / self.rate(rival)
        return 1 / quotient if self.unit in LOWER_IS_BETTER else quotient


@dataclass(frozen=True)
class Table:
    """Lines of one table and direction, in the order measured."""

    name: str
    direction: str
    lines: tuple[Line, ...]

    @property
    def runners(self) -> list[str]:
        """Runners with a rate in any line: cuattn's first, then peers in the registry's order."""
        found = {name: row["ours"] for line in self.lines for name, row in line.rows.items() if "rate" in row}
        order = list(RUNNERS)
        return sorted(found, key=lambda name: (not found[name], order.index(name) if name in order else -1))

    @property
    def common(self) -> str:
        """What all labels begin with, up to a dash; it belongs in the title."""
        labels = [line.label.split("-") for line in self.lines]
        shared = itertools.takewhile(
            lambda words: len(set(words)) == 1, zip(*(words[:-1] for words in labels), strict=False)
        )
        return "-".join(words[0] for words in shared)

    def short(self, line: Line) -> str:
        """Return a line's label without what all have in common."""
        return line.label.removeprefix(self.common).removeprefix("-")

    @property
    def ratios(self) -> dict[str, float]:
        """The ratio of every line that has one."""
        return {self.short(line): line.ratio for line in self.lines if line.ratio is not None}


def read(paths: Iterable[Path]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the runs and the rows of several files; each row's run becomes (file, number)."""
    runs, rows = [], []
    for path in paths:
        content = json.loads(path.read_text())
        runs += [{**run, "id": (path.name, run["id"])} for run in content["runs"]]
        rows += [{**row, "run": (path.name, row["run"])} for row in content["rows"]]
    return runs, rows


def tables(rows: Iterable[dict[str, Any]]) -> list[Table]:
    """Group rows into tables, in the order of `bench.cases`; unknown cases come last."""
    order = {case.name: place for place, case in enumerate(select(TABLES))}
    grouped: dict[tuple[str, str], dict[str, dict[str, dict[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: order.get(row["case"], len(order))):
        name, label, direction = row["case"].split("/")
        grouped.setdefault((name, direction), {}).setdefault(label, {})[row["runner"]] = row
    found = []
    for (name, direction), cases in grouped.items():
        lines = []
        for label, runners in cases.items():
            own = [row["run"] for row in runners.values() if row["ours"] and "rate" in row]
            lines.append(Line(label, runners, max(own or [row["run"] for row in runners.values()])))
        found.append(Table(name, direction, tuple(lines)))
    return found


def picture(table: str) -> str:
    """Return the file name of a table's picture (those of `bench.sections` have their section's name)."""
    return f"table-{table}.png"


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean.

    Examples
    --------
    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _cell(line: Line, name: str, best: str | None) -> str:
    row = line.rows.get(name)
    if row is None or row["status"] == "unsupported":
        return "–"
    if "rate" not in row:
        return row["status"]
    text = _number(row["rate"])
    if row["run"] != line.run:
        return f"({text})"
    return f"**{text}**" if name == best else text


def _spread(row: dict[str, Any]) -> float:
    """Return half the distance of the quartiles over the median."""
    return (row["q3_us"] - row["q1_us"]) / 2 / row["median_us"] if "q3_us" in row else 0.0


def markdown(table: Table) -> str:
    """Write one table, its summary, and why cells are empty."""
    names = table.runners
    unit = next((line.unit for line in table.lines if line.unit), "")
    rho = any(row.get("rho") for line in table.lines for row in line.rows.values())
    head = ["case", *(["ρ"] if rho else []), *names, "best peer", "ratio", "±"]
    subject = ", ".join(filter(None, [table.name, table.common.replace("-", " "), table.direction]))
    text = [f"### {subject}{f' ({unit})' if unit else ''}", "", "| " + " | ".join(head) + " |"]
    text.append("|" + "---|" * len(head))
    for line in table.lines:
        ours, rival = line.best(True), line.best(False)
        leaders = [name for name in (ours, rival) if name]
        fastest = max(leaders, key=lambda name: line.rate(name) * _sign(line.unit), default=None)
        cells = [table.short(line)]
        cells += [f"{next(iter(line.rows.values())).get('rho', 0):.3f}"] if rho else []
        cells += [_cell(line, name, fastest) for name in names]
        cells += [rival or "–", f"{line.ratio:.2f}" if line.ratio else "–"]
        cells += [f"{_spread(line.rows[ours]):.1%}" if ours else "–"]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join([*text, "", *_conclusion(table), *_extra(table), *_reasons(table)])


def _sign(unit: str) -> int:
    return -1 if unit in LOWER_IS_BETTER else 1


def _conclusion(table: Table) -> list[str]:
    ratios = table.ratios
    if not ratios:
        return []
    worst = min(ratios, key=ratios.__getitem__)
    bars = {table.short(line): next(iter(line.rows.values()))["problem"].get("bar", 1.0) for line in table.lines}
    below = [label for label, ratio in ratios.items() if ratio < bars[label]]
    text = f"Geometric mean of the ratio {geometric_mean(ratios.values()):.3f}, worst row {worst} {ratios[worst]:.3f}"
    text += f", {len(below)} of {len(ratios)} rows below their bar" + (f": {', '.join(below)}." if below else ".")
    return [text, ""]


def _extra(table: Table) -> list[str]:
    """Return what single tables add: the cost of determinism, the proportion to what is visible."""
    if table.name == "deterministic":
        return _cost_of_determinism(table)
    if table.name == "sparsity":
        return _proportion(table)
    return []


def costs_of_determinism(table: Table) -> dict[str, dict[str, float]]:
    """Return, by label and runner, what bitwise reproducible gradients cost in the plain backward's time."""
    lines = {line.label: line for line in table.lines}
    found: dict[str, dict[str, float]] = {}
    for label, exact in lines.items():
        plain = lines.get(label.removesuffix("-deterministic"))
        if plain is not None and plain is not exact:
            rates = {name: (plain.rate(name), exact.rate(name)) for name in table.runners}
            found[label] = {name: fast / slow - 1 for name, (fast, slow) in rates.items() if fast and slow}
    return found


def _cost_of_determinism(table: Table) -> list[str]:
    text = []
    for label, costs in costs_of_determinism(table).items():
        found = [f"{name} {cost:+.1%}" for name, cost in costs.items()]
        text.append(f"- {label}: time over the plain backward's: {', '.join(found) or 'not measured'}")
    return [*text, ""]


def _proportion(table: Table) -> list[str]:
    """Compare each mask's time with (1 - rho) times the unmasked time."""
    text = []
    for name in table.runners:
        times = {line.label: line.rows[name] for line in table.lines if "median_us" in line.rows.get(name, {})}
        full = next((row for label, row in times.items() if label.endswith("-full")), None)
        if full is None:
            continue
        for label, row in times.items():
            expected = (1 - row["rho"]) * full["median_us"]
            text.append(
                f"- {name} {label}: ρ {row['rho']:.3f}, {row['median_us'] / 1e3:.3f} ms, "
                f"{row['median_us'] / expected:.3f} x (1 - ρ) x the unmasked time"
            )
    return [*text, ""]


def _reasons(table: Table) -> list[str]:
    """Say, once per runner and reason, why cells are empty."""
    found: dict[tuple[str, str], list[str]] = {}
    for line in table.lines:
        for name, row in line.rows.items():
            if "reason" in row:
                found.setdefault((name, f"{row['status']}: {row['reason']}"), []).append(table.short(line))
    return [
        f"- {name} {reason} ({'all' if len(labels) == len(table.lines) else ', '.join(labels)})"
        for (name, reason), labels in found.items()
    ]


def _about(runs: Iterable[dict[str, Any]]) -> list[str]:
    text = []
    for run in runs:
        versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        trees = ", ".join(f"{name} {identity[:12]}" for name, identity in run["trees"].items()) or "not recorded"
        driver = f", driver {run['driver']}" if run.get("driver") else ""
        commit = f"commit {run['commit']}, " if run.get("commit") else ""
        text.append(f"- {run['time']}: {run['device']}{driver}; {versions}; {commit}trees: {trees}; `{run['command']}`")
    return text


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="markdown file; by default the terminal")
    parser.add_argument("--plots", type=Path, help="folder for PNG plots")
    arguments = parser.parse_args()
    runs, rows = read(arguments.files)
    found = tables(rows)
    text = "\n\n".join(markdown(table).rstrip() for table in found)
    text += "\n\n### Runs\n\n" + "\n".join(_about(runs)) + "\n"
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    else:
        print(text)
    if arguments.plots:
        from bench import plots

        for path in plots.draw(found, arguments.plots):
            print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
