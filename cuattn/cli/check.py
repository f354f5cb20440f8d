"""The self-check: forward and backward of a handful of cases on one device, against the textbook."""

import timeit
from collections import Counter

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import cuattn
from cuattn import masks, rng
from cuattn.errors import UnsupportedError
from cuattn.masks.constructors import kept_band
from cuattn.reference import textbook

HEADS, LENGTH, HEAD_DIM = 4, 389, 64  # a length that is a multiple of no tile
RATE_HEADS = 8
RATE_LENGTH = {"cpu": 1024, "cuda": 8192}
REPEATS = 6  # the first may compile
STATE = cuattn.RNGState(20220527, 1)
# error: the largest beside what is allowed; verdict: ok, off, failed or skipped
COLUMNS = ("case", "direction", "error", "allowed", "ms", "GFLOP/s", "verdict")
DIRECTIONS = {"forward": (2, ("o", "lse")), "backward": (5, ("dq", "dk", "dv", "dbias"))}  # products, results
CASES = (  # one of `_options`, and the dtype of the arrays
    "no mask, float32",
    "no mask, float64",
    "causal, float16",
    "causal, bfloat16",
    "causal documents, bfloat16",
    "shared question, GQA, float16",
    "dropout 0.1, bfloat16",
    "bias, softcap, window, float32",
)


def _options(n):
    """Return the keyword arguments of the API in each configuration, at a sequence length, by name."""
    answers = [n // 8, n // 5, n - n // 4 - n // 8 - n // 5]
    bias = np.sin(np.arange(n, dtype=np.float32))[None]
    return {
        "no mask": {},
        "causal": {"is_causal": True},
        "causal documents": {"mask": masks.causal_document([n // 3, n - n // 3])},
        "shared question, GQA": {"mask": masks.share_question([(n // 4, answers)]), "enable_gqa": True},
        "dropout 0.1": {"dropout_p": 0.1},
        "bias, softcap, window": {"softcap": 5.0, "window": (n // 4, 8), "bias": bias},
    }


def show(console, device, cases=CASES):
    """Run the check and print it.

    Parameters
    ----------
    console : rich.console.Console
        Where to print the results; progress goes to standard error.
    device : Device
        Where to compute.
    cases : sequence of str, optional
        What to compute.

    Returns
    -------
    int
        0 when every result is as close to the exact one as it has to be, else 1.
    """
    aside = Console(stderr=True)
    bar = track(cases, "Self-check", console=aside, transient=True, disable=not aside.is_terminal)
    rows = [row for case in bar for row in check(case, device)]
    console.print("Self-check", style="bold")
    table = Table(*COLUMNS[:2], box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="underline")
    for name in COLUMNS[2:-1]:
        table.add_column(name, justify="right")
    table.add_column("")  # ok, or what is wrong
    for *row, message in rows:
        table.add_row(*row, style="red" if message else None)
    console.print(table)
    length = RATE_LENGTH[device.backend]
    console.print(
        f"On {device.backend}. Errors: {HEADS} heads x {LENGTH} x {HEAD_DIM}, against a textbook computation in higher "
        f"precision; times: {RATE_HEADS} x {length} x {HEAD_DIM}."
    )
    for case, *_, verdict, message in rows:
        if message:
            console.print(f"{case}: {verdict}: {message}", style="red", markup=False, soft_wrap=True)
    verdicts = Counter(row[-2] for row in rows)
    bad = verdicts["off"] + verdicts["failed"]
    if bad or not verdicts["ok"]:
        console.print(f"{bad} of {len(rows)} checks are off", style="bold red")
        return 1
    console.print(
        f"all {verdicts['ok']} checks are ok: no error is beyond twice that of the textbook's formula in the same "
        "dtype, plus one rounding",
        style="green",
    )
    return 0


def check(case, device):
    """Check and time one case.

    Parameters
    ----------
    case : str
        What to compute: one of `CASES`.
    device : Device
        Where.

    Returns
    -------
    list of tuple of str
        The columns of the table and a message, for forward and backward or in one row that says why there is no result.
    """
    rows = []
    try:
        if case.endswith("float64") and not textbook.EXTENDED:
            raise UnsupportedError("long double is float64 here: nothing to compare with")
        arrays, options, visible = _problem(case, HEADS, LENGTH)
        exact, rounded = (_textbook(arrays, options, visible, low) for low in (None, arrays[0].dtype))
        calls = _calls(arrays, options, device)
        arrays, options, visible = _problem(case, RATE_HEADS, RATE_LENGTH[device.backend])
        flops = 2 * HEAD_DIM * RATE_HEADS * np.count_nonzero(visible)  # of one product
        timed = _calls(arrays, options, device)
        for direction, (products, names) in DIRECTIONS.items():
            result = calls[direction]()
            results = {name: device.fetch(getattr(result, name)) for name in names if exact[name] is not None}
            name, error, limit = _worst(results, exact, rounded)
            seconds = min(timeit.repeat(timed[direction], number=1, repeat=REPEATS))
            rates = f"{seconds * 1e3:.2f}", f"{products * flops / seconds / 1e9:.1f}"
            verdict, message = ("ok", "") if error <= limit else ("off", f"{direction}, {name}")
            rows.append((case, direction, f"{error:.1e}", f"{limit:.1e}", *rates, verdict, message))
    except Exception as error:  # whatever goes wrong here is what the user runs this command to learn
        verdict = "skipped" if isinstance(error, UnsupportedError) else "failed"
        return [(case, "both", *"----", verdict, f"{type(error).__name__}: {error}")]
    return rows


def _problem(case, heads, n):
    """Return (q, k, v, do) of a case, its options, and what these let through together, (n, n) booleans."""
    name, dtype = case.rsplit(", ", 1)
    options = _options(n)[name]
    q, k, v, do = np.random.default_rng(n).standard_normal((4, heads, n, HEAD_DIM)).astype(dtype)
    if "enable_gqa" in options:
        k, v = k[: heads // 2], v[: heads // 2]
    band = kept_band(n, n, *options.get("window", (None, 0 if "is_causal" in options else None)))
    visible = options.get("mask", band).dense()
    return (q, k, v, do), options, visible


def _calls(arrays, options, device):
    """Return a function for each direction, which waits for its results; the backward is of one forward."""
    q, k, v, do = map(device.put, arrays)
    options = {name: device.put(value) if name == "bias" else value for name, value in options.items()}
    fwd = cuattn.forward(q, k, v, rng=STATE, **options)
    return {
        "forward": lambda: device.finish(cuattn.forward(q, k, v, rng=STATE, **options)),
        "backward": lambda: device.finish(cuattn.backward(do, q, k, v, fwd, **options)),
    }


def _textbook(arrays, options, visible, low):
    """Return the textbook's results by name: exact (low=None), or with every step rounded to `low`."""
    level, whole = rng.threshold(options.get("dropout_p", 0)), (0, len(visible))
    solution = textbook.solve(
        *arrays,
        visible=visible,
        keep=np.stack([rng.keep(STATE, level, head, whole, whole) for head in range(len(arrays[0]))]),
        keep_scale=rng.LEVELS / (rng.LEVELS - level),
        bias=options.get("bias"),
        softcap=options.get("softcap"),
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
