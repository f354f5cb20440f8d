"""What the README shows of each study: a `bench.report.Section` each, read from ``bench/results/NAME.json`` alone.

``SECTIONS`` is in the README's order, but for ``cpu``, which has a place of its own.  The tables of those in ``LONG``
go to ``bench/results/tables.md``; the README shows their figure and their summary.
"""

from bench.sections import masks, others, papers, peers

SECTIONS = {
    "peers": peers.Peers,
    "behind": peers.Behind,
    "dense": peers.Dense,
    "flashmask": masks.FlashMask,
    "gpt2": papers.Gpt2,
    "lengths": papers.Lengths,
    "block_size": papers.BlockSize,
    "block_sparse": papers.BlockSparse,
    "traffic": papers.Traffic,
    "loop_order": papers.LoopOrder,
    "sparsity": masks.Sparsity,
    "mask_memory": masks.MaskMemory,
    "same_bits": masks.SameBits,
    "training": others.Training,
    "denoise": others.Denoise,
    "kernel_profiles": others.KernelProfiles,
    "cpu": others.Cpu,
}
LONG = (
    "dense", "flashmask", "lengths", "block_size", "block_sparse", "traffic", "loop_order", "mask_memory",
    "kernel_profiles",
)  # fmt: skip
