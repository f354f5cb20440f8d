"""What every runner has in common: a name, what it cannot run and why, and a bound call."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from bench.mask_samples import KINDS

HALF = ("float16", "bfloat16")
ALL = (*HALF, "float32", "float64")
DOCUMENTS = ("document", "causal_document")
BANDS = ("full", "causal")
EVERY = (*KINDS, "random")


@dataclass
class Bound:
    """A runner bound to the arrays of one case: nothing but the call is left to do.

    Attributes
    ----------
    call : callable
        Enqueues the work; what it returns is dropped when timed.
    convert : callable
        Turns what `call` returned into the direction's results, o and dq, dk, dv, each (B, H, N, d); others may follow.
    scope : callable
        Makes a context manager that has to be active around calls.
    plan : str
        How the runner says it will run.
    alone : bool
        The call works on a stream of its own and waits for it.
    exact : bool
        The results are those of the case.
    """

    call: Callable[[], Any]
    convert: Callable[[Any], Iterable[Any]]
    scope: Callable[[], Any] = field(default=contextlib.nullcontext)
    plan: str = ""
    alone: bool = False
    exact: bool = True


class Runner:
    """One way to compute attention.

    Attributes
    ----------
    name : str
        How rows call it.
    ours : bool
        Whether it is cuattn, and not a peer.
    compile_seconds : float
        What compiling for a new kind of problem takes, about; 0 where nothing compiled outlives the process.
    package : str
        What must be installed.
    masks, dtypes : tuple of str
        What it takes; `takes` says what becomes of other masks.
    scores : tuple of str
        Functions of `bench.score_samples` that it takes.
    learned : bool
        Whether it differentiates the arrays that they read.
    largest : int
        Head dimension.
    dropout, deterministic, grouped, host : bool
        Whether it can drop, has bitwise reproducible gradients, takes grouped heads, can be timed on the host.
    scores_bytes : float
        Of the largest score matrix that it may make, in the dtype of its sums.
    """

    name = package = ""
    ours = False
    compile_seconds = 0.0
    masks, takes = BANDS, "takes a mask only as an N x N matrix"  # which no runner makes
    dtypes = ALL
    scores: tuple[str, ...] = ()
    learned = True
    largest = 1024
    dropout = deterministic = grouped = host = True
    scores_bytes = float("inf")

    def __init__(self, name=""):
        self.name = name or self.name

    def unsupported_reason(self, case):
        """Return why a case cannot be run, or None."""
        item = 8 if case.dtype == "float64" else 4
        scores = case.batch * case.heads * case.n_queries * case.n_keys * item
        refused = {
            f"{self.package} is not installed": self.package and not installed(self.package),
            self.takes: case.kind not in self.masks,
            f"takes no function {case.score}": case.score is not None and case.score not in self.scores,
            "has no gradients of arrays": case.learned and case.direction != "forward" and not self.learned,
            f"does not compute in {case.dtype}": case.dtype not in self.dtypes,
            f"head dimension at most {self.largest}": case.head_dim > self.largest,
            "has no dropout": case.dropout and not self.dropout,
            "has no deterministic backward": case.deterministic and not self.deterministic,
            "needs as many key heads as query heads": case.heads != case.kv_heads and not self.grouped,
            "waits for its own stream in every call": case.host and not self.host,
            f"would make score matrices of {scores >> 30} GiB each": scores > self.scores_bytes,
        }
        return next((reason for reason, holds in refused.items() if holds), None)

    def bind(self, case, inputs):
        """Prepare a case: compile, convert masks, run the forward that a backward needs."""
        raise NotImplementedError

    def close(self):
        """Free what the last case left behind."""


def installed(package):
    """Return whether a package can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
