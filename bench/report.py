"""Turn committed rows into tables beside peers: frames of rows, one line per case, markdown; needs no GPU.

    python -m bench.report bench/results/hopper.json --out hopper.md --plots FOLDER

A ratio compares cuattn with the best rival of the same run; what an earlier run measured stands in parentheses and
enters no ratio.
"""

import argparse
import itertools
import json
import math
import statistics
from pathlib import Path

import pandas as pd

from bench.cases import TABLES, select
from bench.peers import RUNNERS
from bench.style import INK, OURS, WORSE, bars, colour, legend, panels, save, table

__all__ = ["costs_of_determinism", "draw", "lines", "markdown", "of_table", "picture", "read", "tables"]

LOWER_IS_BETTER = ("us", "s")


def read(paths):
    """Return the runs and the rows of several files.

    Each row's run becomes ``FILE NUMBER``; ``table``, ``label`` and ``direction`` are columns, and so are the values
    inside a problem, counters and so on: ``problem.n``.
    """
    runs, rows = [], []
    for path in paths:
        content = json.loads(path.read_text())
        runs += [{**run, "id": f"{path.name} {run['id']:03d}"} for run in content["runs"]]
        rows += [{**row, "run": f"{path.name} {row['run']:03d}"} for row in content["rows"]]
    return runs, framed(rows)


def framed(rows):
    """Return rows as a frame, see `read`."""
    frame = pd.json_normalize(list(rows), max_level=1)
    if len(frame):
        frame[["table", "label", "direction"]] = frame["case"].str.split("/", expand=True)
        frame["ms"] = frame["median_us"] / 1e3 if "median_us" in frame else None
    return frame


def of_table(frame, *names):
    """Return the rows of some tables that succeeded, without the columns that none of them has."""
    if not len(frame):
        return frame
    found = frame[frame["table"].isin(names) & (frame["status"] == "ok")]
    return found.dropna(axis="columns", how="all") if len(found) else found


def lines(frame):
    """Return one line per case, in the order of `bench.cases`, unknown cases last.

    Beside the columns of its first row: ``run``, the one that is compared (the latest of ours, or the latest of all);
    ``rates`` by runner in that run; ``best`` of ours (the one that chooses its kernel itself, if timed, else the
    fastest), ``rivals`` (those that the case names, else all), the fastest ``rival``, and ``ratio``, how many times
    faster ours is.
    """
    order = {case.name: place for place, case in enumerate(select(TABLES))}
    if not len(frame) or "rate" not in frame:
        return pd.DataFrame(columns=["table", "direction", "ratio"])
    places = frame["case"].map(order).fillna(len(order))
    groups = frame.assign(place=places).sort_values("place", kind="stable").groupby("case", sort=False)
    return pd.DataFrame([_line(rows) for _, rows in groups])


def _line(rows):
    ours = dict(zip(rows["runner"], rows["ours"], strict=True))
    rated = rows.dropna(subset="rate")
    own = rated.loc[rated["ours"].astype(bool), "run"]
    run = max(own if len(own) else rows["run"])
    now = rated[rated["run"] == run]
    rates = dict(zip(now["runner"], now["rate"], strict=True))
    unit = rated["unit"].iloc[0] if len(rated) else ""
    lower = unit in LOWER_IS_BETTER
    named = rows["problem.rivals"].iloc[0] if "problem.rivals" in rows else None
    rivals = [name for name in rates if not ours[name]]
    rivals = [name for name in rivals if isinstance(named, list) and name in named] or rivals
    mine = [name for name in rates if ours[name]]
    pick = min if lower else max
    best = "cuattn" if "cuattn" in mine else pick(mine, key=rates.get, default="")
    rival = pick(rivals, key=rates.get, default="")
    ratio = rates[best] / rates[rival] if best and rival else math.nan
    found = {"run": run, "unit": unit, "rates": rates, "best": best, "rivals": rivals, "rival": rival}
    return {**rows.iloc[0], **found, "ratio": 1 / ratio if lower else ratio}


def tables(frame):
    """Yield, per table and direction, its name, its lines (``short``: labels without what they share) and its rows."""
    for key, found in lines(frame).groupby(["table", "direction"], sort=False):
        common = _common(found["label"])
        short = [label.removeprefix(common).removeprefix("-") for label in found["label"]]
        rows = frame.set_index("case").loc[found["case"]].reset_index()
        yield key, found.assign(short=short, common=common), rows


