"""How everything that is shown looks: names, colours, markdown, axes.  Only figures import matplotlib."""

__all__ = ["INK", "QUIET", "bars", "colour", "curves", "legend", "name", "ours_first", "panels", "save", "table"]

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


def name(runner):
    """Return what a reader calls a runner."""
    return PEERS.get(runner, (runner,))[0]


def colour(runner):
    """Return the colour that a runner has in every figure."""
    return PEERS[runner][1] if runner in PEERS else OURS if runner.startswith("cuattn") else QUIET


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
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in [frame.columns, *map(_cells, frame.to_numpy(object))]]
    lines.insert(1, "|---|" + "--:|" * (len(frame.columns) - 1))
    return "\n".join(lines)


def _cells(values):
    return [
        "–" if value is None or value != value else _digits(value) if isinstance(value, float) else str(value)
        for value in values
    ]


def _digits(value):
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


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
    return figure, axes


def curves(axis, frame, style="o-", **options):
    """Draw a column per runner against the index; missing values are left out."""
    for runner in frame:
        points = frame[runner].dropna()
        axis.plot(points.index, points, style, **{"color": colour(runner), "label": name(runner), **options})


def bars(axis, frame, numbers=""):
    """Draw a group of horizontal bars per line, a bar per runner, the first of all at the top.

    With `numbers`, a format, every bar gets its value.
    """
    place, centres = 0.0, []
    for _, line in frame.iterrows():
        present = line.dropna()
        centres.append(place + (len(present) - 1) / 2)
        for offset, (runner, value) in enumerate(present.items()):
            axis.barh(place + offset, value, 0.92, color=colour(runner), label=name(runner))
            if numbers:
                axis.text(value, place + offset, f" {value:{numbers}}", va="center", fontsize=7, color=INK)
        place += len(present) + 1.2
    axis.set_yticks(centres, frame.index, fontsize=8)
    axis.set_ylim(place - 0.6, -1.1)
    axis.margins(x=0.18)
    axis.grid(axis="y", visible=False)


def legend(figure, columns=4):
    """Put one entry per name below the panels."""
    found = {}
    for axis in figure.axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        found.values(), found, loc="outside lower center", ncols=min(len(found), columns), frameon=False, fontsize=9
    )


def save(figure, path):
    """Write a figure as PNG."""
    figure.savefig(path, dpi=120, facecolor="white")
