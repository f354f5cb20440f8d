"""FlashAttention's figure 3: runtime and memory of forward and backward from 128 to 64K tokens.

``python -m bench.lengths``
"""

from __future__ import annotations

from bench.command import parser, run

TABLES = ("lengths",)
PEERS = {"": ("standard", "mem-efficient", "fa2", "cudnn")}


def main() -> int:
    """Run the command."""
    found = parser(__doc__.splitlines()[0], TABLES, (), "bench/results/lengths.json")
    found.set_defaults(memory=True, seconds=0.6, least=3)
    return run(found.parse_args(), PEERS)


if __name__ == "__main__":
    raise SystemExit(main())
