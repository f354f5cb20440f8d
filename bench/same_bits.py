"""Is a column mask the same, bit for bit, as the dense mask on the same kernel?  Forward and deterministic backward.

    python -m bench.same_bits                # every kernel of this GPU
    python -m bench.same_bits --device cpu

The FlashMask paper's claim of exactness, for its twelve masks.  A kernel that takes no boolean mask says so in its row.
"""

import numpy as np

import cuattn
from bench import harness
from bench.harness import Point
from bench.mask_samples import KINDS, column_mask, samples
from cuattn.errors import UnsupportedError

__all__ = ["compare", "points"]

N, D, HEADS = 2048, 128, 4
TINY = 192
BANDS = {  # masks that flags can say too
    "full": lambda n: {},
    "causal": lambda n: {"is_causal": True},
    "sliding_window": lambda n: {"window": (max(n // 16, 1) - 1, 0)},
}
RESULTS = ("o", "l", "m", "dq", "dk", "dv")


def compare(kind, kernel, device, n, d):
    """Compute with the column mask and with its dense twin.

    Returns
    -------
    dict
        ``same``: whether each of o, l, m, dq, dk, dv has the same bits; None if the kernel takes no dense mask.
        ``same_flags``: whether ``is_causal`` or ``window`` give them too, where they can say the mask.
        ``repeated``: whether a second call gave them.  ``largest``: by how much the worst result differs.
    """
    xp = harness.namespace(device)
    dtype = xp.float16 if device == "cuda" else xp.float32
    operands = harness.random_arrays(xp, 4, (HEADS, n, d), dtype)
    q, k, v, do = operands
    mask = column_mask(samples(kind, n, 1))
    dense = xp.asarray(mask.dense())
    problem = {"n": n, "d": d, "heads": HEADS, "dtype": np.dtype(dtype).name}
    try:
        column = _both(q, k, v, do, mask, kernel)
    except UnsupportedError as error:
        return {"status": "unsupported", "reason": str(error), "problem": problem}
    again = _both(q, k, v, do, mask, kernel)
    flags = _both(q, k, v, do, None, kernel, **BANDS[kind](n)) if kind in BANDS else ()
    row = {
        "problem": problem,
        "rho": round(mask.block_sparsity(), 6),
        "same_flags": all(_same(xp, a, b) for a, b in zip(column, flags, strict=True)) if flags else None,
        "repeated": all(_same(xp, a, b) for a, b in zip(column, again, strict=True)),
    }
    try:
        twin = _both(q, k, v, do, dense, kernel)
    except UnsupportedError as error:
        return {**row, "same": None, "reason": str(error)}
    pairs = list(zip(RESULTS, column, twin, strict=True))
    return {
        **row,
        "same": {name: _same(xp, a, b) for name, a, b in pairs},
        "largest": max(float(_wide(xp, a, b).max()) for _, a, b in pairs),
    }


def _both(q, k, v, do, mask, kernel, **flags):
    options = {"mask": mask, "kernel": kernel, **flags}
    fwd = cuattn.forward(q, k, v, **options)
    return *fwd[:3], *cuattn.backward(do, q, k, v, fwd, **options, deterministic=True)[:3]


def _same(xp, a, b):
    word = {2: xp.uint16, 4: xp.uint32}[a.dtype.itemsize]
    return bool((xp.ascontiguousarray(a).view(word) == xp.ascontiguousarray(b).view(word)).all())


def _wide(xp, a, b):
    """Return the distances of two results, 0 between two -inf (m of rows that see nothing)."""
    a, b = (xp.nan_to_num(x.astype(xp.float32), neginf=0) for x in (a, b))
    return abs(a - b)


def points(arguments):
    """Return one point per mask."""
    kernels = ("sm80", "sm90") if arguments.device == "cuda" else ("cpu",)
    n, d = (TINY, 16) if arguments.tiny else (N, D)

    def measure(kind):
        return {f"cuattn-{kernel}": compare(kind, kernel, arguments.device, n, d) for kernel in kernels}

    runners = tuple(f"cuattn-{kernel}" for kernel in kernels)
    return [Point(f"same-bits/{kind}/both", runners, lambda kind=kind: measure(kind)) for kind in KINDS]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "same_bits", points))
