"""Rows: what one runner did on one case, with everything needed to judge it; and the files that hold them.

A file is one JSON object: ``runs`` (device, versions, source tree, command, one per process) and ``rows``, one per
line, each naming its run.  Files grow by whole cases and are replaced atomically, so an interrupted run can be resumed.

``python -m bench.rows`` prints the source trees for ``--trees``; ``python -m bench.rows TARGET SOURCE ...`` takes rows
of other machines into one file.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["RowFile", "clocks", "commit", "environment", "merge", "trees"]

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")
TREES = ("kernels", "cuattn", "bench")
ROOT = Path(__file__).resolve().parent.parent


class RowFile:
    """A file of rows that grows.

    Parameters
    ----------
    path : Path
        Read when it exists.
    run : dict
        This process, see `environment`; rows of an equal earlier run count as done.
    """

    def __init__(self, path: Path, run: dict[str, Any]) -> None:
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
        self.runs: list[dict[str, Any]] = content["runs"]
        self.rows: list[dict[str, Any]] = content["rows"]
        self._mark = _fingerprint(run)
        self.runs.append({**run, "id": max((old["id"] for old in self.runs), default=-1) + 1})

    @property
    def run(self) -> int:
        """The number of this process among the file's runs."""
        return int(self.runs[-1]["id"])

    def done(self, case: str, runners: list[str]) -> bool:
        """Return whether one run on this same machine and source already holds a case with all these runners."""
        same = {run["id"] for run in self.runs if _fingerprint(run) == self._mark}
        for run in same:
            found = {row["runner"] for row in self.rows if row["run"] == run and row["case"] == case}
            if found >= set(runners):
                return True
        return False

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Append the rows of a case and write the file; older rows of the same case and runner make way."""
        new = {(row["case"], row["runner"]) for row in rows}
        self.rows = [row for row in self.rows if (row["case"], row["runner"]) not in new]
        self.rows += [{"run": self.run, **row} for row in rows]
        self.write()

    def write(self) -> None:
        """Write the file, one row a line, leaving out runs without rows."""
        used = {row["run"] for row in self.rows}
        runs = [run for run in self.runs if run["id"] in used]
        text = "".join(
            ['{"runs": [\n', _lines(runs), '\n],\n"rows": [\n', _lines(self.rows), "\n]}\n"],
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(self.path.suffix + ".part")
        partial.write_text(text)
        os.replace(partial, self.path)


def _lines(items: list[dict[str, Any]]) -> str:
    return ",\n".join(json.dumps(item, allow_nan=False) for item in items)


def _fingerprint(run: dict[str, Any]) -> str:
    """Return what must agree between two processes whose rows may stand in one table."""
    return json.dumps([run.get(key) for key in ("device", "driver", "versions", "trees", "options")], sort_keys=True)


def environment(device: str, handed_trees: str | None = None, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Describe this process.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        Where cases run.
    handed_trees : str, optional
        ``"commit=ID,kernels=HASH,cuattn=HASH"`` for a copy of the sources that has no git.
    options : dict, optional
        Settings that change what is measured.

    Returns
    -------
    dict
        Device, driver, versions, clocks, commit, source trees, time and command.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    run: dict[str, Any] = {"device": _processor(), "driver": None}
    if device == "cuda":
        import torch

        run["device"] = torch.cuda.get_device_name(0)
        run["driver"] = _smi("driver_version")
        versions["cuda"] = str(torch.version.cuda)
        versions["cudnn"] = str(torch.backends.cudnn.version())
    return {
        **run,
        "clocks": clocks() if device == "cuda" else None,
        "versions": versions,
        "commit": commit(handed_trees),
        "trees": trees(handed_trees),
        "options": options or {},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def _processor() -> str:
    """Return the processor's name and how many cores may be used."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def clocks() -> dict[str, float] | None:
    """Return the GPU's clocks (MHz), power (W) and temperature (C) now, or None where they cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        name = _gpu()
        numbered = name.isdecimal()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(int(name)) if numbered else pynvml.nvmlDeviceGetHandleByUUID(name)
        return {
            "sm_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
            "memory_mhz": pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
            "watts": pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "celsius": pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:  # no package, no permission, no such counter: the reading is a courtesy
        values = _smi("clocks.sm,clocks.mem,power.draw,temperature.gpu")
        try:
            readings = [float(value) for value in (values or "").split(",")]
        except ValueError:
            return None
        return dict(zip(("sm_mhz", "memory_mhz", "watts", "celsius"), readings, strict=True)) if readings else None


def _gpu() -> str:
    """Return the number or the identity of the GPU that this process computes on."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"


def _smi(query: str) -> str | None:
    """Ask nvidia-smi about this process's GPU."""
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", f"--id={_gpu()}", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None if done.returncode == 0 else None


def trees(handed: str | None = None) -> dict[str, str]:
    """Return the git tree ids of the sources that are measured.

    Parameters
    ----------
    handed : str, optional
        ``"kernels=HASH,cuattn=HASH"``; without it git is asked, where there is a checkout.

    Returns
    -------
    dict
        Tree id by folder, with ``+`` after an id when the folder differs from it; empty when nobody knows.

    Examples
    --------
    >>> trees("kernels=12ab,cuattn=34cd")
    {'kernels': '12ab', 'cuattn': '34cd'}
    """
    if handed:
        pairs = (part.partition("=") for part in handed.split(","))
        return {name: value for name, _, value in pairs if name != "commit"}
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return {}
    found = {}
    for name in TREES:
        identity, changed = _git("rev-parse", f"HEAD:{name}"), _git("status", "--porcelain", "--", name)
        if identity:
            found[name] = identity[:12] + ("+" if changed else "")
    return found


def commit(handed: str | None = None) -> str | None:
    """Return the commit that is measured: of `handed` as in `trees`, else git's; None when nobody knows.

    Examples
    --------
    >>> commit("commit=12ab,kernels=34cd")
    '12ab'
    """
    if handed:
        return next((part[7:] for part in handed.split(",") if part.startswith("commit=")), None)
    return _git("rev-parse", "--short=12", "HEAD") or None if (ROOT / ".git").exists() and shutil.which("git") else None


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def merge(target: Path, sources: list[Path]) -> None:
    """Take the rows of other files into one; where both hold a case and runner, the later source wins."""
    for source in sources:
        content = json.loads(source.read_text())
        for run in content["runs"]:
            rows = [
                {key: x for key, x in row.items() if key != "run"} for row in content["rows"] if row["run"] == run["id"]
            ]
            RowFile(target, {key: value for key, value in run.items() if key != "id"}).add(rows)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        merge(Path(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
    else:
        print(",".join(f"{name}={value}" for name, value in {"commit": commit(), **trees()}.items()))
