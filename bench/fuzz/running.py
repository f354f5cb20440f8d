"""Compute one problem with the library and hold everything that comes back against the textbook.

The library gets arrays on the device; what it returns is judged on the host.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import cuattn
from bench.fuzz import tangents
from cuattn.errors import UnsupportedError
from cuattn.reference.textbook import sum_heads
from tests import oracle
from tests.tolerances import judge

__all__ = ["Outcome", "Target", "lay", "run"]

TURNS = {
    "fortran": lambda x: x.T,
    "negative": lambda x: x[..., ::-1, :],
    "swapped": lambda x: x.swapaxes(-3, -2) if x.ndim > 2 else x,
}
RESULTS = ("o", "l", "m"), ("dq", "dk", "dv", "dbias")


@dataclass
class Outcome:
    """What became of a problem; `plain` names results beyond twice the textbook's error, `worst` their shares."""

    features: list[str] = field(default_factory=list)
    complaints: list[tuple[str, str]] = field(default_factory=list)
    refused: str | None = None
    kernels: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


class Target(NamedTuple):
    """Where problems run: NumPy on the CPU or CuPy on a GPU ("cuda"), and with which kernel family."""

    device: str
    kernel: str | None = None

    def put(self, x, kind=None):
        """Copy an array, with strides of some kind, to where it is computed with; its bits, for CuPy's sake."""
        if not isinstance(x, np.ndarray):
            return x
        if self.device == "cpu":
            return lay(np.asarray, x, kind)
        import cupy

        return lay(cupy.asarray, x.view(f"u{x.itemsize}"), kind).view(x.dtype)

    def get(self, x):
        """Return a result on the host."""
        return x.view(f"u{x.itemsize}").get().view(x.dtype) if hasattr(x, "get") else x


def lay(put, x, kind):
    """Return the array that `put` makes of a copy, with strides of some kind where there are enough axes."""
    if x.ndim < 2 or not x.size:
        return put(x)
    if kind in TURNS:
        return TURNS[kind](put(TURNS[kind](x).copy()))
    if kind == "unaligned":
        return put(np.append(x.dtype.type(0), x))[1:].reshape(x.shape)
    if kind == "step":
        return put(x.repeat(2, -2))[..., ::2, :]
    if kind == "spread" and (x == x[:1]).all():
        return np.broadcast_to(put(x[:1].copy()), x.shape)
    return put(x)


def run(problem, target):
    """Run a problem; what sm90 refuses runs on the plan's choice.  Any other error than UnsupportedError is raised."""
    outcome = Outcome(sorted(problem.features))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _Run(problem, target, outcome).check()
    except UnsupportedError as error:
        if target.kernel == "sm90":
            outcome = run(problem, Target(target.device))
        else:
            outcome.complaints.append(("refused", str(error)))
        outcome.refused = str(error)
    return outcome