def _common(labels):
    """Return what all labels begin with, up to a dash; it belongs in the title."""
    words = zip(*(label.split("-")[:-1] for label in labels), strict=False)
    return "-".join(word[0] for word in itertools.takewhile(lambda word: len(set(word)) == 1, words))


def picture(name):
    """Return the file name of a table's picture (those of `bench.sections` have their section's name)."""
    return f"table-{name}.png"


def runners(rows):
    """Return the runners with a rate: cuattn's first, then peers in the registry's order."""
    order = list(RUNNERS)
    found = rows.dropna(subset="rate").drop_duplicates("runner")
    ours = dict(zip(found["runner"], found["ours"], strict=True))
    return sorted(ours, key=lambda name: (not ours[name], order.index(name) if name in order else -1))


def markdown(key, found, rows):
    """Write one table of `tables`, its summary, and why cells are empty."""
    who, rho = runners(rows), "rho" in rows and bool(rows["rho"].fillna(0).any())
    subject = ", ".join(filter(None, [key[0], found["common"].iloc[0].replace("-", " "), key[1]]))
    unit = next(filter(None, found["unit"]), "")
    by_runner = {case: group.set_index("runner") for case, group in rows.groupby("case")}
    written = []
    for line in found.to_dict("records"):
        of_case = by_runner[line["case"]]
        cells = {"case": line["short"], **({"ρ": f"{line['rho']:.3f}"} if rho else {})}
        cells |= {name: _cell(line, of_case, name) for name in who}
        cells["best peer"], cells["ratio"] = line["rival"] or "–", f"{line['ratio']:.2f}".replace("nan", "–")
        written.append({**cells, "±": _spread(of_case.loc[line["best"]]) if line["best"] else "–"})
    text = [f"### {subject}{f' ({unit})' if unit else ''}", "", table(pd.DataFrame(written)), ""]
    return "\n".join([*text, *_conclusion(found), *_extra(key, found, rows), *_reasons(found, rows)]).rstrip()


def _cell(line, rows, name):
    if name not in rows.index or rows.loc[name, "status"] == "unsupported":
        return "–"
    rate = rows.loc[name, "rate"]
    if not rate > 0:
        return str(rows.loc[name, "status"])
    text = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
    if rows.loc[name, "run"] != line["run"]:
        return f"({text})"
    leader = line["rival"] if line["ratio"] < 1 or not line["best"] else line["best"]
    return f"**{text}**" if name == leader else text


def _spread(row):
    """Return half the distance of the quartiles over the median."""
    return f"{(row['q3_us'] - row['q1_us']) / 2 / row['median_us']:.1%}" if row.get("q3_us", 0) > 0 else "0.0%"


def _conclusion(found):
    compared = found.dropna(subset="ratio").set_index("short")
    if not len(compared):
        return []
    ratios = compared["ratio"]
    bars_ = compared["problem.bar"].fillna(1.0) if "problem.bar" in compared else 1.0
    below = list(ratios[ratios < bars_].index)
    text = f"Geometric mean of the ratio {statistics.geometric_mean(ratios):.3f}, "
    text += f"worst row {ratios.idxmin()} {ratios.min():.3f}, {len(below)} of {len(ratios)} rows below their bar"
    return [text + (f": {', '.join(below)}." if below else "."), ""]


def _extra(key, found, rows):
    """Return what single tables add: the cost of determinism, the proportion to what is visible."""
    if key[0] == "deterministic":
        costs = costs_of_determinism(found)
        return [
            f"- {label}: time over the plain backward's: "
            + (", ".join(f"{name} {cost:+.1%}" for name, cost in of.items()) or "not measured")
            for label, of in costs.items()
        ] + [""]
    if key[0] != "sparsity":
        return []
    text = []
    for name in runners(rows):
        times = rows[rows["runner"] == name].set_index("label")
        full = times.loc[times.index.str.endswith("-full"), "ms"]
        text += [
            f"- {name} {label}: ρ {row['rho']:.3f}, {row['ms']:.3f} ms, "
            f"{row['ms'] / (1 - row['rho']) / full.iloc[0]:.3f} x (1 - ρ) x the unmasked time"
            for label, row in times.loc[found["label"]].iterrows()
            if len(full)
        ]
    return [*text, ""]


