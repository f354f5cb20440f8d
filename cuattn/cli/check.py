"""The self-check: forward and backward of a handful of cases on one device, against the textbook."""

import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cuattn
from cuattn import masks, rng
from cuattn.errors import UnsupportedError
from cuattn.reference import textbook

__all__ = ["CASES", "Case", "Row", "check", "show"]

HEADS, LENGTH, HEAD_DIM = 4, 389, 64  # a length that is a multiple of no tile
RATE_HEADS = 8
RATE_LENGTH = {"cpu": 1024, "cuda": 8192}
REPEATS = {"cpu": 4, "cuda": 11}  # the first may compile
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
        From the sequence length to the keyword arguments of the API; with enable_gqa, heads are grouped in pairs.
    """

    name: str
    dtype: Any
    options: Callable[[int], dict] = lambda n: {}

    @property
    def title(self):
        """Name and dtype."""
        return f"{self.name}, {np.dtype(self.dtype)}"


class Row(NamedTuple):
    """What the check found for one case in one direction."""

    case: str
    direction: str
    worst: str = "-"  # the result with the largest error beside what is allowed
    error: str = "-"
    allowed: str = "-"
    ms: str = "-"
    gflops: str = "-"
    verdict: str = "ok"  # or "off", "failed", "not checked"
    message: str = ""


def _capped(n):
    return {"softcap": 5.0, "window": (n // 4, 8), "bias": np.sin(np.arange(n, dtype=np.float32))[None]}


def _shared(n):
    answers = [n // 8, n // 5, n - n // 4 - n // 8 - n // 5]
    return {"mask": masks.share_question([(n // 4, answers)]), "enable_gqa": True}


CASES = (
    Case("no mask", np.float32),
    Case("no mask", np.float64),
    Case("causal", np.float16, lambda n: {"is_causal": True}),
    Case("causal", ml_dtypes.bfloat16, lambda n: {"is_causal": True}),
    Case("causal documents", ml_dtypes.bfloat16, lambda n: {"mask": masks.causal_document([n // 3, n - n // 3])}),
    Case("shared question, grouped heads", np.float16, _shared),
    Case("dropout 0.1", ml_dtypes.bfloat16, lambda n: {"dropout_p": 0.1}),
    Case("bias, softcap, window", np.float32, _capped),
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
    aside = Console(stderr=True)
    bar = track(cases, "Self-check", console=aside, transient=True, disable=not aside.is_terminal)
    rows = [row for case in bar for row in check(case, device)]
    title = (
        f"Self-check on {device.backend}: errors at {HEADS} heads x {LENGTH} x {HEAD_DIM} against a textbook "
        f"computation in higher precision, ms and GFLOP/s at {RATE_HEADS} x {RATE_LENGTH[device.backend]} x {HEAD_DIM}"
    )
    table = Table(*Row._fields[:-1], title=title, title_justify="left")
    for row in rows:
        table.add_row(*row[:-1])
    console.print(table)
    for row in rows:
        if row.message:
            console.print(f"{row.case}: {row.verdict}: {row.message}", style="red", markup=False, soft_wrap=True)
    verdicts = [row.verdict for row in rows]
    bad = verdicts.count("off") + verdicts.count("failed")
    if bad or "ok" not in verdicts:
        console.print(f"{bad} of {len(rows)} checks are off", style="bold red")
        return 1
    console.print(f"all {verdicts.count('ok')} checks are within twice the textbook's own error plus one rounding")
    return 0


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
    try:
        if case.dtype is np.float64 and not textbook.EXTENDED:
            raise UnsupportedError("long double is float64 here: nothing to compare with")
        problem, forward, backward = _calls(case, HEADS, LENGTH, device)
        fwd = forward()
        results = {"forward": {"o": fwd.o, "lse": fwd.lse}, "backward": backward(fwd)._asdict()}
        exact, rounded = (_textbook(problem, low) for low in (None, np.dtype(case.dtype)))
        rates = _rates(case, device)
    except Exception as error:  # whatever goes wrong here is what the user runs this command to learn
        verdict = "not checked" if isinstance(error, UnsupportedError) else "failed"
        return [Row(case.title, "both", verdict=verdict, message=f"{type(error).__name__}: {error}")]
    rows = []
    for direction, arrays in results.items():
        arrays = {name: device.fetch(value) for name, value in arrays.items() if value is not None}
        name, error, limit = _worst(arrays, exact, rounded)
        verdict = "ok" if error <= limit else "off"
        rows.append(Row(case.title, direction, name, f"{error:.1e}", f"{limit:.1e}", *rates[direction], verdict))
    return rows


def _calls(case, heads, n, device):
    """Return the arrays and options of a case, and two functions: forward, and backward of a forward's result."""
    generator, options = np.random.default_rng(n), case.options(n)
    kv_heads = heads // 2 if "enable_gqa" in options else heads
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "do": heads}
    problem = {name: generator.standard_normal((h, n, HEAD_DIM)).astype(case.dtype) for name, h in shapes.items()}
    problem |= options
    there = {name: device.put(value) if isinstance(value, np.ndarray) else value for name, value in problem.items()}
    q, k, v, do = (there.pop(name) for name in shapes)
    return (
        problem,
        lambda: cuattn.forward(q, k, v, rng=STATE, **there),
        lambda fwd: cuattn.backward(do, q, k, v, fwd, **there),
    )


