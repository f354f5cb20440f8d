"""Draw every mask of `cuattn.masks` as `Mask.plot` does: ``python -m bench.redraw`` writes it."""

import textwrap

import numpy as np

from bench.style import INK, QUIET, panels
from cuattn import masks

N, TILE = 96, 8
DISTANCE = np.arange(N // 8)[:, None] ^ np.arange(N // 8)  # a butterfly: block indices differ in one bit at most
EVICTED = np.where(np.arange(N) % 24 < 6, N, np.minimum(np.arange(N) // 24 * 24 + 40, N))
CASES = (  # constructors and their arguments
    (masks.full, N),
    (masks.causal, N),
    (masks.sliding_window, N, 20),
    (masks.causal_document, [40, 24, 32]),
    (masks.document, [40, 24, 32]),
    (masks.share_question, [(24, [16, 16]), (12, [14, 14])]),
    (masks.global_sliding_window, N, 12, 8),
    (masks.causal_blockwise, [24, 24, 24, 24]),
    (masks.prefix_lm_causal, N, 36),
    (masks.prefix_lm_document, [(16, 40), (20, 56)]),
    (masks.qk_sparse, N, [(16, 20), (56, 24)]),
    (masks.hash_sparse, [20, 8, 28, 16, 24]),
    (masks.random_eviction, N, 48, 1),
    (masks.eviction, EVICTED),
    (masks.BlockMask, (DISTANCE & (DISTANCE - 1)) == 0, 8, 8),
)


def figure():
    """Draw the masks and say how much of each is skipped."""
    drawn, axes = panels(len(CASES), 2.9, 3.5, rows=3)
    for axis, (make, *arguments) in zip(axes, CASES, strict=True):
        mask = make(*arguments)
        mask.plot(axis)
        call = textwrap.shorten(", ".join(map(repr, arguments)), 28, placeholder=" …")
        axis.set_title(make.__name__, color=INK, fontsize=15, pad=6)
        axis.set(xticks=(), yticks=(), ylabel="")
        axis.set_xlabel(f"({call})\n{mask.block_sparsity(TILE, TILE):.0%} skipped", color=QUIET, fontsize=13)
    drawn.suptitle(
        f"Rows are queries, columns are keys, {N} of each, in tiles of {TILE} × {TILE}:\n"
        "pale ones are skipped, light ones tested element by element, dark ones seen whole",
        color=QUIET,
        fontsize=15,
    )
    drawn.get_layout_engine().set(hspace=0.05)
    return drawn
