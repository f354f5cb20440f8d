"""Profile every shipped kernel with ``ncu``: how busy its units are, and what its warps wait for.

    python -m bench.kernel_profiles
    python -m bench.kernel_profiles --device cpu --tiny   # no profile: are the calls right?

A row per call, ``kernels`` in it: each kernel that took a noticeable part of the time.  Percentages are of the unit's
peak over the kernel's own elapsed cycles, so that they do not depend on the clock; stalls are shares of a warp's time.
"""

from collections import Counter
from dataclasses import replace

from bench import counters, harness, inputs
from bench.cases import Case
from bench.harness import one
from bench.mask_samples import column_mask
from bench.peers import make

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

NAMES = {  # kernel and direction: problems
    "sm90-forward": "d128 d64 d256 d128-causal d128-documents d128-dropout new-mask",
    "sm90-backward": "d128 d64 d256 d128-causal d64-causal d128-dropout d128-documents d128-deterministic",
    "sm80-forward": "d128 d64 float32-d64 float64-d64 decode decode-split",
    "sm80-backward": "d128 d64 d128-deterministic float32-d64 float64-d64 float64-d128 float32-d512 bias",
}
PROBLEMS = {  # large enough that every multiprocessor stays busy; what differs from 4 x 16 heads of 4096 x 128
    "d64": dict(heads=32, head_dim=64),
    "d256": dict(heads=8, head_dim=256),
    "d128-causal": dict(causal=True),
    "d64-causal": dict(batch=1, heads=32, n_keys=16384, head_dim=64, causal=True),
    "d128-documents": dict(mask="causal_document"),
    "d128-dropout": dict(dropout=0.1),
    "d128-deterministic": dict(deterministic=True),
    "float32-d64": dict(dtype="float32", batch=2, head_dim=64),
    "float64-d64": dict(dtype="float64", batch=1, head_dim=64),
    "float64-d128": dict(dtype="float64", batch=1),
    "float32-d512": dict(dtype="float32", batch=1, heads=8, n_keys=2048, head_dim=512),
    "bias": dict(batch=2, n_keys=2048, score="pairs"),
    "new-mask": dict(batch=1, heads=2, n_keys=32768, mask="causal_document"),
    "decode": dict(batch=16, heads=32, kv_heads=8, n_queries=1, n_keys=8192),
    "decode-split": dict(heads=32, batch=1, kv_heads=8, n_queries=1, n_keys=65536),
}


def _case(direction, batch=4, heads=16, n_keys=4096, head_dim=128, dtype="float16", **options):
    options = {"kv_heads": heads, "n_queries": n_keys, **options}
    return Case("profile", direction, batch, heads, n_keys=n_keys, head_dim=head_dim, dtype=dtype, **options)


CALLS = {
    f"{group}-{name}": _case(group[5:], **PROBLEMS.get(name, {}))
    for group, names in NAMES.items()
    for name in names.split()
}
CALLS |= {f"{name}-tiny": case.tiny for name, case in CALLS.items()}


def counted(name, device="cuda"):
    """Return the call of a name, for `bench.counters`; on the host by the CPU's backend."""
    case = CALLS[name]
    (runner,) = make([f"cuattn-{name[:4]}" if device == "cuda" else "cuattn"])
    made = inputs.make(case.problem, device)
    if "new-mask" in name:  # its tables are made in the call
        return lambda: runner.bind(case, replace(made, mask=column_mask(made.samples))).call()
    return runner.bind(case, made).call


def summary(kernel):
    """Turn one kernel's metrics into what a reader wants: rounded, stalls as shares, conflicts per access."""
    stalls = Counter({name: kernel.get(f"stall_{name}", 0.0) for name in STALLS})
    conflicts = kernel.get("bank_conflicts_load", 0.0) + kernel.get("bank_conflicts_store", 0.0)
    return {
        "kernel": kernel["kernel"],
        "milliseconds": round(kernel["seconds"] * 1e3, 4),
        **{name: round(kernel[name], 2) for name in SHARES if name in kernel},
        "hbm_gb": round(counters.moved(kernel) / 1e9, 4),
        "stalls": {name: round(x / stalls.total(), 3) for name, x in stalls.most_common() if x > 0.02 * stalls.total()},
        "bank_conflicts": round(conflicts / (kernel.get("shared_wavefronts") or 1.0), 4),
    }


def measure(name, device):
    """Return the profile of a call, made with all those of its kernel family in one process."""
    row = {"problem": {"kernel": name[:4], **CALLS[name].as_dict()}}
    if device == "cpu":
        return row | harness.timed({"": counted(name, device)}, device, 0.0, least=1)[""]
    family = tuple(other for other in CALLS if (other[:4], "-tiny" in other) == (name[:4], "-tiny" in name))
    kernels = counters.count("bench.kernel_profiles", name, family, tuple(METRICS.items()), 300.0)
    whole = sum(kernel["seconds"] for kernel in kernels)
    named = [summary(kernel) for kernel in kernels if kernel["seconds"] >= SMALLEST_SHARE * whole]
    return {**row, "kernels": named, "milliseconds": round(whole * 1e3, 4)}


def points(arguments):
    """Return one point per call."""
    names = [name for name in CALLS if ("-tiny" in name) == arguments.tiny]
    return [one(f"profile/{name}/{CALLS[name].direction}", "cuattn", measure, name, arguments.device) for name in names]


if __name__ == "__main__":
    harness.main(__doc__, "kernel_profiles", points)
