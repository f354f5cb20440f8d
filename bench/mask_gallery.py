"""Draw every mask of `cuattn.masks`, with the tiles that a kernel skips: ``python bench/mask_gallery.py``."""

import argparse
from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cuattn import masks

OUTPUT = Path(__file__).resolve().parent / "results" / "masks.png"
N, TILE = 96, 8
COLUMNS = 5

SKIPPED, HIDDEN, VISIBLE, FULL = range(4)
COLOURS = {
    SKIPPED: ("#eceff1", "skipped tile"),
    HIDDEN: ("#ffffff", "partial tile, hidden element"),
    VISIBLE: ("#f2a65a", "partial tile, visible element"),
    FULL: ("#24658f", "full tile, nothing to test"),
}
INK, QUIET = "#22303c", "#6b7a86"

DOCUMENTS = [40, 24, 32]
DISTANCE = np.arange(N // 8)[:, None] ^ np.arange(N // 8)  # a butterfly: block indices differ in one bit at most
CASES = [
    ("full", f"full({N})", masks.full(N)),
    ("causal", f"causal({N})", masks.causal(N)),
    ("sliding window", f"sliding_window({N}, 20)", masks.sliding_window(N, 20)),
    ("causal document", "causal_document([40, 24, 32])", masks.causal_document(DOCUMENTS)),
    ("document", "document([40, 24, 32])", masks.document(DOCUMENTS)),
    (
        "shared question",
        "share_question([(24, [16, 16]), (12, [14, 14])])",
        masks.share_question([(24, [16, 16]), (12, [14, 14])]),
    ),
    ("global + sliding window", f"global_sliding_window({N}, 12, 8)", masks.global_sliding_window(N, 12, 8)),
    ("causal blockwise", "causal_blockwise([24, 24, 24, 24])", masks.causal_blockwise([24] * 4)),
    ("prefix LM, causal", f"prefix_lm_causal({N}, 36)", masks.prefix_lm_causal(N, 36)),
    (
        "prefix LM, documents",
        "prefix_lm_document([(16, 40), (20, 56)])",
        masks.prefix_lm_document([(16, 40), (20, 56)]),
    ),
    ("QK-sparse", f"qk_sparse({N}, [(16, 20), (56, 24)])", masks.qk_sparse(N, [(16, 20), (56, 24)])),
    ("hash-sparse", "hash_sparse([20, 8, 28, 16, 24])", masks.hash_sparse([20, 8, 28, 16, 24])),
    ("random eviction", f"random_eviction({N}, 48, rng=1)", masks.random_eviction(N, 48, rng=1)),
    (
        "eviction",
        "eviction([...])",
        masks.eviction(np.where(np.arange(N) % 24 < 6, N, np.minimum(np.arange(N) // 24 * 24 + 40, N))),
    ),
    ("blocks (butterfly)", "BlockMask(blocks, 8, 8)", masks.BlockMask((DISTANCE & (DISTANCE - 1)) == 0, 8, 8)),
]


def picture(mask):
    """Return what becomes of each element: SKIPPED, HIDDEN, VISIBLE or FULL."""
    states = np.kron(mask.tile_states(TILE, TILE), np.ones((TILE, TILE), dtype=np.int8))
    partial = np.where(mask.dense(), VISIBLE, HIDDEN)
    return np.where(states == 0, SKIPPED, np.where(states == 2, FULL, partial))


def draw(axes, name, call, mask):
    """Draw one mask, its tiles and its block sparsity."""
    colours = ListedColormap([colour for colour, _ in COLOURS.values()])
    axes.imshow(picture(mask), cmap=colours, vmin=0, vmax=len(COLOURS) - 1, extent=(0, N, N, 0))
    for edge in range(TILE, N, TILE):
        axes.axhline(edge, color=QUIET, linewidth=0.3, alpha=0.35)
        axes.axvline(edge, color=QUIET, linewidth=0.3, alpha=0.35)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set(color=QUIET, linewidth=0.8)
    axes.set_title(name, color=INK, fontsize=12, fontweight="bold", pad=6)
    axes.set_xlabel(f"{call}\n{mask.block_sparsity(TILE, TILE):.0%} of the tiles skipped", color=QUIET, fontsize=8)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    output = parser.parse_args().output
    rows = -(-len(CASES) // COLUMNS)
    figure = Figure(figsize=(2.9 * COLUMNS, 3.45 * rows + 0.9), layout="constrained")
    grid = figure.subplots(rows, COLUMNS)
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.10)
    for axes, case in zip(grid.flat, CASES, strict=True):
        draw(axes, *case)
    figure.suptitle(
        f"rows are queries, columns are keys, {N} of each, in tiles of {TILE} × {TILE}", color=QUIET, fontsize=11
    )
    handles = [
        Patch(facecolor=colour, edgecolor=QUIET, linewidth=0.5, label=label)
        for colour, label in reversed(COLOURS.values())
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=10, labelcolor=INK)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110, facecolor="white")
    print(output)


if __name__ == "__main__":
    main()
