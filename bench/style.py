"""How everything that is shown looks: names, colours, markdown, axes.  Only figures import matplotlib."""

import pandas as pd

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
    "flex": ("FlexAttention", "#bfa9d6"),
    "flex-FLASH": ("FlexAttention (FLASH)", "#8c6bb1"),
    "mem-efficient": ("memory-efficient", "#c9b458"),
    "jax": ("JAX", "#7fb285"),
    "sdpa": ("PyTorch", "#b5703a"),
    "sdpa-dense": ("PyTorch, dense mask", "#f2a65a"),
    "sdpa-documents": ("PyTorch, a call per document", "#e79c8b"),
    "keys-outside": ("keys outside, O in float32", WORSE),
    "keys-outside-o16": ("keys outside, O in float16", "#e79c8b"),
    "queries-outside": ("queries outside", OURS),
}


SHADES = ("#24658f", "#d9674f", "#f2a65a", "#7fb285", "#8c6bb1", "#8a949d")  # of what is no runner


def name(runner):
    """Return what a reader calls a runner."""
    return PEERS.get(runner, (runner,))[0]


def colour(runner, place=0):
    """Return the colour that a runner has in every figure; what is none has that of its place."""
    return PEERS[runner][1] if runner in PEERS else OURS if runner.startswith("cuattn") else SHADES[place % len(SHADES)]


def ours_first(runners):
    """Return runners once each, cuattn's first."""
    return sorted(dict.fromkeys(runners), key=lambda runner: not runner.startswith("cuattn"))


def table(frame):
    """Return a markdown table; floats get three digits, missing values a dash, the first column is text.

    Examples
    --------
    >>> print(table(pd.DataFrame({"who": ["a", "b"], "ms": [1.23456, None]})))
    | who | ms |
    |---|--:|
    | a | 1.23 |
    | b | – |
    """
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in [frame.columns, *frame.map(_cell).to_numpy()]]
    lines.insert(1, "|---|" + "--:|" * (len(frame.columns) - 1))
    return "\n".join(lines)


def _cell(value):
    if value is None or value != value:
        return "–"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


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
    """Draw a column per runner against the index, which may be on a binary scale; missing values are left out."""
    for place, (runner, points) in enumerate(frame.items()):
        axis.plot(points.dropna(), style, color=colour(runner, place), label=name(runner), markersize=5)
    if log:
        axis.set_xscale("log", base=2)
    axis.tick_params(axis="x", labelrotation=30 * isinstance(frame.index[0], str))
    axis.set(**labels)


def proportion(frame):
    """Return a frame whose index is a share of the work, with what its line for 1.0 would be in proportion."""
    ideal = frame.loc[[1.0]].to_numpy() * frame.index.to_numpy()[:, None]
    return frame.join(pd.DataFrame(ideal, frame.index, frame.columns).add_suffix(", in proportion"))


def chart(*parts, width=4.6, height=3.7, rows=1, columns=4):
    """Return a figure of panels with one legend; per part `curves` or `bars`, what it draws, and its options."""
    figure, axes = panels(len(parts), width, height, rows)
    for axis, (draw, frame, options) in zip(axes, parts, strict=True):
        draw(axis, frame, **options)
    legend(figure, columns)
    return figure


def bars(axis, frame, numbers, **labels):
    """Draw a group of horizontal bars per line, a bar and its value per runner, the first of all at the top."""
    frame.rename(columns=name).plot.barh(ax=axis, color=list(map(colour, frame)), width=0.9, legend=False)
    for container in axis.containers:
        axis.bar_label(container, fmt=lambda x: f"{x:{numbers}}" if x else "", fontsize=7, color=INK, padding=2)
    axis.invert_yaxis()
    axis.margins(x=0.18)
    axis.tick_params(axis="y", labelsize=8)
    axis.set(**{"ylabel": "", **labels})


def legend(figure, columns=4):
    """Put one entry per name below the panels."""
    found = {}
    for axis in figure.axes:
        found |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    figure.legend(found.values(), found, loc="outside lower center", ncols=min(len(found), columns), frameon=False)


def save(figure, path):
    """Write a figure as PNG."""
    figure.savefig(path, dpi=120, facecolor="white")
