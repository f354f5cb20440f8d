"""Time the first call of a direction in a fresh process: with an empty disk cache, and from the disk cache.

``python -m bench.first_call forward`` is the child: it prints the seconds of its first call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import rows, timing

__all__ = ["TABLE", "run"]

TABLE = "first-call"
PROBLEMS = (("forward", "full"), ("forward", "causal_document"), ("backward", "full"))
FROM_DISK = 3  # times that the call from the disk cache is measured
ROOT = Path(__file__).resolve().parent.parent
SHAPE = (2, 4, 1024, 128)


def child(direction: str, mask: str, kernel: str | None) -> float:
    """Return the seconds of this process's first call of `direction`, until its result is there.

    The CUDA context, the arrays and, for a backward, the forward exist before.
    """
    import cupy

    import cuattn

    rng = cupy.random.default_rng(1)
    q, k, v, do = (rng.standard_normal(SHAPE, dtype=cupy.float32).astype(cupy.float16) for _ in range(4))
    options: dict[str, Any] = {"kernel": kernel}
    if mask != "full":
        options["mask"] = getattr(cuattn.masks, mask)([SHAPE[2] // 4] * 4)
    fwd = cuattn.forward(q, k, v, **options) if direction == "backward" else None
    cupy.cuda.Device().synchronize()
    begin = time.perf_counter()
    if direction == "forward":
        cuattn.forward(q, k, v, **options)
    else:
        cuattn.backward(do, q, k, v, fwd, **options)
    cupy.cuda.Device().synchronize()
    return time.perf_counter() - begin


def _in_child(cache: str, direction: str, mask: str, kernel: str | None) -> float:
    command = [sys.executable, "-m", "bench.first_call", direction, "--mask", mask]
    command += ["--kernel", kernel] if kernel else []
    folders = {"CUATTN_CACHE_DIR": f"{cache}/cuattn", "CUPY_CACHE_DIR": f"{cache}/cupy"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **folders}, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise RuntimeError(lines[-1][:300])
    return float(done.stdout.strip().splitlines()[-1])


def _row(runner: str, name: str, samples: list[float] | None, reason: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {"case": name, "runner": runner, "ours": True, "status": "ok" if samples else "failed"}
    row["problem"] = {"table": TABLE, "shape": SHAPE, "dtype": "float16"}
    if not samples:
        return {**row, "reason": reason}
    median = timing.summary(samples)["median"]
    microseconds = [round(sample * 1e6, 1) for sample in samples]
    return {**row, "samples_us": microseconds, "median_us": median * 1e6, "rate": round(median, 4), "unit": "s"}


def run(arguments: argparse.Namespace) -> int:
    """Measure every problem for each cuattn runner; add the rows to ``arguments.out``; return the exit status."""
    file = rows.RowFile(arguments.out, rows.environment(arguments.device, arguments.trees))
    failed = 0
    for runner in arguments.ours:
        kernel = runner.partition("-")[2] or None
        for direction, mask in PROBLEMS:
            if direction not in arguments.directions:
                continue
            label = f"{TABLE}/{{}}-d{SHAPE[3]}-{mask}/{direction}"
            found: dict[str, list[float] | None] = {"cold": None, "disk": None}
            reason = ""
            try:
                with tempfile.TemporaryDirectory() as cache:
                    found["cold"] = [_in_child(cache, direction, mask, kernel)]
                    found["disk"] = [_in_child(cache, direction, mask, kernel) for _ in range(FROM_DISK)]
            except RuntimeError as error:
                reason, failed = str(error), 1
            file.add([_row(runner, label.format(state), samples, reason) for state, samples in found.items()])
            print(label.format("*"), runner, reason or json.dumps(found), flush=True)
    return failed


def main() -> int:
    """Run the child."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("direction", choices=("forward", "backward"))
    parser.add_argument("--mask", default="full")
    parser.add_argument("--kernel")
    arguments = parser.parse_args()
    print(child(arguments.direction, arguments.mask, arguments.kernel))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