def _visible(problem):
    """Return what the mask, causality and the window let through together, (n, n) booleans."""
    n = problem["q"].shape[1]
    i, j = np.ogrid[:n, :n]
    left, right = problem.get("window", (n, 0 if problem.get("is_causal") else n))
    visible = (i - left <= j) & (j <= i + right)
    return visible & problem["mask"].dense() if "mask" in problem else visible


def _textbook(problem, low):
    """Return the textbook's results by name: exact (low=None), or with every step rounded to `low`."""
    heads, n, _ = problem["q"].shape
    level = rng.threshold(problem.get("dropout_p", 0))
    solution = textbook.solve(
        *(problem[name] for name in ("q", "k", "v", "do")),
        visible=_visible(problem),
        keep=np.stack([rng.keep(STATE, level, head, (0, n), (0, n)) for head in range(heads)]),
        keep_scale=rng.LEVELS / (rng.LEVELS - level),
        bias=problem.get("bias"),
        softcap=problem.get("softcap"),
        low=low,
    )
    return {**solution._asdict(), "lse": solution.m + np.log(solution.l)}


def _worst(results, exact, rounded):
    """Return which of several results is the furthest beyond what is accepted, its error, and what is accepted.

    That is twice the textbook's own error, plus one rounding of the largest value.
    """
    rows = []
    for name, value in results.items():
        right, eps = exact[name], float(ml_dtypes.finfo(value.dtype).eps)
        limit = 2 * np.abs(rounded[name] - right).max() + eps * np.abs(right).max()
        error = np.nan_to_num(np.abs(value.astype(right.dtype) - right), nan=np.inf, posinf=np.inf).max()
        rows.append((error / limit, name, error, limit))
    return max(rows)[1:]


def _rates(case, device):
    """Return the milliseconds and the GFLOP/s of each direction, written out, at the size for rates."""
    problem, forward, backward = _calls(case, RATE_HEADS, RATE_LENGTH[device.backend], device)
    fwd = forward()
    pairs = RATE_HEADS * np.count_nonzero(_visible(problem))
    rates = {}
    for direction, call, products in (("forward", forward, 2), ("backward", lambda: backward(fwd), 5)):
        seconds = min(timeit.repeat(lambda: device.finish(call()), number=1, repeat=REPEATS[device.backend]))  # noqa: B023
        rates[direction] = f"{seconds * 1e3:8.2f}", f"{2 * products * HEAD_DIM * pairs / seconds / 1e9:8.1f}"
    return rates
