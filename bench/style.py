"""How everything that is shown looks: names, colours, markdown, axes.  Only figures import matplotlib."""

import numbers
import statistics

import pandas as pd

NOISE = 0.005  # half a percent either way is called equal
INK, QUIET, OURS, WORSE = "#22303c", "#6b7a86", "#24658f", "#d9674f"
PEERS = {  # runner: name, colour
    "cuattn-sm80": ("cuattn, portable kernel", "#5b9bc4"),
    "cuattn-sm90": ("cuattn, Hopper kernel", "#9cc4de"),
    "cuattn-attention": ("cuattn, o alone", "#5b9bc4"),
    "standard": ("standard attention", "#8a949d"),
    "numpy": ("NumPy formula", "#8a949d"),
    "math": ("math", "#8a949d"),
    "cudnn": ("cuDNN", "#f2a65a"),
    "fa2": ("FlashAttention-2", "#b8bfc6"),
    "fa4": ("FlashAttention-4", WORSE),
    "fa4-varlen": ("FlashAttention-4 (packed)", "#e79c8b"),
    "fa3": ("FlashAttention-3", "#a8503c"),
    "fa3-varlen": ("FlashAttention-3 (packed)", "#c98a7b"),
    "flex": ("FlexAttention", "#bfa9d6"),
    "flex-FLASH": ("FlexAttention (FLASH)", "#8c6bb1"),
    "flex-autotune": ("FlexAttention (max-autotune)", "#d9cbe8"),
    "cuattn-without": ("cuattn, without the function", "#9cc4de"),
    "cuattn-function": ("cuattn, mask as a function", "#9cc4de"),
    "cuattn-boolean": ("cuattn, mask as a matrix", "#5b9bc4"),
    "cuattn-array": ("cuattn, mask as a new matrix", "#b9d4e6"),
    "mem-efficient": ("memory-efficient", "#c9b458"),
    "jax": ("JAX", "#7fb285"),
    "sdpa": ("PyTorch", "#b5703a"),
    "sdpa-dense": ("PyTorch, dense mask", "#f2a65a"),
    "sdpa-documents": ("PyTorch, a call per document", "#e79c8b"),
    "keys-outside": ("keys outside, O in float32", WORSE),
    "keys-outside-o16": ("keys outside, O in float16", "#e79c8b"),
    "queries-outside": ("queries outside", OURS),
}

LABELS = {  # column, or another word in a table: what a reader calls it
    "n": "tokens", "n_keys": "tokens", "block_m": "query rows in a block", "density": "density s", "rho": "sparsity ρ",
    "share": "share of visible tiles", "rate": "TFLOP/s", "spread": "±", "rival": "fastest rival",
    "ratio": "times its speed", "GB": "GB of device memory", "entered": "GB into the multiprocessors",
    "expected": "GB by the algorithm", "algorithm": "GB by the algorithm", "lectured": "GB by the lecture's formula",
    "tables": "MB", "thread": "MB", "same_flags": "as flags", "reason": "why not all", "milliseconds": "ms",
    "tensor_pct": "tensor %", "issue_pct": "issue %", "dram_pct": "DRAM %", "l2_pct": "L2 %",
    "occupancy_pct": "occupancy %", "bank_conflicts": "bank conflicts", "stalls": "warps' time",
    "theorem-2": "theorem 2", "theorem-5": "theorem 5", "proposition-4": "proposition 4", "beyond-l2": "one long head",
    "cuattn-column": "column mask", "cuattn-dense": "the same mask dense", "cuattn-documents": "one call per document",
    "cuattn-column-free": "column mask, the plan's choice", "cuattn-forward": "forward", "cuattn-backward": "backward",
    "cuattn-cupy": "cuattn, CuPy arrays", "cuattn-numpy": "cuattn, NumPy arrays",
    "cpu": "many tiles", "cpu-statistics": "many tiles, with l and m", "cpu-torch": "shapes that PyTorch users call",
    "cpu-small": "problems of a few rows", "times": "its time over cuattn's", "runner_rival": "rival",
    "beyond": "cuattn's less 0.1 ms, over its", "cold": "cold, its time over cuattn's", "size": "cases",
    "min": "least", "max": "most", "mean": "mean, geometric of ratios",
    **dict.fromkeys(("case", "mask", "table", "label", "runner", "direction", "kind", "study"), ""),
}  # fmt: skip
MOST = 8  # ratios beyond it are drawn at it, as arrows
SHADES = ("#24658f", "#d9674f", "#f2a65a", "#7fb285", "#8c6bb1", "#8a949d")  # of what is no runner


def name(key):
    """Return what a reader calls a runner, or a column."""
    return PEERS[key][0] if key in PEERS else LABELS.get(key, str(key))


def colour(runner, place=0):
    """Return the colour that a runner has in every figure; what is none has that of its place."""
    return PEERS[runner][1] if runner in PEERS else OURS if runner == "cuattn" else SHADES[place % len(SHADES)]


def heading(column):
    """Return what a reader calls a column, which may have several levels: ``("ms", "cudnn")`` is "cuDNN, ms"."""
    levels = column if isinstance(column, tuple) else (column,)
    return ", ".join(filter(None, map(name, reversed(levels))))


