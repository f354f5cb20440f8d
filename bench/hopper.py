"""Measure cuattn on a Hopper GPU beside every peer: dense sweep, twelve masks, dropout, deterministic gradients.

``python -m bench.hopper --tables dense --directions forward --ours cuattn-sm90``
"""

from __future__ import annotations

from bench.command import parser, run

TABLES = ("dense", "masks-8k", "masks-32k", "dropout", "deterministic")
OPTIONAL = ("masks-128k", "masks-8k-d64", "masks-32k-d64", "masks-128k-d64", "long")
MASK_PEERS = ("fa4", "fa4-varlen", "flex-FLASH", "flex", "cudnn")
PEERS = {
    "": MASK_PEERS,
    "dense": ("cudnn", "fa4", "fa2"),
    "dropout": ("cudnn", "fa2"),
    "deterministic": ("fa4", "fa2"),
    "long": ("cudnn", "fa4"),
}


def main() -> int:
    """Run the command."""
    return run(parser(__doc__.splitlines()[0], TABLES, OPTIONAL, "bench/results/hopper.json").parse_args(), PEERS)


if __name__ == "__main__":
    raise SystemExit(main())
