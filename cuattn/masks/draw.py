"""Pictures of masks: which tiles are skipped, tested or whole."""

import html
from itertools import groupby
from typing import Any

import numpy as np

from cuattn.errors import UnsupportedError
from cuattn.io_model.sizes import cdiv

_TILES = 64  # along the longer side of a picture
_SIDE = 256  # of a picture, pixels
_COLOURS = ("#f2f2f2", "#9ecae1", "#3182bd")  # skipped, partial, full


class Drawable:
    """What draws the tiles of a mask."""

    def plot(self: Any, ax: Any = None) -> Any:
        """Draw which tiles are skipped, partial and full, of the first mask along the leading axes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; by default the current axes.

        Returns
        -------
        matplotlib.axes.Axes

        Raises
        ------
        UnsupportedError
            Matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
            from matplotlib.colors import ListedColormap
        except ImportError as error:
            raise UnsupportedError("plot needs Matplotlib: expected it to be installed") from error
        states, size = self._picture()
        if ax is None:
            ax = pyplot.gca()
        rows, keys = states.shape
        ax.imshow(
            states,
            cmap=ListedColormap(_COLOURS),
            vmin=0,
            vmax=2,
            extent=(0, keys * size, rows * size, 0),
            interpolation="nearest",
        )
        ax.set(xlim=(0, max(self.n_keys, 1)), ylim=(max(self.n_queries, 1), 0), xlabel="key", ylabel="query")
        return ax

    def _repr_html_(self: Any) -> str:
        """Return a small SVG of the tiles under the mask's repr."""
        states, _ = self._picture()
        rows, keys = states.shape
        side = _SIDE / max(rows, keys, 1)
        paths = ["", "", ""]
        for row, line in enumerate(states.tolist()):
            column = 0
            for state, run in groupby(line):
                width = len(list(run))
                paths[state] += f"M{column} {row}h{width}v1h-{width}z"
                column += width
        drawn = "".join(f'<path fill="{_COLOURS[state]}" d="{paths[state]}"/>' for state in (1, 2))
        return (
            f"<div><code>{html.escape(repr(self))}</code><br/>"
            f'<svg width="{keys * side:.0f}" height="{rows * side:.0f}" viewBox="0 0 {keys} {rows}" '
            f'shape-rendering="crispEdges" preserveAspectRatio="none" style="background:{_COLOURS[0]}">'
            f"{drawn}</svg></div>"
        )

    def _picture(self: Any) -> tuple[np.ndarray, int]:
        """Return the states of the first instance's tiles, few enough to be seen, and the length of a tile's sides."""
        size = max(1, cdiv(max(self.n_queries, self.n_keys), _TILES))
        if 0 in self.leading:
            return np.zeros((0, 0), np.int8), size
        first = (0,) * len(self.leading)
        return self.to_host().states(first, size, size, 0, cdiv(self.n_queries, size)), size
