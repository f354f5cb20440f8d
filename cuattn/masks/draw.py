"""Pictures of masks: which tiles are skipped, tested or whole."""

import html
from typing import TYPE_CHECKING, Any

import numpy as np

from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv

if TYPE_CHECKING:
    from cuattn.masks.base import Mask

__all__ = ["plot", "to_html"]

_TILES = 64  # along the longer side of a picture
_SIDE = 256  # of a picture, pixels
_COLOURS = ("#f2f2f2", "#9ecae1", "#3182bd")  # skipped, partial, full


def _states(mask: "Mask") -> tuple[np.ndarray, int]:
    """Return the states of the first instance's tiles, few enough to be seen, and the length of a tile's sides."""
    size = max(1, cdiv(max(mask.n_queries, mask.n_keys), _TILES))
    if 0 in (*mask.leading, mask.n_queries, mask.n_keys):
        return np.zeros((0, 0), np.int8), size
    first = (0,) * len(mask.leading)
    return mask.to_host().states(first, size, size, 0, cdiv(mask.n_queries, size)), size


def to_html(mask: "Mask") -> str:
    """Return a small SVG of a mask's tiles under its repr."""
    states, _ = _states(mask)
    rows, keys = states.shape
    side = _SIDE / max(rows, keys, 1)
    paths = []
    for state in (1, 2):
        runs = "".join(
            f"M{start} {row}h{stop - start}v1h{start - stop}z" for row, start, stop in _runs(states == state)
        )
        paths.append(f'<path fill="{_COLOURS[state]}" d="{runs}"/>')
    return (
        f"<div><code>{html.escape(repr(mask))}</code><br/>"
        f'<svg width="{keys * side:.0f}" height="{rows * side:.0f}" viewBox="0 0 {keys} {rows}" '
        f'shape-rendering="crispEdges" preserveAspectRatio="none" style="background:{_COLOURS[0]}">'
        f"{''.join(paths)}</svg></div>"
    )


def _runs(marked: np.ndarray) -> list[tuple[int, int, int]]:
    """Return (row, start, stop) of the runs of neighbours in a row that are marked."""
    edges = np.diff(marked.astype(np.int8), axis=1, prepend=0, append=0)
    rows, starts = np.nonzero(edges == 1)
    stops = np.nonzero(edges == -1)[1]
    return list(zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True))


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
