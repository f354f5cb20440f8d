"""Profile every shipped kernel with ``ncu``: how busy its units are, and what its warps wait for.

    python -m bench.kernel_profiles

A row per call, ``kernels`` in it: each kernel that took a noticeable part of the time.  Percentages are of the unit's
peak over the kernel's own elapsed cycles, so that they do not depend on the clock; stalls are shares of a warp's time.
"""

import functools

import numpy as np

import cuattn
from bench import counters, harness
from bench.harness import one
from bench.mask_samples import column_mask, samples
from cuattn.errors import UnsupportedError

__all__ = ["CALLS", "METRICS", "counted", "points", "summary"]

STALLS = [
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "gmma",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "wait",
]
METRICS = {
    "seconds": "gpu__time_duration.sum",
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "hbm_read": "dram__bytes_read.sum",
    "hbm_write": "dram__bytes_write.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts_load": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank_conflicts_store": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    **{f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS},
}
SMALLEST_SHARE = 0.02  # of a call's time that a kernel must take to be named

# kernel-direction-...: dtype, (batch, heads, n, d), options.  Large enough that every multiprocessor stays busy.
HALF, SINGLE, DOUBLE = "float16", "float32", "float64"
LONG, LONG_64 = (4, 16, 4096, 128), (4, 32, 4096, 64)
CALLS = {
    "sm90-forward-d128": (HALF, LONG, {}),
    "sm90-forward-d64": (HALF, LONG_64, {}),
    "sm90-forward-d256": (HALF, (4, 8, 4096, 256), {}),
    "sm90-forward-d128-causal": (HALF, LONG, {"is_causal": True}),
    "sm90-forward-d128-documents": (HALF, LONG, {"mask": "causal_document"}),
    "sm90-forward-d128-dropout": (HALF, LONG, {"dropout_p": 0.1}),
    "sm90-backward-d128": (HALF, LONG, {}),
    "sm90-backward-d64": (HALF, LONG_64, {}),
    "sm90-backward-d256": (HALF, (4, 8, 4096, 256), {}),
    "sm90-backward-d128-causal": (HALF, LONG, {"is_causal": True}),
    "sm90-backward-d128-dropout": (HALF, LONG, {"dropout_p": 0.1}),
    "sm90-backward-d128-documents": (HALF, LONG, {"mask": "causal_document"}),
    "sm90-backward-d128-deterministic": (HALF, LONG, {"deterministic": True}),
    "sm80-forward-d128": (HALF, LONG, {}),
    "sm80-forward-d64": (HALF, LONG_64, {}),
    "sm80-backward-d128": (HALF, LONG, {}),
    "sm80-backward-d64": (HALF, LONG_64, {}),
    "sm80-backward-d128-deterministic": (HALF, LONG, {"deterministic": True}),
    "sm80-forward-float32-d64": (SINGLE, (2, 16, 4096, 64), {}),
    "sm80-backward-float32-d64": (SINGLE, (2, 16, 4096, 64), {}),
    "sm80-forward-float64-d64": (DOUBLE, (1, 16, 4096, 64), {}),
    "sm80-backward-float64-d64": (DOUBLE, (1, 16, 4096, 64), {}),
    "sm80-backward-float64-d128": (DOUBLE, (1, 16, 4096, 128), {}),
    "sm80-backward-float32-d512": (SINGLE, (1, 8, 2048, 512), {}),
    "sm80-backward-bias": (HALF, (2, 16, 2048, 128), {"bias": True}),
    "sm90-forward-new-mask": (HALF, (1, 2, 32768, 128), {"mask": "causal_document", "new": True}),
    "sm80-decode": (HALF, (16, 32, 8192, 128), {"decode": True}),
    "sm80-decode-split": (HALF, (1, 32, 65536, 128), {"decode": True}),
}


def counted(name):
    """Return the call of a name, for `bench.counters`."""
    import cupy

    return bind(cupy, name)


