"""Profile every shipped kernel with ``ncu``: how busy its units are, and what its warps wait for.

    python -m bench.kernel_profiles

A row per call, ``kernels`` in it: each kernel that took a noticeable part of the time.  Percentages are of the unit's
peak over the kernel's own elapsed cycles, so that they do not depend on the clock; stalls are shares of a warp's time.
"""

import numpy as np

from bench import counters, harness
from bench.harness import Calls, one
from bench.mask_samples import column_mask, samples
from cuattn.errors import UnsupportedError

STALLS = (
    "barrier", "branch_resolving", "dispatch_stall", "gmma", "lg_throttle", "long_scoreboard", "math_pipe_throttle",
    "membar", "mio_throttle", "no_instruction", "not_selected", "selected", "short_scoreboard", "sleeping", "wait",
)  # fmt: skip
SHARES = {
    "tensor_pct": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "smsp__issue_active.avg.pct_of_peak_sustained_elapsed",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
}
METRICS = {
    **SHARES,
    **dict(counters.HBM),
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "bank_conflicts_load": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "bank_conflicts_store": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    **{f"stall_{name}": f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio" for name in STALLS},
}
SMALLEST_SHARE = 0.02  # of a call's time that a kernel must take to be named

# Large enough that every multiprocessor stays busy: (batch, heads, n) by head dimension, in 16 bits, or dtype and both.
SHAPES = {
    "d64": (4, 32, 4096), "d128": (4, 16, 4096), "d256": (4, 8, 4096), "float32-d64": (2, 16, 4096),
    "float64-d64": (1, 16, 4096), "float64-d128": (1, 16, 4096), "float32-d512": (1, 8, 2048), "bias": (2, 16, 2048),
    "new-mask": (1, 2, 32768), "decode": (16, 32, 8192), "decode-split": (1, 32, 65536),
}  # fmt: skip
OPTIONS = {
    "causal": {"is_causal": True}, "documents": {"mask": "causal_document"}, "dropout": {"dropout_p": 0.1},
    "deterministic": {"deterministic": True}, "bias": {"bias": True},
    "new-mask": {"mask": "causal_document", "new": True}, "decode": {"decode": True}, "decode-split": {"decode": True},
}  # fmt: skip
NAMES = (
    "sm90-forward-d128", "sm90-forward-d64", "sm90-forward-d256", "sm90-forward-d128-causal",
    "sm90-forward-d128-documents", "sm90-forward-d128-dropout", "sm90-backward-d128", "sm90-backward-d64",
    "sm90-backward-d256", "sm90-backward-d128-causal", "sm90-backward-d128-dropout", "sm90-backward-d128-documents",
    "sm90-backward-d128-deterministic", "sm80-forward-d128", "sm80-forward-d64", "sm80-backward-d128",
    "sm80-backward-d64", "sm80-backward-d128-deterministic", "sm80-forward-float32-d64", "sm80-backward-float32-d64",
    "sm80-forward-float64-d64", "sm80-backward-float64-d64", "sm80-backward-float64-d128", "sm80-backward-float32-d512",
    "sm80-backward-bias", "sm90-forward-new-mask", "sm80-decode", "sm80-decode-split",
)  # fmt: skip


def _parsed(name):
    """Return what the name of a call says: kernel, direction, dtype, (batch, heads, n, d), options."""
    kernel, about = name.split("-", 1)
    direction, _, rest = about.partition("-") if not about.startswith("decode") else ("decode", "", about)
    plain, _, option = (rest, "", rest) if rest in SHAPES else rest.rpartition("-")
    words = plain.split("-")
    dtype = words[0] if words[0].startswith("float") else "float16"
    d = next((int(word[1:]) for word in words if word[1:].isdecimal()), 128)
    return kernel, direction, dtype, (*SHAPES[plain], d), OPTIONS.get(option, {})


CALLS = {name: _parsed(name) for name in NAMES}


def counted(name):
    """Return the call of a name, for `bench.counters`."""
    return bind(harness.namespace("cuda"), name)


def bind(xp, name, n=None):
    """Return a call, with `n` tokens instead of its own where given."""
    kernel, direction, dtype, (batch, heads, length, d), extra = CALLS[name]
    gpu, n = xp.__name__ == "cupy", n or length
    options = {**extra, "kernel": kernel if gpu else None}
    decode, new, kind, bias = (options.pop(key, None) for key in ("decode", "new", "mask", "bias"))
    q, do = harness.random_arrays(xp, 2, (batch, heads, 1 if decode else n, d), np.dtype(dtype))
    k, v = harness.random_arrays(xp, 2, (batch, heads // 4 if decode else heads, n, d), np.dtype(dtype), seed=2)
    if "dropout_p" in options:
        options["rng"] = 1
    if bias:
        options["bias"] = harness.random_arrays(xp, 1, (heads, n, n), np.dtype(dtype), seed=3)[0]
    if new:  # its tables are made in the call
        return lambda: Calls(q, k, v, mask=column_mask(samples(kind, n, 1)), **options).forward()
    if kind:
        options["mask"] = harness.placed(column_mask(samples(kind, n, 1)), "cuda" if gpu else "cpu")
    calls = Calls(q, k, v, do, **options)
    if direction != "backward":
        return calls.forward
    try:
        calls.fwd  # noqa: B018
    except UnsupportedError:
        calls.fwd = Calls(q, k, v, **{**options, "kernel": None}).forward()
    return calls.backward


def summary(kernel):
    """Turn one kernel's metrics into what a reader wants: rounded, stalls as shares, conflicts per access."""
    kernel = {name: 0.0 if value is None else value for name, value in kernel.items()}
    stalls = {name: kernel.get(f"stall_{name}", 0.0) for name in STALLS}
    waited = sum(stalls.values()) or 1.0
    ranked = sorted(stalls.items(), key=lambda item: -item[1])
    wavefronts = kernel.get("shared_wavefronts", 0.0)
    conflicts = kernel.get("bank_conflicts_load", 0.0) + kernel.get("bank_conflicts_store", 0.0)
    return {
        "kernel": kernel["kernel"],
        "milliseconds": round(kernel["seconds"] * 1e3, 4),
        **{name: round(kernel[name], 2) for name in SHARES if name in kernel},
        "hbm_gb": round(counters.moved(kernel) / 1e9, 4),
        "stalls": {name: round(value / waited, 3) for name, value in ranked if value / waited >= 0.02},
        "bank_conflicts": round(conflicts / wavefronts, 4) if wavefronts else 0.0,
    }


def measure(name):
    """Return the profile of a call, made with all those of its kernel family in one process."""
    kernel, direction, dtype, shape, options = CALLS[name]
    family = tuple(name for name in NAMES if name.startswith(kernel))
    kernels = counters.count("bench.kernel_profiles", family, tuple(METRICS.items()), 300.0)[name]
    problem = {"kernel": kernel, "direction": direction, "dtype": dtype, "shape": shape, "options": options}
    if not kernels:
        return {"status": "unsupported", "reason": "no such kernel, see the messages of the run", "problem": problem}
    whole = sum(kernel["seconds"] for kernel in kernels)
    named = [summary(kernel) for kernel in kernels if kernel["seconds"] >= SMALLEST_SHARE * whole]
    return {"problem": problem, "kernels": named, "milliseconds": round(whole * 1e3, 4)}


def points(arguments):
    """Return one point per call."""
    return [one(f"profile/{name}/{CALLS[name][1]}", "cuattn", measure, name) for name in NAMES]


if __name__ == "__main__":
    harness.main(__doc__, "kernel_profiles", points)
