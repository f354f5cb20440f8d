"""Draw every mask of `cuattn.masks`, with the tiles that a kernel skips: ``python -m bench.redraw`` writes it."""

import numpy as np

from bench.style import INK, OURS, QUIET, panels
from cuattn import masks

N, TILE = 96, 8
SKIPPED, HIDDEN, VISIBLE, FULL = range(4)
STATES = {
    SKIPPED: ("#eceff1", "skipped tile"),
    HIDDEN: ("#ffffff", "partial tile, hidden element"),
    VISIBLE: ("#f2a65a", "partial tile, visible element"),
    FULL: (OURS, "full tile, nothing to test"),
}
CALLS = {  # what a mask is called: how it is made
    "full": (masks.full, N),
    "causal": (masks.causal, N),
    "sliding window": (masks.sliding_window, N, 20),
    "causal document": (masks.causal_document, [40, 24, 32]),
    "document": (masks.document, [40, 24, 32]),
    "shared question": (masks.share_question, [(24, [16, 16]), (12, [14, 14])]),
    "global + sliding window": (masks.global_sliding_window, N, 12, 8),
    "causal blockwise": (masks.causal_blockwise, [24, 24, 24, 24]),
    "prefix LM, causal": (masks.prefix_lm_causal, N, 36),
    "prefix LM, documents": (masks.prefix_lm_document, [(16, 40), (20, 56)]),
    "QK-sparse": (masks.qk_sparse, N, [(16, 20), (56, 24)]),
    "hash-sparse": (masks.hash_sparse, [20, 8, 28, 16, 24]),
    "random eviction": (masks.random_eviction, N, 48, 1),
}
DISTANCE = np.arange(N // 8)[:, None] ^ np.arange(N // 8)  # a butterfly: block indices differ in one bit at most
EVICTED = np.where(np.arange(N) % 24 < 6, N, np.minimum(np.arange(N) // 24 * 24 + 40, N))
CASES = [
    *((name, f"{make.__name__}({str(of)[1:-1].rstrip(',')})", make(*of)) for name, (make, *of) in CALLS.items()),
    ("eviction", "eviction([...])", masks.eviction(EVICTED)),
    ("blocks (butterfly)", "BlockMask(blocks, 8, 8)", masks.BlockMask((DISTANCE & (DISTANCE - 1)) == 0, 8, 8)),
]


def states(mask):
    """Return what becomes of each element: SKIPPED, HIDDEN, VISIBLE or FULL."""
    tiles = np.kron(mask.tile_states(TILE, TILE), np.ones((TILE, TILE), dtype=np.int8))
    partial = np.where(mask.dense(), VISIBLE, HIDDEN)
    return np.where(tiles == 0, SKIPPED, np.where(tiles == 2, FULL, partial))


def figure():
    """Draw the masks, their tiles and their block sparsity."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    drawn, axes = panels(len(CASES), 2.9, 3.5, rows=3)
    colours = ListedColormap([colour for colour, _ in STATES.values()])
    for axis, (name, call, mask) in zip(axes, CASES, strict=True):
        axis.imshow(states(mask), cmap=colours, vmin=0, vmax=FULL, extent=(0, N, N, 0))
        edges = range(0, N + 1, TILE)
        axis.set_xticks(edges, [""] * len(edges))
        axis.set_yticks(edges, [""] * len(edges))
        axis.set_title(name, color=INK, fontsize=12, fontweight="bold", pad=6)
        axis.set_xlabel(f"{call}\n{mask.block_sparsity(TILE, TILE):.0%} of the tiles skipped", color=QUIET, fontsize=8)
    drawn.suptitle(f"rows are queries, columns are keys, {N} of each, in tiles of {TILE} × {TILE}", color=QUIET)
    handles = [Patch(facecolor=colour, edgecolor=QUIET, label=label) for colour, label in reversed(STATES.values())]
    drawn.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, labelcolor=INK)
    return drawn
