"""Turn committed rows into tables beside peers: frames of rows, one line per case, markdown, pictures; needs no GPU.

A ratio compares cuattn with the best rival of the same run; what an earlier run measured stands in parentheses and
enters no ratio.
"""

import itertools
import json
import math
import statistics

import pandas as pd

from bench.cases import TABLES, select
from bench.peers import RUNNERS
from bench.style import INK, bars, chart, curves, proportion, save, table

LOWER_IS_BETTER = ("us", "s")
GIGABYTES = {  # column: the columns of bytes that it adds up
    "GB": ["counters.hbm_read", "counters.hbm_write"],
    "entered": ["counters.l2_to_sm"],
    "expected": ["expected_l2_to_sm"],
    "algorithm": ["expected_read", "expected_write"],
}


class Section:
    """What is shown of some rows: a table in markdown, and often a sentence or two and a figure.

    Attributes
    ----------
    title, command, about : str
        Its heading, what measures it, and what stands above the table.
    files : tuple of str
        Names of the files of rows that it reads; by default its own name's.
    prefix : str
        Of the tables without whose rows it is left out.
    frame : DataFrame
        The rows, see `read`.
    name, runs : str, list of dict
        Its name, and the runs of its rows.
    """

    title = command = prefix = about = ""
    files = ()
    summary = figure = None

    def __init__(self, frame, name="", runs=()):
        self.frame, self.name, self.runs = frame, name, runs

    def of(self, *names):
        """Return the rows of some tables that succeeded, see `of_table`."""
        return of_table(self.frame, *names)

    def lines(self):
        """Return the table, a column per heading."""
        raise NotImplementedError

    def text(self):
        """Return the table, in markdown, under what is said about it."""
        return f"{self.about}\n\n{table(pd.DataFrame(self.lines()))}"


