"""Measure cuattn's portable kernels: 16-bit, float32, float64, decode, host cost, first calls, column masks.

``python -m bench.portable --ours cuattn-sm80``
"""

from __future__ import annotations

from bench import first_call
from bench.command import parser, run

TABLES = ("portable", "decode", "host", "sparsity")
PEERS = {
    "": ("fa2", "cudnn", "mem-efficient", "math", "jax"),
    "decode": ("cudnn", "fa2", "flex", "fa4"),
    "host": ("cuattn-cupy", "cuattn-sm90", "sdpa", "flex", "fa4"),
    "sparsity": (),
}


def main() -> int:
    """Run the command."""
    found = parser(__doc__.splitlines()[0], (*TABLES, first_call.TABLE), (), "bench/results/portable.json")
    arguments = found.parse_args()
    asked, arguments.tables = arguments.tables, [name for name in arguments.tables if name != first_call.TABLE]
    status = run(arguments, PEERS)
    if first_call.TABLE in asked and not arguments.list:
        status |= first_call.run(arguments)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
