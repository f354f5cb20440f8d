"""What every measuring command shares: points to measure, files that resume, a budget, clocks, arrays, memory.

A command names its points.  Each is measured by one call that returns, per runner, the values of a row.  A point that
fails leaves rows that say why, and the others go on.  What a file of rows already holds for the same machine and
sources is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import sys
import time
import tracemalloc
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from rich.console import Console

import cuattn
from bench import timing
from bench.rows import RESULTS, RowFile, environment


class Point(NamedTuple):
    """One thing to measure.

    Attributes
    ----------
    case : str
        Unique name, ``table/label/direction``.
    runners : tuple of str
        Whose rows `measure` returns; with all of them in the file, the point is done.
    measure : callable
        Returns the values of each runner's row.
    retry : bool
        Measure again in a later process when a runner failed.
    """

    case: str
    runners: tuple[str, ...]
    measure: Callable[[], dict[str, Any]]
    retry: bool = True


def one(case, runner, measure, *arguments):
    """Return the point of a single runner, whose values are ``measure(*arguments)``."""
    return Point(case, (runner,), lambda: {runner: measure(*arguments)})


class Calls:
    """What cuattn can be asked of some operands: ``forward``, ``backward`` after one forward, ``both``, ``results``.

    And ``jvp``, ``backward_jvp``, ``double_backward``, along tangents that are the operands themselves.

    Parameters
    ----------
    q, k, v, do : array
        NumPy, CuPy or any that cuattn takes; do may be None where no gradient is asked for.
    package : module
        cuattn, or another version of it.
    **options
        Of the forward and the backward; `deterministic` goes to the backward alone, `rng` and `out_dtype` to the
        forward.  Grouped heads are seen in the shapes.
    """

    def __init__(self, q, k, v, do=None, *, package=cuattn, deterministic=False, **options):
        self.package, self.operands, self.do = package, (q, k, v), do
        self.first = {key: options.pop(key) for key in ("rng", "out_dtype") if key in options}
        self.exact = {"deterministic": True} if deterministic else {}
        grouped = {"enable_gqa": True} if q.shape[-3:-2] != k.shape[-3:-2] else {}
        self.options = options | grouped

    def forward(self):
        """Compute the forward."""
        return self.package.forward(*self.operands, **self.options, **self.first)

    @functools.cached_property
    def fwd(self):
        """The forward that `backward` follows, computed once."""
        return self.forward()

    def backward(self, fwd=None):
        """Compute the gradients, of a given forward or of the one that is kept."""
        fwd = self.fwd if fwd is None else fwd
        return self.package.backward(self.do, *self.operands, fwd, **self.options, **self.exact)

    @property
    def tangents(self):
        """Tangents of all operands and of arrays of floats that a score function is given."""
        found = {**dict(zip(("tq", "tk", "tv"), self.operands, strict=True)), "tbias": self.options.get("bias")}
        if args := self.options.get("score_args"):
            found["tscore_args"] = tuple([x if "float" in str(getattr(x, "dtype", "")) else None for x in args])
        return found

    def jvp(self):
        """Compute the forward along the tangents, unrounded."""
        wide = "float64" if "float64" in str(self.operands[0].dtype) else "float32"
        return self.package.jvp(*self.operands, **self.tangents, **self.options, **{**self.first, "out_dtype": wide})

    @functools.cached_property
    def along(self):
        """The jvp that `backward_jvp` and `double_backward` follow, computed once."""
        return self.jvp()

    def backward_jvp(self):
        """Compute the gradients and their tangents."""
        options = {**self.tangents, **self.options, **self.exact, "tdo": self.do}
        return self.package.backward_jvp(self.do, *self.operands, self.along, **options)

    def double_backward(self):
        """Compute the gradients of the gradients."""
        more = {name.replace("t", "gd", 1).removesuffix("_args"): x for name, x in self.tangents.items()}
        gradients = [more.pop(f"gd{name}") for name in "qkv"]
        options = {**more, **self.options, **self.exact}
        return self.package.double_backward(*gradients, self.do, *self.operands, self.along, **options)

    def both(self):
        """Compute the forward and the gradients; return o, dq, dk, dv."""
        fwd = self.forward()
        return fwd.o, *self.backward(fwd)[:3]

    def plan(self, direction):
        """Return the printed plan; a plan that fails must not keep the call itself from being measured."""
        exact = self.exact if direction == "backward" else {}
        rng = {key: x for key, x in self.first.items() if key == "rng"}
        try:
            return str(self.package.plan(*self.operands, direction=direction, **self.options, **rng, **exact))
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def parser(description, name, more=(), **defaults):
    """Return the parser of a command.

    Parameters
    ----------
    description : str
        What it measures, in its first line.
    name : str
        Rows go to ``bench/results/NAME.json``, see `destination`.
    more : mapping of str to dict, optional
        Options of its own, as ``add_argument`` takes them.
    **defaults
        Other defaults of the shared options.
    """
    found = argparse.ArgumentParser(description=description.partition("\n")[0])
    add = found.add_argument
    add("--only", nargs="+", default=[], metavar="PATTERN", help="cases whose name or a word matches")
    add("--budget", type=float, default=540.0, metavar="SECONDS", help="start no case past this time")
    add("--seconds", type=float, default=0.5, help="device time to sample per case")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="sizes that NumPy does in seconds, to try the command")
    add("--trees", metavar="NAME=ID,...", help="git ids of a copy without git (or $CUATTN_TREES)")
    add("--out", type=Path, metavar="FILE", help=f"by default bench/results/{name}.json")
    add("--list", action="store_true", help="print the cases and stop")
    for option, settings in dict(more).items():
        add(option, **settings)
    found.set_defaults(name=name, **defaults)
    return found


def main(description, name, points, more=(), **defaults):
    """Run a command: parse its line, measure ``points(arguments)``; the rest as for `parser`."""
    arguments = parser(description, name, more, **defaults).parse_args()
    run(arguments, points(arguments), {"tiny": arguments.tiny})


def destination(arguments):
    """Return the file of rows: what is tiny, or beside another checkout, stays away from the committed ones."""
    kind = "tiny-" if arguments.tiny else "beside-" if vars(arguments).get("beside") else ""
    return arguments.out or RESULTS / f"{kind}{arguments.name}.json"


def matches(name, patterns):
    """Return whether a name, or a part of it between slashes and dashes, matches a shell pattern; without any, True.

    Examples
    --------
    >>> matches("dense/d64-N1024-causal/forward", ["N1024"]), matches("dense/d64-N1024-causal/forward", ["*N10*"])
    (True, True)
    """
    words = (name, *name.replace("/", "-").split("-"))
    return not patterns or any(fnmatchcase(word, pattern) for word in words for pattern in patterns)


def run(arguments, points, options=None, show=None):
    """Measure the points that the file lacks, until the budget is spent.

    Parameters
    ----------
    arguments : Namespace
        Of `parser`.
    points : iterable of Point
        In the order to measure them.
    options : dict, optional
        Settings that change what is measured; rows of other settings do not count as done.
    show : Console, optional
        Where progress is shown.

    Returns
    -------
    list of str
        Cases left for another run.
    """
    show = show or Console(width=None if Console().is_terminal else 200)
    wanted = [point for point in points if matches(point.case, arguments.only)]
    if arguments.list:
        for point in wanted:
            show.print(point.case, highlight=False)
        return []
    file = RowFile(destination(arguments), environment(arguments.device, arguments.trees, options))
    todo = [point for point in wanted if not file.done(point.case, point.runners, point.retry)]
    begin, longest = time.monotonic(), 0.0
    for index, point in enumerate(todo):
        start = time.monotonic()
        if start - begin + longest > arguments.budget:
            left = [point.case for point in todo[index:]]
            show.print(f"{len(left)} cases left: " + " ".join(left), soft_wrap=True, highlight=False)
            return left
        with show.status(f"{index + 1} of {len(todo)}: {point.case}"):
            rows = _measure(point)
        file.add(rows)
        longest = max(longest, time.monotonic() - start)
        said = ", ".join(_said(row) for row in rows if row["status"] != "unsupported")
        show.print(f"{point.case}: {said}", highlight=False, soft_wrap=True)
    return []


def _measure(point):
    try:
        found = point.measure()
    except Exception as error:  # the other points go on; the row says what happened
        reason = f"{type(error).__name__}: {error}"[:400]
        found = {name: {"status": "failed", "reason": reason} for name in point.runners}
    return [
        {"case": point.case, "runner": name, "ours": name.startswith("cuattn"), "status": "ok", "problem": {}, **values}
        for name, values in found.items()
    ]


def _said(row):
    if row["status"] != "ok":
        return f"{row['runner']} [red]{row['status']}[/]: {row.get('reason', '')}"
    if "rate" in row:
        return f"{row['runner']} [bold]{row['rate']:.4g}[/] {row['unit']}"
    return f"{row['runner']} " + (f"[bold]{row['median_us'] / 1e3:.4g} ms[/]" if "median_us" in row else "done")


@functools.cache
def clock(device):
    """Return the clock of a device, see `bench.timing`; on a GPU it keeps a buffer to flush the caches with."""
    return timing.CudaClock() if device == "cuda" else timing.HostClock()


def namespace(device):
    """Return CuPy for ``"cuda"``, else NumPy."""
    return importlib.import_module("cupy" if device == "cuda" else "numpy")


def synchronize(xp):
    """Wait for the device whose library `xp` is."""
    if xp.__name__ == "cupy":
        xp.cuda.Device().synchronize()


def placed(mask, device):
    """Return a mask where it is needed."""
    return mask.to_device() if device == "cuda" else mask


def random_arrays(xp, count, shape, dtype, seed=1):
    """Return standard normal arrays, the same at every call with the same library."""
    generator = xp.random.default_rng(seed)
    return [generator.standard_normal(shape, dtype=xp.float32).astype(dtype) for _ in range(count)]


def timed(calls, device, seconds, **rounds):
    """Time calls in turn; return the values that `timing.timed` makes of each one's samples."""
    samples = timing.measure(calls, clock(device), seconds=seconds, **rounds)
    return {name: timing.timed(spent) for name, spent in samples.items()}