def bind(xp, name, n=None):
    """Return a call, with `n` tokens instead of its own where given."""
    dtype, (batch, heads, length, d), extra = CALLS[name]
    kernel, direction, *_ = name.split("-")
    n = n or length
    options = dict(extra, kernel=kernel if xp.__name__ == "cupy" else None)
    queries, exact = (
        (1 if options.pop("decode", False) else n),
        {"deterministic": True} if options.pop("deterministic", False) else {},
    )
    new, kind = options.pop("new", False), options.pop("mask", None)
    if kind and not new:
        mask = column_mask(samples(kind, n, 1))
        options["mask"] = mask.to_device() if xp.__name__ == "cupy" else mask
    kv_heads = heads // 4 if queries == 1 else heads
    options |= {"enable_gqa": True} if kv_heads != heads else {}
    drawn = {"rng": 1} if "dropout_p" in options else {}
    (q, do) = harness.random_arrays(xp, 2, (batch, heads, queries, d), np.dtype(dtype))
    (k, v) = harness.random_arrays(xp, 2, (batch, kv_heads, n, d), np.dtype(dtype), seed=2)
    if options.pop("bias", False):
        options["bias"] = harness.random_arrays(xp, 1, (heads, n, n), np.dtype(dtype), seed=3)[0]
    if new:  # its tables are made in the call
        return lambda: cuattn.forward(q, k, v, **options, mask=column_mask(samples(kind, n, 1)))
    if direction == "forward":
        return lambda: cuattn.forward(q, k, v, **options, **drawn)
    try:
        fwd = cuattn.forward(q, k, v, **options, **drawn)
    except UnsupportedError:
        fwd = cuattn.forward(q, k, v, **{**options, "kernel": None}, **drawn)
    return lambda: cuattn.backward(do, q, k, v, fwd, **options, **exact)


def summary(kernel):
    """Turn one kernel's metrics into what a reader wants: rounded, stalls as shares, conflicts per access."""
    stalls = {name: kernel.get(f"stall_{name}") or 0.0 for name in STALLS}
    waited = sum(stalls.values()) or 1.0
    ranked = sorted(stalls.items(), key=lambda item: -item[1])
    wavefronts = kernel.get("shared_wavefronts") or 0.0
    conflicts = (kernel.get("bank_conflicts_load") or 0.0) + (kernel.get("bank_conflicts_store") or 0.0)
    seconds = kernel["seconds"]
    moved = (kernel.get("hbm_read") or 0.0) + (kernel.get("hbm_write") or 0.0)
    kept = {
        name: kernel.get(name) for name in METRICS if name.endswith("_pct") or name in ("registers", "shared_bytes")
    }
    return {
        "kernel": kernel["kernel"],
        "milliseconds": round(seconds * 1e3, 4),
        **{name: None if value is None else round(value, 2) for name, value in kept.items()},
        "hbm_gb": round(moved / 1e9, 4),
        "stalls": {name: round(value / waited, 3) for name, value in ranked if value / waited >= 0.02},
        "bank_conflicts": round(conflicts / wavefronts, 4) if wavefronts else 0.0,
    }


@functools.lru_cache(maxsize=8)
def profiles(part):
    """Profile all calls of one kernel family in one process."""
    names = [name for name in CALLS if name.startswith(part)]
    return counters.count("bench.kernel_profiles", names, METRICS, timeout=300)


def measure(name):
    """Return the profile of a call."""
    kernel, direction, *_ = name.split("-")
    kernels = profiles(kernel)[name]
    dtype, shape, extra = CALLS[name]
    problem = {"kernel": kernel, "direction": direction, "dtype": dtype, "shape": shape, "options": extra}
    if not kernels:
        return {"status": "unsupported", "reason": "no such kernel, see the messages of the run", "problem": problem}
    whole = sum(kernel["seconds"] for kernel in kernels)
    named = [summary(kernel) for kernel in kernels if kernel["seconds"] >= SMALLEST_SHARE * whole]
    return {"problem": problem, "kernels": named, "milliseconds": round(whole * 1e3, 4)}


def points(arguments):
    """Return one point per call."""
    return [one(f"profile/{name}/{name.split('-')[1]}", "cuattn", measure, name) for name in CALLS]


if __name__ == "__main__":
    raise SystemExit(harness.main(__doc__, "kernel_profiles", points))