def costs_of_determinism(found):
    """Return, by label and runner, what bitwise reproducible gradients cost in the plain backward's time."""
    rates = found.set_index("label")["rates"]
    pairs = {label: label.removesuffix("-deterministic") for label in rates.index}
    return {
        label: {name: rates[plain][name] / rate - 1 for name, rate in rates[label].items() if name in rates[plain]}
        for label, plain in pairs.items()
        if plain != label and plain in rates
    }


def _reasons(found, rows):
    """Say, once per runner and reason, why cells are empty."""
    if "reason" not in rows:
        return []
    short = rows["case"].map(dict(zip(found["case"], found["short"], strict=True)))
    given = rows.assign(short=short, said=rows["status"] + ": " + rows["reason"]).dropna(subset="reason")
    return [
        f"- {name} {said} ({'all' if len(labels) == len(found) else ', '.join(labels)})"
        for (name, said), labels in given.groupby(["runner", "said"], sort=False)["short"]
    ]


def draw(frame, folder):
    """Draw every table, its directions side by side; return the files, named by `picture`."""
    groups = {}
    for key, found, rows in tables(frame):
        if runners(rows):
            groups.setdefault(key[0], []).append((key[1], found, rows))
    folder.mkdir(parents=True, exist_ok=True)
    for name, group in groups.items():
        save(_proportion(group) if name == "sparsity" else _rates(name, group), folder / picture(name))
    return [folder / picture(name) for name in groups]


def _rates(name, group):
    """Draw a panel of bars per direction, with cuattn's ratio to the best rival at the right edge."""
    count = max(sum(len(rates) + 1.2 for rates in found["rates"]) for _, found, _ in group)
    figure, axes = panels(len(group), 4.8, 1.2 + 0.125 * count)
    for axis, (direction, found, rows) in zip(axes, group, strict=True):
        bars(axis, pd.DataFrame(list(found["rates"]), index=found["short"])[runners(rows)], ".3g")
        for place, ratio in zip(axis.get_yticks(), found["ratio"], strict=True):
            if ratio > 0:
                shade = OURS if ratio >= 1 else WORSE
                where = dict(transform=axis.get_yaxis_transform(), ha="right", va="center")
                axis.text(1.0, place, f"{ratio:.2f}x", fontsize=8, color=shade, fontweight="bold", **where)
        axis.set_title(direction, fontsize=11)
        axis.set_xlabel(next(filter(None, found["unit"]), ""))
    legend(figure)
    figure.suptitle(f"{name}, {group[0][1]['common'].iloc[0].replace('-', ' ')}".rstrip(", "), color=INK)
    return figure


def _proportion(group):
    """Draw time against the share of visible tiles, with the line that proportion would be."""
    figure, axes = panels(len(group), 5.2, 4.2)
    for axis, (direction, _, rows) in zip(axes, group, strict=True):
        for name in runners(rows):
            times = rows[rows["runner"] == name]
            axis.plot(1 - times["rho"], times["ms"], "o", color=colour(name), label=name, markersize=5)
            full = times.loc[times["rho"] == 0, "ms"]
            axis.plot([0, *[1] * len(full)], [0, *full], "--", color=colour(name), linewidth=1, alpha=0.6)
        axis.set(title=direction, xlabel="share of visible tiles, 1 - ρ", ylabel="ms", xlim=(0, 1.03))
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9)
    figure.suptitle("time beside the line of proportion", color=INK)
    return figure


def _about(run):
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    trees = ", ".join(f"{name} {identity[:12]}" for name, identity in run["trees"].items()) or "not recorded"
    driver = f", driver {run['driver']}" if run.get("driver") else ""
    commit = f"commit {run['commit']}, " if run.get("commit") else ""
    return f"- {run['time']}: {run['device']}{driver}; {versions}; {commit}trees: {trees}; `{run['command']}`"


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="markdown file; by default the terminal")
    parser.add_argument("--plots", type=Path, help="folder for PNG plots")
    arguments = parser.parse_args()
    runs, frame = read(arguments.files)
    text = "\n\n".join([*(markdown(*part) for part in tables(frame)), "### Runs", "\n".join(map(_about, runs))])
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n")
    else:
        print(text)
    for path in draw(frame, arguments.plots) if arguments.plots else ():
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
