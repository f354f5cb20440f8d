"""The self-check: forward and backward of a handful of cases on one device, against the textbook."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import cuattn
from cuattn import masks, rng
from cuattn.errors import UnsupportedError
from cuattn.reference import textbook

__all__ = ["CASES", "Case", "Row", "check", "show"]

HEADS, LENGTH, HEAD_DIM = 4, 389, 64  # a length that is a multiple of no tile
RATE_HEADS = 8
RATE_LENGTH = {"cpu": 1024, "cuda": 8192}
REPEATS = {"cpu": 3, "cuda": 10}
STATE = cuattn.RNGState(20220527, 1)


class Case(NamedTuple):
    """One configuration.

    Attributes
    ----------
    name : str
        What it exercises.
    dtype : type
        Of the arrays.
    options : callable
        From the sequence length to the keyword arguments of the API.
    group : int
        Query heads per key and value head.
    bias : bool
        Whether there is a bias.
    """

    name: str
    dtype: Any
    options: Callable[[int], dict] = lambda n: {}
    group: int = 1
    bias: bool = False

    @property
    def title(self):
        """Name and dtype."""
        return f"{self.name}, {np.dtype(self.dtype)}"


class Row(NamedTuple):
    """What the check found for one case in one direction."""

    case: str
    direction: str
    verdict: str  # "ok", "off", "failed", "not supported" or "not checked"
    result: str = ""
    error: float = float("nan")
    limit: float = float("nan")
    seconds: float = float("nan")
    gflops: float = float("nan")
    message: str = ""


def _documents(n):
    return [n // 3, n // 4, n - n // 3 - n // 4]


def _answers(n):
    return [(n // 4, [n // 8, n // 8]), (n // 8, [n - n // 4 - 3 * (n // 8)])]


CASES = (
    Case("no mask", np.float32),
    Case("no mask", np.float64),
    Case("causal", np.float16, lambda n: {"is_causal": True}),
    Case("causal", ml_dtypes.bfloat16, lambda n: {"is_causal": True}),
    Case("causal documents", ml_dtypes.bfloat16, lambda n: {"mask": masks.causal_document(_documents(n))}),
    Case("shared question, grouped heads", np.float16, lambda n: {"mask": masks.share_question(_answers(n))}, group=2),
    Case("dropout 0.1", ml_dtypes.bfloat16, lambda n: {"dropout_p": 0.1}),
    Case("bias, softcap, window", np.float32, lambda n: {"softcap": 5.0, "window": (n // 4, 8)}, bias=True),
)


def show(console, device, cases=CASES):
    """Run the check and print it.

    Parameters
    ----------
    console : rich.console.Console
        Where to print the results; progress goes to standard error.
    device : Device
        Where to compute.
    cases : sequence of Case, optional
        What to compute.

    Returns
    -------
    int
        0 when every result is as close to the exact one as it has to be, else 1.
    """
    rows = [row for case in _progress(cases) for row in check(case, device)]
    title = (
        f"Self-check on {device.backend}: errors at {HEADS} heads x {LENGTH} x {HEAD_DIM} against a textbook "
        f"computation in higher precision, rates at {RATE_HEADS} x {RATE_LENGTH[device.backend]} x {HEAD_DIM}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(("case", "direction", "worst", "error", "allowed", "ms", "GFLOP/s", "verdict")):
        table.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        numbers = [f"{row.error:.1e}", f"{row.limit:.1e}", f"{row.seconds * 1e3:.2f}", f"{row.gflops:.1f}"]
        cells = ["-" if cell == "nan" else cell for cell in numbers]
        table.add_row(row.case, row.direction, row.result, *cells, row.verdict)
    console.print(table)
    for row in rows:
        if row.message:
            text = f"{row.case}, {row.direction}: {row.verdict}: {row.message}"
            console.print(text, style="red", markup=False, soft_wrap=True)
    bad = sum(row.verdict in ("off", "failed") for row in rows)
    good = sum(row.verdict == "ok" for row in rows)
    if bad or not good:
        console.print(f"{bad} of {len(rows)} checks are off", style="bold red")
        return 1
    console.print(f"all {good} checks are within twice the textbook's own error plus one rounding", style="green")
    return 0


def _progress(cases):
    """Yield the cases under a progress bar that names the one being worked on."""
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(task, description=case.title)
            yield case
            bar.advance(task)


def check(case, device):
    """Check and time one case.

    Parameters
    ----------
    case : Case
        What to compute.
    device : Device
        Where.

    Returns
    -------
    list of Row
        Forward and backward, or one row that says why there is no result.
    """
    if case.dtype is np.float64 and not textbook.EXTENDED:
        return [Row(case.title, "both", "not checked", message="long double is float64 here: nothing to compare with")]
    try:
        problem = _problem(case, HEADS, LENGTH)
        forward, backward = _calls(problem, device)
        fwd = forward()
        results = {"forward": {"o": fwd.o, "lse": fwd.lse}, "backward": backward(fwd)._asdict()}
        exact, rounded = (_textbook(problem, low) for low in (None, np.dtype(case.dtype)))
        seconds, counts = _rates(case, device)
    except UnsupportedError as error:
        return [Row(case.title, "both", "not supported", message=str(error))]
    except Exception as error:  # whatever goes wrong here is what the user runs this command to learn
        return [Row(case.title, "both", "failed", message=f"{type(error).__name__}: {error}")]
    rows = []
    for direction, arrays in results.items():
        arrays = {name: device.fetch(value) for name, value in arrays.items() if value is not None}
        result, error, limit = _worst(arrays, exact, rounded)
        verdict, time_ = "ok" if error <= limit else "off", seconds[direction]
        rows.append(Row(case.title, direction, verdict, result, error, limit, time_, counts[direction] / time_ / 1e9))
    return rows


def _problem(case, heads, n):
    """Return the arrays and options of a case, as keyword arguments."""
    generator = np.random.default_rng(n)
    shapes = {"q": heads, "k": heads // case.group, "v": heads // case.group, "do": heads}
    arrays = {name: generator.standard_normal((h, n, HEAD_DIM)).astype(case.dtype) for name, h in shapes.items()}
    options = {"enable_gqa": case.group > 1, **case.options(n)}
    if case.bias:
        options["bias"] = generator.standard_normal((heads, 1, n)).astype(case.dtype)
    return {**arrays, **options}


def _calls(problem, device):
    """Return two functions of no argument: forward, and backward of a forward's result."""
    problem = {key: device.put(value) if isinstance(value, np.ndarray) else value for key, value in problem.items()}
    q, k, v, do = (problem.pop(name) for name in ("q", "k", "v", "do"))
    state = STATE if "dropout_p" in problem else None
    return (
        lambda: cuattn.forward(q, k, v, rng=state, **problem),
        lambda fwd: cuattn.backward(do, q, k, v, fwd, **problem),
    )


