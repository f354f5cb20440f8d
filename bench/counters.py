"""Hardware counters of single calls: a study's calls run in a process of their own under ``ncu``.

The study's module has a function ``counted(name)`` that returns a call.  `count` starts
``ncu python -m bench.counters MODULE NAMES``; the child makes each call once to compile it, then once with the profiler
on, inside a named range.  The clocks and the caches are left as they are.
"""

import collections
import contextlib
import csv
import functools
import importlib
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.harness import free_caches
from bench.rows import ROOT

HBM = (  # names and ncu's metrics
    ("hbm_read", "dram__bytes_read.sum"),
    ("hbm_write", "dram__bytes_write.sum"),
    ("seconds", "gpu__time_duration.sum"),
)
TRAFFIC = (  # what moves between device memory, the L2 cache and the multiprocessors
    *HBM,
    ("l2_to_sm", "l1tex__m_xbar2l1tex_read_bytes.sum"),
    ("sm_to_l2", "l1tex__m_l1tex2xbar_write_bytes.sum"),
)
UNITS = {
    "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
    "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1.0,
}  # fmt: skip


def count(module, name, names, metrics=TRAFFIC, timeout=240.0):
    """Count the events of a call, with those of others in one process; of all of them the counts are kept.

    Parameters
    ----------
    module : str
        A module with ``counted(name)``.
    name, names : str, tuple of str
        A call of it, and all calls that are counted with it.
    metrics : tuple of (str, str)
        Names and ``ncu``'s metrics.
    timeout : float
        Seconds.

    Returns
    -------
    list of dict
        One entry per kernel that the call launched: ``kernel`` and the metrics, in bytes, seconds or ncu's unit, those
        of them that are numbers.

    Raises
    ------
    RuntimeError
        ``ncu`` is missing or failed; with the end of its messages.  Or the call failed, which the run's messages tell.
    """
    if kernels := _run(module, names, metrics, timeout)[name]:
        return kernels
    raise RuntimeError(f"no kernel of {name} was counted; see the messages of the run")


@functools.cache
def _run(module, names, metrics, timeout):
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (Nsight Compute) is not installed; the counters need it")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counts.csv"
        command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off"]
        command += ["--nvtx", "--csv", "--page", "raw", "--metrics", ",".join(dict(metrics).values())]
        command += ["--log-file", str(log), sys.executable, "-m", "bench.counters", module, *names]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        text = log.read_text() if log.exists() else ""
    if done.stderr.strip():
        print(done.stderr.strip()[-2000:], file=sys.stderr)
    if done.returncode or '"ID"' not in text:
        said = "\n".join([text, done.stdout, done.stderr]).strip().splitlines()
        raise RuntimeError("ncu: " + " | ".join(said[-3:])[-400:])
    return parse(text, names, dict(metrics))


def parse(text, names, metrics):
    """Return the kernels of each named range from the text of ``ncu --csv --page raw``."""
    units, *rows = csv.DictReader(io.StringIO(text[text.index('"ID"') :]))
    found = {name: [] for name in names}
    for row in rows:
        marks = " ".join(value or "" for title, value in row.items() if "Range" in title)
        for name in found:
            if f'"{name}"' in marks or f":{name}:" in marks:
                values = {"kernel": row["Kernel Name"].partition("(")[0]}
                for key, metric in metrics.items():
                    with contextlib.suppress(KeyError, ValueError):
                        values[key] = float(row[metric].replace(",", "")) * UNITS.get(units[metric], 1)
                found[name].append(values)
    return found


def total(kernels):
    """Add up the numbers of a call's kernels.

    Examples
    --------
    >>> total([{"kernel": "a", "hbm_read": 1.0}, {"kernel": "b", "hbm_read": 2.0}])
    {'hbm_read': 3.0}
    """
    sums = collections.Counter()
    for kernel in kernels:
        sums.update({key: value for key, value in kernel.items() if isinstance(value, (int, float))})
    return dict(sums)


def moved(kernel):
    """Return the bytes that a kernel, or all of a call, moved to and from device memory."""
    return kernel.get("hbm_read", 0) + kernel.get("hbm_write", 0)


def main():
    """Run the calls: this is the child."""
    module, *names = sys.argv[1:]
    import cupy
    from cupy.cuda import nvtx, profiler

    counted = importlib.import_module(module).counted
    for name in names:
        try:
            call = counted(name)
            if "torch" in sys.modules:  # a named range holds for one thread: gradients must be computed in this one
                sys.modules["torch"].autograd.set_multithreading_enabled(False)
            call()
            cupy.cuda.Device().synchronize()
            profiler.start()
            nvtx.RangePush(name)
            call()
            cupy.cuda.Device().synchronize()
            nvtx.RangePop()
            profiler.stop()
        except Exception as error:  # the other calls go on; this one has no kernels
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        call = None
        free_caches()  # the next call may need all of it


if __name__ == "__main__":
    main()
