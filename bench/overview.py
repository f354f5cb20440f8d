"""The README's first picture: a mask whose hidden tiles are skipped, memory against length, a density of points."""

import numpy as np

from bench.gallery import density
from bench.sections.papers import lengths
from bench.style import curves, panels
from cuattn import masks

POINTS = 20_000
DOCUMENTS = [300, 150, 574]  # the README's
SHOWN = {"cuattn": "cuattn", "standard": "the textbook formula"}


def figure(rows, points=POINTS):
    """Draw three panels; `rows` are those of `bench.lengths`."""
    drawn, (left, middle, right) = panels(3, 3.6, 2.9)
    mask = masks.causal_document(DOCUMENTS)
    mask.plot(left)
    left.set(xticks=(), yticks=(), xlabel="keys", ylabel="queries")
    left.set_title(f"three documents in one sequence:\n{mask.block_sparsity():.0%} of the tiles skipped", fontsize=11)
    curves(middle, lengths(rows)["MB"][[*SHOWN]], log=True, yscale="log", xlabel="length of the sequence")
    middle.legend(list(SHOWN.values()), frameon=False, fontsize=10)
    middle.set_title("megabytes beyond the inputs,\nforward and backward", fontsize=11)
    found = density.density(density.spiral(points, np.random.default_rng(0)), 96, 0.35)
    right.imshow(np.exp(found / 2), origin="lower", cmap="magma", interpolation="bicubic")
    right.set_axis_off()
    right.set_title(f"density of {points:,} points, summed\nover all pairs: attention, too", fontsize=11)
    return drawn
