"""Rows: what one runner did on one case, with everything needed to judge it; and the files that hold them.

A file is one JSON object: ``runs`` (device, versions, source tree, command, one per process) and ``rows``, one per
line, each naming its run.  Files grow by whole cases and are replaced atomically, so an interrupted run can be resumed.

``python -m bench.rows`` prints the source trees for ``--trees``; ``python -m bench.rows TARGET SOURCE ...`` takes rows
of other machines into one file.
"""

import contextlib
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from cuattn.cpu.threads import usable_cores

PACKAGES = ("numpy", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")
TREES = ("kernels", "cuattn", "bench")
SAME = ("device", "driver", "versions", "trees", "options")  # two processes that share these may fill one table
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"


class RowFile:
    """A file of rows that grows.

    Parameters
    ----------
    path : Path
        Read when it exists.
    run : dict
        This process, see `environment`; rows of an equal earlier run count as done.
    """

    def __init__(self, path, run):
        self.path = path
        content = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
        self.runs = content["runs"]
        self.rows = content["rows"]
        self.runs.append({**run, "id": max((old["id"] for old in self.runs), default=-1) + 1})

    @property
    def run(self):
        """The number of this process among the file's runs."""
        return int(self.runs[-1]["id"])

    def done(self, case, runners, retry=False):
        """Return whether one run on this same machine and source holds a case with all these runners.

        With `retry`, rows of runners that failed do not count.
        """
        found = {
            (row["run"], row["runner"])
            for row in self.rows
            if row["case"] == case and not (retry and row["status"] == "failed")
        }
        mark = _fingerprint(self.runs[-1])
        same = (run["id"] for run in self.runs if _fingerprint(run) == mark)
        return any(all((run, runner) in found for runner in runners) for run in same)

    def add(self, rows):
        """Append the rows of a case and write the file; older rows of the same case and runner make way."""
        new = {(row["case"], row["runner"]) for row in rows}
        self.rows = [row for row in self.rows if (row["case"], row["runner"]) not in new]
        self.rows += [{**row, "run": self.run} for row in rows]
        used = {row["run"] for row in self.rows}
        runs = [run for run in self.runs if run["id"] in used]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(self.path.suffix + ".part")
        partial.write_text(f'{{"runs": [\n{_lines(runs)}\n],\n"rows": [\n{_lines(self.rows)}\n]}}\n')
        os.replace(partial, self.path)


def _lines(items):
    return ",\n".join(json.dumps(item, allow_nan=False) for item in items)


def _fingerprint(run):
    return json.dumps([run.get(key) for key in SAME], sort_keys=True)


def environment(device, handed=None, options=None):
    """Describe this process.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        Where cases run.
    handed : str, optional
        What `sources` reads where there is no git.
    options : dict, optional
        Settings that change what is measured.

    Returns
    -------
    dict
        Device, driver, versions (NVRTC's too), clocks, commit, source trees, time and command.
    """
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    gpu = device == "cuda"
    if gpu:
        import cupy

        from bench.internals import nvrtc_version

        versions["nvrtc"] = nvrtc_version()
        with contextlib.suppress(ImportError):
            import torch

            versions["cuda"] = str(torch.version.cuda)
            versions["cudnn"] = str(torch.backends.cudnn.version())
    commit, trees = sources(handed)
    return {
        "device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode() if gpu else _processor(),
        "driver": _driver() if gpu else None,
        "clocks": clocks() if gpu else None,
        "versions": versions,
        "commit": commit,
        "trees": trees,
        "options": options or {},
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
    }


def _processor():
    """Return the processor's name, how many cores may be used, and whether they are ours alone."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    real_time = hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) != os.SCHED_OTHER
    return f"{name}, {usable_cores()} cores" + (", real-time scheduling" if real_time else "")


def clocks():
    """Return the GPU's clocks (MHz), power (W) and temperature (C) now, or None where they cannot be read."""
    try:
        nvml, gpu = _nvml()
        return {
            "sm_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "memory_mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
            "watts": nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:  # no package, no permission, no such counter: the reading is a courtesy
        return None


def _driver():
    """Return the version of the GPU's driver, or None where it cannot be read."""
    try:
        return _nvml()[0].nvmlSystemGetDriverVersion()
    except Exception:
        return None


def _nvml():
    """Return NVML, which reads while the device works, and its handle of the GPU that this process computes on."""
    import pynvml

    pynvml.nvmlInit()
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip() or "0"
    if gpu.isdecimal():
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(int(gpu))
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(gpu)


def sources(handed=None, names=TREES, root=ROOT):
    """Return the commit and the git tree ids of the sources that are measured.

    Parameters
    ----------
    handed : str, optional
        ``"commit=ID,kernels=ID,cuattn=ID"`` for a copy without git (``python -m bench.rows`` prints it); by default
        what the environment variable ``CUATTN_TREES`` holds, else git is asked.
    names : iterable of str, optional
        Folders to ask git for.
    root : Path, optional
        The checkout.

    Returns
    -------
    commit : str or None
        None when nobody knows.
    trees : dict of str to str
        Id by folder, with ``+`` behind it when the folder differs from it; empty when nobody knows.

    Examples
    --------
    >>> sources("commit=12ab,kernels=34cd")
    ('12ab', {'kernels': '34cd'})
    """
    handed = handed or (os.environ.get("CUATTN_TREES") if root == ROOT else None)
    if handed:
        found = dict(part.split("=", 1) for part in handed.split(","))
        return found.pop("commit", None), found
    if not (root / ".git").exists() or not shutil.which("git"):
        return None, {}

    def git(*arguments):
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    trees = {
        name: identity + ("+" if git("status", "--porcelain", "--", name) else "")
        for name in names
        if (identity := git("rev-parse", f"HEAD:{name}"))
    }
    return git("rev-parse", "--short=12", "HEAD") or None, trees


def merge(target, paths):
    """Take the rows of other files into one; where both hold a case and runner, the later file wins."""
    for path in paths:
        content = json.loads(path.read_text())
        for run in content["runs"]:
            RowFile(target, run).add([row for row in content["rows"] if row["run"] == run["id"]])


if __name__ == "__main__":
    if len(sys.argv) > 2:
        merge(Path(sys.argv[1]), map(Path, sys.argv[2:]))
    else:
        commit, trees = sources()
        print(",".join(f"{name}={value}" for name, value in {"commit": commit, **trees}.items()))
