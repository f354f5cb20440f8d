"""Is a column mask the same, bit for bit, as the dense mask on the same kernel?  Forward and deterministic backward.

    python -m bench.same_bits                # every kernel of this GPU
    python -m bench.same_bits --device cpu

The FlashMask paper's claim of exactness, for its twelve masks.
"""

import numpy as np

from bench import harness
from bench.harness import Calls, Point
from bench.mask_samples import KINDS, column_mask, samples
from cuattn.errors import UnsupportedError

N, D, HEADS = 2048, 128, 4
TINY = 192
RESULTS = ("o", "l", "m", "dq", "dk", "dv")


def flags(kind, n):
    """Return the flags that say a mask, None where none do."""
    bands = {"full": {}, "causal": {"is_causal": True}, "sliding_window": {"window": (max(n // 16, 1) - 1, 0)}}
    return bands.get(kind)


def compare(kind, kernel, device, n, d):
    """Compute with the column mask and with its dense twin.

    Returns
    -------
    dict
        ``same``: whether each of o, l, m, dq, dk, dv has the same bits.
        ``same_flags``: whether ``is_causal`` or ``window`` give them too, where they can say the mask.
        ``repeated``: whether a second call gave them.  ``largest``: by how much the worst result differs.
    """
    xp = harness.namespace(device)
    dtype = xp.float16 if device == "cuda" else xp.float32
    operands = harness.random_arrays(xp, 4, (HEADS, n, d), dtype)
    mask, said = column_mask(samples(kind, n, 1)), flags(kind, n)

    def results(**options):
        calls = Calls(*operands, kernel=kernel, deterministic=True, **options)
        found = *calls.fwd[:3], *calls.backward()[:3]
        return dict(zip(RESULTS, map(xp.ascontiguousarray, found), strict=True))

    def same(a, b):
        return {name: bool((a[name].view(np.uint8) == b[name].view(np.uint8)).all()) for name in RESULTS}

    def apart(a, b):
        """Return the largest distance, 0 between two -inf (m of rows that see nothing)."""
        return float(abs(xp.nan_to_num(a.astype("f4"), neginf=0) - xp.nan_to_num(b.astype("f4"), neginf=0)).max())

    row = {"problem": {"n": n, "d": d, "heads": HEADS, "dtype": np.dtype(dtype).name}}
    try:
        column = results(mask=mask)
    except UnsupportedError as error:
        return {**row, "status": "unsupported", "reason": str(error)}
    row["rho"] = round(mask.block_sparsity(), 6)
    row["same_flags"] = None if said is None else all(same(column, results(**said)).values())
    row["repeated"] = all(same(column, results(mask=mask)).values())
    dense = results(mask=xp.asarray(mask.dense()))
    return {**row, "same": same(column, dense), "largest": max(apart(column[x], dense[x]) for x in RESULTS)}


def points(arguments):
    """Return one point per mask."""
    kernels = ("sm80", "sm90") if arguments.device == "cuda" else ("cpu",)
    n, d = (TINY, 16) if arguments.tiny else (N, D)

    def measure(kind):
        return {f"cuattn-{kernel}": compare(kind, kernel, arguments.device, n, d) for kernel in kernels}

    runners = tuple(f"cuattn-{kernel}" for kernel in kernels)
    return [Point(f"same-bits/{kind}/both", runners, lambda kind=kind: measure(kind)) for kind in KINDS]


if __name__ == "__main__":
    harness.main(__doc__, "same_bits", points)