class _Run:
    def __init__(self, problem, target, outcome):
        self.problem, self.target, self.outcome = problem, target, outcome
        self.host = _poisoned(problem)
        if self.host is not problem.arrays:
            outcome.features.append("poison")
        self.given = {name: target.put(x, problem.layouts.get(name)) for name, x in self.host.items()}
        mask = target.put(problem.mask, problem.layouts.get("mask"))
        if target.device == "cuda" and "mask on the device" in problem.checks and hasattr(mask, "to_device"):
            mask = mask.to_device()
        grad_dtype = problem.options.get("out_dtype") if "gradients in out_dtype" in problem.checks else None
        self.options = {**problem.options, "mask": mask, "kernel": target.kernel}
        self.options["score_args"] = tuple([target.put(x) for x in problem.options.get("score_args", ())])
        self.score = None
        self.backward = {"deterministic": False, "out_dtype": grad_dtype}

    def check(self):
        fwd = self._forward()
        self._solve(fwd.rng_state)
        self._judge(RESULTS[0], fwd[:3])
        self._check_sums(fwd)
        self._gradients(fwd)
        if "tangents" in self.problem.checks and self.score is None and "values large" not in self.problem.features:
            tangents.check(self, fwd.rng_state)
        if self.problem.parts:
            self._parts(fwd.rng_state)

    def complain(self, *complaint):
        self.outcome.complaints.append(complaint)

    def _call(self, function, *more, **options):
        """Call a function of the API with those of the problem's arrays and options that it takes."""
        taken = _parameters(function)
        options = {**self.given, **self.options, **options}
        arrays = [options.pop(name) for name in ("do", "q", "k", "v") if name in taken]
        return function(*arrays, *more, **{name: value for name, value in options.items() if name in taken})

    def _forward(self):
        fwd = self._call(cuattn.forward)
        checks, known = self.problem.checks, fwd[:3]
        if fwd.rng_state is not None:
            self.options["rng"] = fwd.rng_state
        if "attention" in checks and "out_dtype" not in self.problem.options:
            self._same("attention and forward", known[:1], [self._call(cuattn.attention)])
        if "plan" in checks or self.target.device == "cuda":
            for direction in ("forward", "backward"):
                plan = self._call(cuattn.plan, direction=direction)
                self.outcome.kernels.append(f"{direction} {plan.kernel}")
                str(plan)
        self._other_ways("forward", known, cuattn.forward)
        return fwd

    def _gradients(self, fwd):
        grads = self._call(cuattn.backward, fwd, **self.backward)
        self._judge(RESULTS[1], grads, self.backward["out_dtype"])
        self._judge_scores(grads.dscore, self.backward["out_dtype"])
        if "deterministic" in self.problem.checks:
            more = {**self.backward, "deterministic": True}
            grads = self._call(cuattn.backward, fwd, **more)
            self._judge(RESULTS[1], grads, more["out_dtype"], " deterministic")
            self._judge_scores(grads.dscore, more["out_dtype"], " deterministic")
            self._other_ways("backward", grads, cuattn.backward, fwd, **more)

    def _other_ways(self, name, known, function, *more, **options):
        """Check that a second call, a ColumnMask as a boolean array and out= of any strides give the same bits."""
        if "twice" in self.problem.checks:
            self._same(f"{name} twice", known, self._call(function, *more, **options))
        mask, put = self.problem.mask, self.target.put
        if "boolean" in self.problem.checks and isinstance(mask, cuattn.ColumnMask):
            other = self._call(function, *more, **options, mask=put(mask.dense()))
            self._same(f"{name} of a boolean mask", known, other)
        if "out" in self.problem.checks:
            kinds = ("plain", "swapped", "negative", "step", "fortran", "unaligned")
            out = [
                None if x is None or n == len(name) % 5 else put(np.zeros(x.shape, x.dtype), kinds[(n + x.size) % 6])
                for n, x in enumerate(known)
            ]
            found = self._call(function, *more, **options, out=tuple(out))
            self._same(f"{name} with out=", known, found)
            if not all(x is None or x is y for x, y in zip(out, found, strict=False)):
                self.complain(name, "out= is not what is returned")

    def _solve(self, state):
        problem = self.problem
        arrays = dict(problem.arrays)
        operands = [arrays.pop(name) for name in ("q", "k", "v", "do")]
        more = {name: problem.options.get(name) for name in ("scale", "softcap")}
        more |= {**arrays, "visible": problem.visible}
        more |= oracle.dropped(state, problem.options.get("dropout_p", 0.0), problem.shape)
        # On a CPU float32 has float32's accuracy, whatever a caller permits.
        gpu = self.target.device == "cuda"
        formats = {"precision": problem.options.get("precision")} if gpu else {}
        if "score" in problem.options:
            taken = [problem.options[name] for name in ("score", "score_args")]
            self.score = more["score"] = oracle.Score(*taken, problem.shape)
        with np.errstate(all="ignore"):
            self.exact = oracle.solve(*operands, **more)
            self.rough = oracle.solve(*operands, **more, dtype=problem.dtype, **formats)
            halves = gpu and problem.dtype == np.float32
            self.floors = oracle.floors(self.exact, *operands, **more, halves=halves, **formats)

    def _judge_scores(self, gradients, dtype=None, tag=""):
        """Hold the gradients of a score function's arrays to the rule."""
        if self.score is None:
            return
        (q, k), scale = (self.problem.arrays[name] for name in "qk"), self.problem.options.get("scale")
        before = self.score.before(q, k, scale, self.problem.options.get("softcap"))
        judged = self.score.judged(map(self.target.get, gradients), before, self.exact, self.rough, self.floors)
        for n, (actual, exact, rough, floor) in enumerate(judged):
            if exact is None or not exact.size:
                continue
            self._verdict(
                f"dscore[{n}]", actual, (exact, rough, floor), dtype or self.problem.options["score_args"][n].dtype, tag
            )

    def _judge(self, names, results, dtype=None, tag=""):
        """Hold results to the rule; `dtype` is what gradients, or all the results of parts, were asked for in."""
        problem = self.problem
        dtypes = {"o": problem.options.get("out_dtype"), "l": problem.stat_dtype, "m": problem.stat_dtype}
        for name, actual in zip(names, map(self.target.get, results), strict=True):
            exact = getattr(self.exact, name)
            if actual is None and exact is None:
                continue
            operand = problem.arrays["bias" if name == "dbias" else "q"]
            wanted = dtype or dtypes.get(name) or operand.dtype
            self._verdict(name, actual, (exact, getattr(self.rough, name), self.floors[name]), wanted, tag)

    def _verdict(self, name, actual, known, wanted, tag):
        """Hold one result to the rule, given the exact one, the textbook's and the floor."""
        exact, *others = known
        if (actual.shape, actual.dtype) != (exact.shape, wanted):
            return self.complain(name + tag, f"{actual.dtype} {actual.shape}, expected {wanted} {exact.shape}")
        verdict = judge(name, actual, exact, *others, self.problem.dtype)
        self.outcome.worst[name] = max(self.outcome.worst.get(name, 0.0), verdict.share)
        if verdict.plain > 1 >= verdict.share:
            self.outcome.plain.append(name)
        if not verdict.share <= 1:
            text = f"error {verdict.error:.3g}, allowed {verdict.allowed:.3g} ({verdict.share:.3g} times)"
            self.complain(name + tag, text)

    def _check_sums(self, fwd):
        """Check what holds for scores of any size: 1 <= l <= the visible keys."""
        l, unit = self.target.get(fwd.l), 2.0**-10
        low = np.where(np.isfinite(self.exact.m), 1 - unit, 0)
        high = (self.exact.s > -np.inf).sum(-1) * (1 + unit)
        if not ((l >= low) & (l <= high) | np.isnan(self.exact.l)).all():
            self.complain("l", f"not in [1, visible keys]: {l.min()} {l.max()}")

    def _parts(self, state):
        """Compute it in shards: merged, they are the whole."""
        problem, sums = self.problem, self.problem.stat_dtype
        exact = {name: getattr(self.exact, name) for name in itertools.chain(*RESULTS)}
        total = {name: np.zeros(x.shape, sums) for name, x in exact.items() if x is not None}
        states, scored = set(), {}

        def add(part, names, results):
            for name, x in zip(names, results, strict=True):
                if x is not None:
                    total[name][part.index(name, total[name])] += self.target.get(x)

        for parts in problem.parts:
            options = [self._cut(part) for part in parts]
            forwards = [self._call(cuattn.forward, **each) for each in options]
            merged = cuattn.merge(*forwards)
            states.add(merged.rng_state)
            add(parts[0], RESULTS[0], merged[:3])
            for part, each, fwd in zip(parts, options, forwards, strict=True):
                grads = self._call(cuattn.backward, merged._replace(rng_state=fwd.rng_state), **each)
                add(part, RESULTS[1], grads)
                for n, x in enumerate(grads.dscore):
                    scored[n] = None if x is None else scored.get(n, 0) + self.target.get(x)
        if problem.dtype == np.float64 and "bias" in problem.arrays and problem.arrays["bias"].dtype == np.float32:
            del total["dbias"]  # each part's gradient is rounded
        self._judge(total, total.values(), sums, " of shards")
        if problem.dtype != np.float64:  # whose parts' gradients may be rounded
            self._judge_scores(scored.values(), sums, " of shards")
        if states != {state}:
            self.complain("rng_state of shards", f"{states}, expected {state}")

    def _cut(self, part):
        """Return the arrays and options of a part."""
        problem, put = self.problem, self.target.put
        arrays = {name: put(x[part.index(name, x)]) for name, x in self.host.items()}
        mask = self.options["mask"]
        if isinstance(problem.mask, np.ndarray):
            mask = put(problem.mask[part.index("mask", problem.mask)])
        elif mask is not None:
            mask = mask.restrict(part.cuts["r"], part.cuts["k"])
        return {**arrays, "mask": mask, "origin": part.origin(problem.shape), "out_dtype": problem.stat_dtype}

    def _same(self, name, first, second):
        for a, b in zip(map(self.target.get, first), map(self.target.get, second), strict=False):
            if a is not None and b is not None and a.tobytes() != b.tobytes():
                self.complain(name, f"{np.count_nonzero(a != b)} of {a.size} numbers differ")


@functools.cache
def _parameters(function):
    return frozenset(inspect.signature(function).parameters)


def _poisoned(problem):
    """Return the arrays with something bad in all that nothing may see."""
    arrays, seen, bias = problem.arrays, problem.visible, problem.arrays.get("bias")
    if bias is not None and bias.shape[-2] == 1:
        seen = bias > -np.inf if seen is None else seen & (bias > -np.inf)
    if problem.poison is None or seen is None:
        return arrays
    seen = np.broadcast_to(seen, problem.shape)
    rows, keys = (seen.any(axis)[..., None].astype(int) for axis in (-1, -2))
    alive = {"q": rows, "do": rows, "k": keys, "v": keys}
    hidden = {name: sum_heads(some, (*arrays[name].shape[:-1], 1)) == 0 for name, some in alive.items()}
    return arrays | {
        name: np.where(x, arrays[name].dtype.type(problem.poison), arrays[name]) for name, x in hidden.items()
    }