def read(paths):
    """Return the runs and the rows of several files.

    Each row's run becomes ``FILE NUMBER``; ``table``, ``label`` and ``direction`` are columns, and so are the values
    inside a problem, counters and so on: ``problem.n``.  ``ms`` and gigabytes come beside them: ``GB`` of device memory
    traffic, ``entered`` the multiprocessors, ``expected`` to enter, moved by the ``algorithm``.
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
        for name, columns in GIGABYTES.items():
            if set(columns) <= set(frame):
                frame[name] = frame[columns].sum(axis=1, skipna=False) / 1e9
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
    if not len(frame) or "rate" not in frame:
        return pd.DataFrame(columns=["table", "direction", "ratio"])
    order = {case.name: place for place, case in enumerate(select(TABLES))}
    groups = dict(iter(frame.groupby("case", sort=False)))
    return pd.DataFrame([_line(groups[case]) for case in sorted(groups, key=lambda case: order.get(case, len(order)))])


def _line(rows):
    rated = rows.dropna(subset="rate")
    own = rated[rated["ours"].astype(bool)]
    run = (own if len(own) else rows)["run"].max()
    now = rated[rated["run"] == run].set_index("runner")
    unit = next(iter(rated["unit"]), "")
    speeds = now["rate"] ** (-1 if unit in LOWER_IS_BETTER else 1)
    mine, rivals = (speeds[now["ours"].astype(bool) == ours] for ours in (True, False))
    named = rows["problem.rivals"].iloc[0] if "problem.rivals" in rows else None
    named = rivals.filter(named if isinstance(named, list) else [])
    rivals = named if len(named) else rivals
    best = "cuattn" if "cuattn" in mine else mine.idxmax() if len(mine) else ""
    rival = rivals.idxmax() if len(rivals) else ""
    ratio = mine[best] / rivals[rival] if best and rival else math.nan
    found = {"run": run, "unit": unit, "rates": dict(now["rate"]), "best": best, "rivals": list(rivals.index)}
    return {**rows.iloc[0], **found, "rival": rival, "ratio": ratio}


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
    subject = ", ".join(filter(None, [key[0], found["common"].iloc[0].replace("-", " "), key[1]]))
    unit = next(filter(None, found["unit"]), "")
    by_case = {case: group.set_index("runner") for case, group in rows.groupby("case")}
    written = []
    for line in found.to_dict("records"):
        of_case = by_case[line["case"]]
        cells = {"case": line["short"]}
        if "rho" in rows and rows["rho"].fillna(0).any():
            cells["ρ"] = f"{line['rho']:.3f}"
        cells |= {name: _cell(line, of_case.loc[name]) if name in of_case.index else "–" for name in runners(rows)}
        cells["best peer"], cells["ratio"] = line["rival"] or "–", f"{line['ratio']:.2f}".replace("nan", "–")
        written.append({**cells, "±": _spread(of_case.loc[line["best"]]) if line["best"] else "–"})
    text = [f"### {subject}{f' ({unit})' if unit else ''}", "", table(pd.DataFrame(written)), ""]
    return "\n".join([*text, *_conclusion(found), *_extra(key, found, rows), *_reasons(found, rows)]).rstrip()


def _cell(line, row):
    if row["status"] == "unsupported":
        return "–"
    rate = row["rate"]
    if not rate > 0:
        return str(row["status"])
    text = f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
    if row["run"] != line["run"]:
        return f"({text})"
    leader = line["rival"] if line["ratio"] < 1 or not line["best"] else line["best"]
    return f"**{text}**" if row.name == leader else text


def _spread(row):
    """Return half the distance of the quartiles over the median."""
    return f"{(row['q3_us'] - row['q1_us']) / 2 / row['median_us']:.1%}" if row.get("q3_us", 0) > 0 else "0.0%"


def _conclusion(found):
    compared = found.dropna(subset="ratio").set_index("short")
    if not len(compared):
        return []
    ratios = compared["ratio"]
    below = list(ratios[ratios < compared.get("problem.bar", ratios * 0 + 1).fillna(1.0)].index)
    text = f"Geometric mean of the ratio {statistics.geometric_mean(ratios):.3f}, "
    text += f"worst row {ratios.idxmin()} {ratios.min():.3f}, {len(below)} of {len(ratios)} rows below their bar"
    return [text + (f": {', '.join(below)}." if below else "."), ""]


def _extra(key, found, rows):
    """Return what single tables add: the cost of determinism, the proportion to what is visible."""
    text = []
    if key[0] == "deterministic":
        for label, costs in costs_of_determinism(found).items():
            said = ", ".join(f"{name} {cost:+.1%}" for name, cost in costs.items()) or "not measured"
            text.append(f"- {label}: time over the plain backward's: {said}")
    elif key[0] == "sparsity":
        for name, times in rows.dropna(subset="rate").groupby("runner", sort=False):
            full = times.loc[times["label"].str.endswith("-full"), "ms"]
            text += [
                f"- {name} {row['label']}: ρ {row['rho']:.3f}, {row['ms']:.3f} ms, "
                f"{row['ms'] / (1 - row['rho']) / full.iloc[0]:.3f} x (1 - ρ) x the unmasked time"
                for row in times.to_dict("records")
                if len(full)
            ]
    else:
        return []
    return [*text, ""]


def standing(ratios):
    """Return in how many cases cuattn is the fastest, the geometric mean of its ratios, and the worst and its case."""
    ahead = f"{(ratios >= 1).sum()} of {len(ratios)}"
    return ahead, f"{statistics.geometric_mean(ratios):.2f}", f"{ratios.min():.2f}", ratios.idxmin()


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
    given = rows.merge(found[["case", "short"]]).dropna(subset="reason")
    return [
        f"- {name} {status}: {reason} ({'all' if len(labels) == len(found) else ', '.join(labels)})"
        for (name, status, reason), labels in given.groupby(["runner", "status", "reason"], sort=False)["short"]
    ]


def draw(frame, folder):
    """Draw every table, its directions side by side; return the files, named by `picture`."""
    groups = {}
    for (name, direction), found, rows in tables(frame):
        if who := runners(rows):
            groups.setdefault(name, []).append((direction, found, rows, who))
    for name, group in groups.items():
        save(_proportion(group) if name == "sparsity" else _rates(name, group), folder / picture(name))
    return [folder / picture(name) for name in groups]


def _rates(name, group):
    """Draw a panel of bars per direction; cuattn's ratio to the best rival stands behind each name."""
    parts = []
    for direction, found, _, who in group:
        ratios = found["ratio"].map(" ({:.2f}x)".format, na_action="ignore").fillna("")
        rates = pd.DataFrame(list(found["rates"]), index=found["short"] + ratios)[who]
        parts.append((bars, rates, dict(numbers=".3g", title=direction, xlabel=next(filter(None, found["unit"]), ""))))
    figure = chart(*parts, width=4.8, height=1.4 + 0.125 * max(rates.size + len(rates) for _, rates, _ in parts))
    figure.suptitle(f"{name}, {group[0][1]['common'].iloc[0].replace('-', ' ')}".rstrip(", "), color=INK)
    return figure


def _proportion(group):
    """Draw time against the share of visible tiles, and what proportion would be."""
    about = dict(xlabel="share of visible tiles, 1 - ρ", ylabel="ms", xlim=(0, 1.03), ylim=(0, None))
    wide = [rows.assign(seen=1 - rows["rho"]).pivot_table("ms", "seen", "runner") for _, _, rows, _ in group]
    return chart(*((curves, proportion(x), {**about, "title": of[0]}) for x, of in zip(wide, group, strict=True)))
