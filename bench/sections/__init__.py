"""What the README shows of each study: ``text(frame)``, a table in markdown, and often ``figure(frame)``.

A section reads ``bench/results/NAME.json`` (or its ``FILES``) and nothing else, so that all can be redrawn without a
GPU (`bench.redraw`).  ``SECTIONS`` is the README's order.  The tables of those in ``LONG`` go to
``bench/results/tables.md``; the README shows their figure and their ``summary(frame)``, a sentence or two.
"""

SECTIONS = (
    "peers", "behind", "dense", "flashmask", "gpt2", "lengths", "block_size", "block_sparse", "traffic", "loop_order",
    "sparsity", "mask_memory", "same_bits", "training", "denoise", "kernel_profiles",
)  # fmt: skip
LONG = (
    "dense", "flashmask", "lengths", "block_size", "block_sparse", "traffic", "loop_order", "mask_memory",
    "kernel_profiles",
)  # fmt: skip

__all__ = ["LONG", "SECTIONS"]