def free_caches():
    """Give back what the allocators of PyTorch and CuPy keep, those of them that are there."""
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


@contextlib.contextmanager
def peak(device):
    """Observe the allocations of CuPy and PyTorch (``"cuda"``), or of NumPy (``"cpu"``, which slows Python down).

    Yields
    ------
    SimpleNamespace
        Its ``bytes`` at the peak, beyond those in use at the start, once the work is done.  On a GPU the sum of both
        allocators' peaks: exact where only one of them allocates meanwhile.

    Examples
    --------
    >>> import numpy as np
    >>> with peak("cpu") as found:
    ...     _ = np.ones(1 << 20, np.uint8)
    >>> found.bytes >> 20
    1
    """
    found = SimpleNamespace(bytes=0)
    if device != "cuda":
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        try:
            yield found
            found.bytes = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        return
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    hook = _hook()
    with hook:
        yield found
    found.bytes = hook.most + (torch.cuda.max_memory_allocated() - before if torch is not None else 0)


def _hook():
    """Return a CuPy memory hook that keeps the most bytes in use at a time."""
    import cupy

    class Hook(cupy.cuda.MemoryHook):
        name = "peak"
        now = most = 0

        def malloc_postprocess(self, **block):
            self.now += block["mem_size"]
            self.most = max(self.most, self.now)

        def free_postprocess(self, **block):
            self.now -= block["mem_size"]

    return Hook()
