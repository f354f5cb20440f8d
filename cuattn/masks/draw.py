"""Pictures of masks: which tiles are skipped, tested or whole."""

import html
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv

if TYPE_CHECKING:
    from cuattn.masks.base import Mask

_TILES = 64  # along the longer side of a picture
_SIDE = 256  # of a picture, pixels
_COLOURS = ("#f2f2f2", "#9ecae1", "#3182bd")  # skipped, partial, full


def _states(mask: "Mask") -> tuple[np.ndarray, int]:
    """Return the states of the first instance's tiles, few enough to be seen, and the length of a tile's sides."""
    size = max(1, cdiv(max(mask.n_queries, mask.n_keys), _TILES))
    if 0 in mask.leading:
        return np.zeros((0, 0), np.int8), size
    first = (0,) * len(mask.leading)
    return mask.to_host().states(first, size, size, 0, cdiv(mask.n_queries, size)), size


def to_html(mask: "Mask") -> str:
    """Return a small SVG of a mask's tiles under its repr."""
    states, _ = _states(mask)
    rows, keys = states.shape
    side = _SIDE / max(rows, keys, 1)
    paths = ["", "", ""]
    for row, line in enumerate(states.tolist()):
        key = 0
        for state, run in groupby(line):
            width = len(list(run))
            paths[state] += f"M{key} {row}h{width}v1h-{width}z"
            key += width
    drawn = "".join(f'<path fill="{_COLOURS[state]}" d="{paths[state]}"/>' for state in (1, 2))
    return (
        f"<div><code>{html.escape(repr(mask))}</code><br/>"
        f'<svg width="{keys * side:.0f}" height="{rows * side:.0f}" viewBox="0 0 {keys} {rows}" '
        f'shape-rendering="crispEdges" preserveAspectRatio="none" style="background:{_COLOURS[0]}">{drawn}</svg></div>'
    )


def plot(mask: "Mask", ax: Any) -> Any:
    """Draw a mask's tiles with Matplotlib, see `Mask.plot`."""
    try:
        from matplotlib import pyplot
        from matplotlib.colors import ListedColormap
    except ImportError as error:
        raise UnsupportedError("plot needs Matplotlib: expected it to be installed") from error
    states, size = _states(mask)
    if ax is None:
        ax = pyplot.gca()
    rows, keys = states.shape
    colours = ListedColormap(_COLOURS)
    ax.imshow(states, cmap=colours, vmin=0, vmax=2, extent=(0, keys * size, rows * size, 0), interpolation="nearest")
    ax.set(xlim=(0, max(mask.n_keys, 1)), ylim=(max(mask.n_queries, 1), 0), xlabel="key", ylabel="query")
    return ax
