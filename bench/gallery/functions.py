"""Score and mask functions: what a query sees of an image and of a text, drawn as the weights that a call computes."""

import numpy as np

import cuattn
from bench.style import panels

SIDE, N = 24, 24 * 24
SLOPE = 0.1
PIXEL = 8 * SIDE + 15  # the query that is shown: row 8, column 15


def alibi(s, b, h, i, j):
    """Farther keys count less (O. Press et al., 2022)."""
    return s - SLOPE * abs(i - j)


def of_distance(s, b, h, i, j):
    """A score that falls with the distance of two pixels."""
    return s - 0.05 * ((i // SIDE - j // SIDE) ** 2 + (i % SIDE - j % SIDE) ** 2)


def neighbours(b, h, i, j):
    """The 9 x 9 pixels around each, shifted inwards at the borders (A. Hassani et al., 2023)."""
    row, column = np.clip(i // SIDE, 4, SIDE - 5), np.clip(i % SIDE, 4, SIDE - 5)
    return (abs(row - j // SIDE) <= 4) & (abs(column - j % SIDE) <= 4)


def dilated(b, h, i, j):
    """Every third pixel of a window of 17 x 17."""
    row, column = i // SIDE - j // SIDE, i % SIDE - j % SIDE
    return (abs(row) <= 8) & (abs(column) <= 8) & (row % 3 == 0) & (column % 3 == 0)


def weights(**options):
    """Return the weights of all queries: attention whose values are the rows of a unit matrix."""
    q, k = 0.5 * np.random.default_rng(0).standard_normal((2, N, 16), np.float32)
    return cuattn.attention(q, k, np.eye(N, dtype=np.float32), **options)


def figure():
    """Draw the weights of one pixel under each function, and ALiBi's as a matrix."""
    shown = {
        "score: distance in the image": dict(score=of_distance),
        "mask: neighbourhood": dict(mask=neighbours),
        "mask: dilated neighbourhood": dict(mask=dilated),
        "both": dict(score=of_distance, mask=neighbours),
    }
    drawn, axes = panels(5, 2.7, 2.8)
    for axis, (title, options) in zip(axes, shown.items(), strict=False):
        axis.imshow(np.sqrt(weights(**options)[PIXEL].reshape(SIDE, SIDE)), cmap="magma")
        axis.plot(PIXEL % SIDE, PIXEL // SIDE, "+", color="white")
        axis.set_title(title, fontsize=9)
    axes[-1].imshow(np.sqrt(weights(score=alibi, is_causal=True)[:96, :96]), cmap="magma")
    axes[-1].set_title("a text: ALiBi, causal", fontsize=9)
    for axis in axes:
        axis.set(xticks=(), yticks=())
    return drawn