def _visible(problem, n):
    """Return what the mask, causality and the window let through together, (n, n) booleans."""
    i, j = np.ogrid[:n, :n]
    visible = problem["mask"].dense() if "mask" in problem else np.ones((n, n), bool)
    if problem.get("is_causal"):
        visible = visible & (j <= i)
    if "window" in problem:
        left, right = problem["window"]
        visible = visible & (i - left <= j) & (j <= i + right)
    return visible


def _textbook(problem, low):
    """Return the textbook's results by name: exact (low=None), or with every step rounded to `low`."""
    heads, n, _ = problem["q"].shape
    options = {"visible": _visible(problem, n), "bias": problem.get("bias"), "softcap": problem.get("softcap")}
    if "dropout_p" in problem:
        level = rng.threshold(problem["dropout_p"])
        options["keep"] = np.stack([rng.keep(STATE, level, head, (0, n), (0, n)) for head in range(heads)])
        options["keep_scale"] = rng.LEVELS / (rng.LEVELS - level)
    solution = textbook.solve(*(problem[name] for name in ("q", "k", "v", "do")), low=low, **options)
    with np.errstate(divide="ignore"):
        return {**solution._asdict(), "lse": solution.m + np.log(solution.l)}


def _worst(results, exact, rounded):
    """Return which of several results is the furthest beyond what is accepted, its error, and what is accepted.

    That is twice the textbook's own error, plus one rounding of the largest value.
    """
    rows = []
    for name, value in results.items():
        finite = np.abs(exact[name][np.isfinite(exact[name])])
        one_rounding = float(ml_dtypes.finfo(value.dtype).eps) * float(finite.max(initial=0))
        limit = 2 * _distance(rounded[name], exact[name]) + one_rounding
        error = _distance(value.astype(exact[name].dtype), exact[name])
        rows.append((error / limit if limit else np.inf if error else 0.0, name, error, limit))
    return max(rows)[1:]


def _distance(x, exact):
    """Return the largest absolute difference; infinity when one side is not a number."""
    with np.errstate(invalid="ignore"):
        difference = np.where(x == exact, 0, np.abs(x - exact))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0))


def _rates(case, device):
    """Return the seconds and the floating-point operations of each direction at the size for rates."""
    n = RATE_LENGTH[device.backend]
    problem = _problem(case, RATE_HEADS, n)
    forward, backward = _calls(problem, device)
    fwd = forward()
    seconds = {"forward": _time(forward, device), "backward": _time(lambda: backward(fwd), device)}
    pairs = RATE_HEADS * np.count_nonzero(_visible(problem, n))
    return seconds, {"forward": 4 * HEAD_DIM * pairs, "backward": 10 * HEAD_DIM * pairs}


def _time(call, device):
    """Return the least time of several calls, in seconds."""
    best = float("inf")
    for _ in range(REPEATS[device.backend] + 1):  # the first one may compile
        device.synchronize()
        start = time.perf_counter()
        call()
        device.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
