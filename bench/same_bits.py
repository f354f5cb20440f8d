"""Is a column mask the same, bit for bit, as the dense mask on the same kernel?  Forward and deterministic backward.

    python -m bench.same_bits                # every kernel of this GPU
    python -m bench.same_bits --device cpu

The FlashMask paper's claim of exactness, for its twelve masks.  A kernel that takes no boolean mask says so in its row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cuattn
from bench import study
from bench.mask_samples import KINDS, column_mask, samples
from bench.study import Point
from cuattn.errors import UnsupportedError

__all__ = ["compare", "points"]

NAME = "same_bits"
N, D, HEADS = 2048, 128, 4
TINY = 192
RESULTS = ("o", "l", "m", "dq", "dk", "dv")


def compare(kind: str, kernel: str, device: str, n: int, d: int) -> dict[str, Any]:
    """Compute with the column mask and with its dense twin.

    Returns
    -------
    dict
        ``same``: whether each of o, l, m, dq, dk, dv has the same bits.  ``repeated``: whether a second deterministic
        backward had.  ``largest``: by how much the worst result differs.
    """
    xp = study.namespace(device)
    dtype = xp.float16 if device == "cuda" else xp.float32
    operands = study.random_arrays(xp, 4, (HEADS, n, d), dtype)
    q, k, v, do = operands
    mask = column_mask(samples(kind, n, 1))
    dense = xp.asarray(mask.dense())
    problem = {"n": n, "d": d, "heads": HEADS, "dtype": np.dtype(dtype).name}
    try:
        column = _both(q, k, v, do, mask, kernel)
        twin = _both(q, k, v, do, dense, kernel)
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": str(error), "problem": problem}
    again = _both(q, k, v, do, mask, kernel)
    return {
        "problem": problem,
        "rho": round(mask.block_sparsity(), 6),
        "same": {name: _same(xp, a, b) for name, a, b in zip(RESULTS, column, twin, strict=True)},
        "repeated": all(_same(xp, a, b) for a, b in zip(column, again, strict=True)),
        "largest": max(
            float(abs(a.astype(xp.float32) - b.astype(xp.float32)).max()) for a, b in _finite(xp, column, twin)
        ),
    }


def _both(q: Any, k: Any, v: Any, do: Any, mask: Any, kernel: str) -> tuple[Any, ...]:
    fwd = cuattn.forward(q, k, v, mask=mask, kernel=kernel)
    return *fwd[:3], *cuattn.backward(do, q, k, v, fwd, mask=mask, kernel=kernel, deterministic=True)[:3]


def _same(xp: Any, a: Any, b: Any) -> bool:
    word = {2: xp.uint16, 4: xp.uint32}[a.dtype.itemsize]
    return bool((xp.ascontiguousarray(a).view(word) == xp.ascontiguousarray(b).view(word)).all())


def _finite(xp: Any, left: Any, right: Any) -> Any:
    """Pair results up, without the -inf in m of rows that see nothing."""
    return [(xp.nan_to_num(a, neginf=0), xp.nan_to_num(b, neginf=0)) for a, b in zip(left, right, strict=True)]


def points(device: str, tiny: bool) -> list[Point]:
    """Return one point per mask and kernel."""
    kernels = ("sm80", "sm90") if device == "cuda" else ("cpu",)
    n, d = (TINY, 16) if tiny else (N, D)
    return [
        Point(
            f"same-bits/{kind}/both",
            tuple(f"cuattn-{kernel}" for kernel in kernels),
            lambda kind=kind: {f"cuattn-{kernel}": compare(kind, kernel, device, n, d) for kernel in kernels},
        )
        for kind in KINDS
    ]


def main() -> int:
    """Run the command."""
    arguments = study.parser(__doc__.splitlines()[0], NAME).parse_args()
    study.run(arguments, points(arguments.device, arguments.tiny))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