def table(frame):
    """Return a markdown table; floats get three digits, missing values a dash, a named index goes first.

    Examples
    --------
    >>> print(table(pd.DataFrame({"runner": ["a", "fa2"], "ms": [1.23456, None]})))
    |  | ms |
    |---|--:|
    | a | 1.23 |
    | FlashAttention-2 | – |
    """
    frame = frame.reset_index() if any(frame.index.names) else frame
    lines = [map(heading, frame.columns), *frame.map(_cell).to_numpy()]
    text = ["| " + " | ".join(line) + " |" for line in lines]
    words = [not pd.api.types.is_numeric_dtype(of) for of in frame.dtypes]
    return "\n".join([text[0], "|" + "".join("---|" if of else "--:|" for of in words), *text[1:]])


def _cell(value):
    if value is None or value != value:
        return "–"
    if isinstance(value, numbers.Real):
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return name(value)


def panels(count, width=4.6, height=3.7, rows=1):
    """Return a figure and its axes, all with the same quiet frame."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * -(-count // rows), height * rows), layout="constrained")
    axes = list(figure.subplots(rows, -(-count // rows), squeeze=False).flat)
    for axis in axes:
        axis.tick_params(colors=QUIET)
        axis.grid(color=QUIET, alpha=0.2, linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def curves(axis, frame, style="o-", log=False, **labels):
    """Draw a column per runner against the index, which may be on a binary scale; missing values are left out.

    Columns of two levels are what is shown of each runner; `style` is then a mapping of the first level.
    """
    whose = [column[-1] if isinstance(column, tuple) else column for column in frame]
    places = list(dict.fromkeys(whose))
    for (column, points), runner in zip(frame.items(), whose, strict=True):
        drawn = style[column[0]] if isinstance(style, dict) else style
        shade = colour(runner, places.index(runner))
        axis.plot(points.dropna(), drawn, color=shade, label=heading(column), markersize=5)
    if log:
        axis.set_xscale("log", base=2)
    axis.tick_params(axis="x", labelrotation=90 * isinstance(frame.index[0], str))
    axis.set(**labels)


def bars(axis, frame, numbers=".3g", **labels):
    """Draw a group of horizontal bars per line, a bar and its value per runner, the first of all at the top."""
    frame.rename(columns=name).plot.barh(ax=axis, color=list(map(colour, frame)), width=0.9, legend=False)
    for container in axis.containers:
        axis.bar_label(container, fmt=lambda x: f"{x:{numbers}}" if x else "", fontsize=7, color=INK, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.tick_params(axis="y", labelsize=8)
    axis.set(**{"ylabel": "", **labels})


def dots(axis, frame, **labels):
    """Draw a line of dots per line of the frame, one per runner, the first line at the top."""
    for runner, points in frame.items():
        axis.plot(points, range(len(frame)), "o", color=colour(runner), label=name(runner), markersize=5)
    axis.set_yticks(range(len(frame)), frame.index, fontsize=8)
    axis.invert_yaxis()
    axis.set(**labels)


def ratios(found):
    """Draw ratios by what they are of and direction: a line each, forward above backward, on a scale of powers of 2."""
    places = {about: place for place, about in enumerate(dict.fromkeys(about for about, _ in found))}
    drawn, (axis,) = panels(1, 8.4, 0.8 + 0.32 * len(places))
    axis.axvspan(1 - NOISE, 1 + NOISE, color=QUIET, alpha=0.4, linewidth=0)
    for (about, way), values in found.items():
        place = places[about] + (0.18 if way == "backward" else -0.18)
        mean = statistics.geometric_mean(values)
        for x in values:
            axis.plot(min(x, MOST), place, ">" if x > MOST else "o", color=OURS if x >= 1 - NOISE else WORSE,
                      alpha=0.5, markersize=5, markeredgewidth=0)  # fmt: skip
        axis.plot(min(mean, MOST), place, "|", color=INK, markersize=9, markeredgewidth=2, zorder=4)
    axis.set_yticks(range(len(places)), places, fontsize=9)
    axis.invert_yaxis()
    axis.set_xscale("log", base=2)
    ticks = [0.25, 0.5, 0.7, 1, 1.4, 2, 4, MOST]
    axis.set_xticks(ticks, [*map(str, ticks[:-1]), f"≥ {MOST}"])
    axis.set_xlabel(
        "times the fastest rival's speed\nupper dots forward, lower ones backward; bar: geometric mean", fontsize=9
    )
    return drawn


def chart(frames, draw=curves, says="ylabel", *, width=4.6, height=3.7, rows=1, columns=None, **options):
    """Return a figure with one legend and a panel per frame, drawn by `curves` or `bars`; its key is what it `says`.

    The legend has two columns under each panel, unless it is told how many.
    """
    figure, axes = panels(len(frames), width, height, rows)
    for axis, (key, frame) in zip(axes, frames.items(), strict=True):
        draw(axis, frame, **{says: heading(key)}, **options)
    legend(figure, columns or 2 * -(-len(frames) // rows))
    return figure


def legend(figure, columns):
    """Put one entry per name below the panels."""
    found = {}
    for axis in figure.axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="outside lower center", ncols=min(len(found), columns), frameon=False)


def save(figure, path, vector=False):
    """Write a figure as PNG, and as SVG beside it where lines are all that it has."""
    figure.savefig(path, dpi=120, facecolor="white")
    if vector:
        import matplotlib

        with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
