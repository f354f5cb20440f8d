"""Compute one problem with the library and hold everything that comes back against the textbook."""

from __future__ import annotations

import inspect
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cuattn
from bench.fuzz import sharding
from bench.fuzz.problems import Problem
from cuattn.errors import UnsupportedError
from cuattn.reference.textbook import Solution, sum_heads
from tests import oracle
from tests.tolerances import judge

__all__ = ["Outcome", "Target", "run"]


@dataclass
class Outcome:
    """What became of a problem."""

    features: list[str]
    complaints: list[tuple[str, str]] = field(default_factory=list)
    refused: str | None = None
    worst: dict[str, float] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)


class Target:
    """Where problems run: NumPy on the CPU or CuPy on a GPU, and with which kernel family."""

    def __init__(self, device: str, kernel: str | None = None) -> None:
        self.device, self.kernel = device, kernel
        self.xp: Any = np
        if device == "cuda":
            import cupy
            import cupyx.scipy.special  # noqa: F401  (the oracle's softmax)

            self.xp = cupy

    def put(self, x: Any) -> Any:
        """Copy an array to where it is computed with; its bits, for CuPy may not know its dtype."""
        if self.xp is np or not isinstance(x, np.ndarray):
            return x
        return self.xp.asarray(x.view(f"u{x.itemsize}")).view(x.dtype)


def run(problem: Problem, target: Target) -> Outcome:
    """Run a problem; whatever goes wrong is in the outcome."""
    outcome = Outcome(sorted(problem.features))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _Run(problem, target, outcome).check()
    except UnsupportedError as error:
        outcome.refused = str(error)
    except Exception as error:
        outcome.complaints.append((type(error).__name__, "".join(traceback.format_exception(error)[-6:])))
    return outcome


class _Run:
    def __init__(self, problem: Problem, target: Target, outcome: Outcome) -> None:
        self.problem, self.target, self.outcome, self.xp = problem, target, outcome, target.xp
        self.clean = {name: target.put(getattr(problem, name)) for name in ("q", "k", "v", "do", "bias", "dlse")}
        self.visible = target.put(problem.visible)
        self.given = {name: self._handed(name, x) for name, x in self._poisoned().items()}
        mask = self._handed("mask", problem.mask)
        if target.device == "cuda" and "mask on the device" in problem.checks and hasattr(mask, "to_device"):
            mask = mask.to_device()
        self.bias, self.dlse = self.given.pop("bias"), self.given.pop("dlse")
        self.options = {**problem.options, "mask": mask, "bias": self.bias}
        self.grad_dtype = problem.variant.out_dtype if "gradients in out_dtype" in problem.checks else None
        if target.kernel is not None:
            self.options["kernel"] = target.kernel

    def _handed(self, name: str, x: Any) -> Any:
        """Return an array as the library gets it: on the device, with the drawn strides."""
        kind = self.problem.layouts.get(name)
        return self.target.put(x) if kind is None else lay(self.xp, self.target.put(x), kind)

    def _poisoned(self) -> dict[str, Any]:
        """Return the arrays with something bad in all that nothing may see."""
        problem, seen = self.problem, self.problem.visible
        arrays = {name: getattr(problem, name) for name in self.clean}
        if problem.bias is not None and problem.bias.shape[-2] == 1:
            bare = problem.bias > -np.inf
            seen = bare if seen is None else seen & bare
        if problem.poison is None or seen is None:
            return arrays
        self.outcome.features.append("poison")
        seen = np.broadcast_to(seen, (*problem.lead, problem.q.shape[-2], problem.k.shape[-2]))
        rows, keys = (seen.any(axis)[..., None].astype(int) for axis in (-1, -2))
        for name, alive in (("q", rows), ("do", rows), ("k", keys), ("v", keys)):
            x = arrays[name]
            hidden = sum_heads(alive, (*x.shape[:-1], 1)) == 0
            arrays[name] = np.where(hidden, np.asarray(problem.poison, x.dtype), x)
        return arrays

    def check(self) -> None:
        fwd = self._forward()
        reference = self._reference(fwd)
        self._judge(("o", "l", "m"), fwd[:3])
        self._properties(fwd, reference)
        self._backward(fwd)
        if self.problem.plan is not None:
            self._parts(fwd)

    def _call(self, function: Any, *arrays: Any, **more: Any) -> Any:
        options = {**self.options, **more}
        taken = inspect.signature(function).parameters
        return function(*arrays, **{name: value for name, value in options.items() if name in taken})

    def _forward(self) -> Any:
        g = self.given
        fwd = self._call(cuattn.forward, g["q"], g["k"], g["v"])
        if fwd.rng_state is not None:
            self.options["rng"] = fwd.rng_state
        checks = self.problem.checks
        if "twice" in checks:
            self._same("forward twice", fwd[:3], self._call(cuattn.forward, g["q"], g["k"], g["v"])[:3])
        if "attention" in checks and self.problem.variant.out_dtype is None:
            self._same("attention and forward", fwd[:1], [self._call(cuattn.attention, g["q"], g["k"], g["v"])])
        if self._has_boolean_twin():
            dense = self.target.put(self.problem.mask.dense())
            other = self._call(cuattn.forward, g["q"], g["k"], g["v"], mask=dense)
            self._same("ColumnMask and boolean", fwd[:3], other[:3])
        if "out" in checks:
            self._fills("forward", fwd[:3], cuattn.forward, g["q"], g["k"], g["v"])
        if "plan" in checks:
            str(self._call(cuattn.plan, g["q"], g["k"], g["v"]))
        return fwd

    def _fills(self, name: str, known: Any, function: Any, *arrays: Any, **more: Any) -> None:
        """Check that out= is filled with the same bits, whatever its strides, and returned."""
        kinds = ("plain", "swapped", "negative", "step", "fortran", "unaligned")
        out = [
            None if x is None or n == len(name) % 5 else lay(self.xp, self.xp.zeros_like(x), kinds[(n + x.size) % 6])
            for n, x in enumerate(known)
        ]
        found = self._call(function, *arrays, out=tuple(out[: 3 if known[-1] is None else None]), **more)
        self._same(f"{name} with out=", known, found[: len(known)])
        if not all(given is None or given is x for given, x in zip(out, found, strict=False)):
            self.outcome.complaints.append((name, "out= is not what is returned"))

    def _reference(self, fwd: Any) -> Solution:
        c, problem = self.clean, self.problem
        keep, factor = problem.keep(fwd.rng_state)
        self.spelled_out = {
            "visible": self.visible, "bias": c["bias"], "scale": problem.variant.scale,
            "softcap": problem.variant.softcap, "keep": self.target.put(keep), "keep_scale": factor,
            "dlse": c["dlse"],
        }  # fmt: skip
        operands = (c["q"], c["k"], c["v"], c["do"])
        with np.errstate(all="ignore"):
            self.exact = oracle.solve(*operands, **self.spelled_out)
            precision, halves = None, False
            if self.target.device == "cuda":  # on a CPU float32 has float32's accuracy, whatever a caller permits
                precision, halves = problem.variant.precision, problem.variant.dtype == np.float32
            self.floors = oracle.floors(self.exact, *operands, **self.spelled_out, halves=halves, precision=precision)
            self.rough = oracle.solve(*operands, **self.spelled_out, dtype=problem.variant.dtype, precision=precision)
        return self.exact

    def _judge(self, names: Any, results: Any, tag: str = "", dtype: Any = None) -> None:
        stats = np.dtype(np.float64 if self.problem.variant.dtype == np.float64 else np.float32)
        for name, actual in zip(names, results, strict=True):
            exact = getattr(self.exact, name)
            if actual is None or exact is None:
                if (actual is None) != (exact is None):
                    self.outcome.complaints.append((name + tag, f"is {actual!r}"))
                continue
            wanted = stats if name in ("l", "m") else dtype or self._dtype_of(name)
            if (actual.shape, actual.dtype) != (exact.shape, wanted):
                message = f"{actual.dtype} {actual.shape}, expected {wanted} {exact.shape}"
                self.outcome.complaints.append((name + tag, message))
                continue
            dtype_in = self.problem.variant.dtype
            verdict = judge(name, actual, exact, getattr(self.rough, name), self.floors[name], dtype_in)
            self.outcome.worst[name] = max(self.outcome.worst.get(name, 0.0), verdict.share)
            if verdict.plain > 1 >= verdict.share:
                self.outcome.plain.append(name)
            if not verdict.share <= 1:
                text = f"error {verdict.error:.3g}, allowed {verdict.allowed:.3g} ({verdict.share:.3g} times)"
                self.outcome.complaints.append((name + tag, text))

    def _dtype_of(self, name: str) -> np.dtype:
        variant = self.problem.variant
        if name == "o":
            return variant.out_dtype or variant.dtype
        return self.grad_dtype or (variant.bias if name == "dbias" else variant.dtype)

    def _properties(self, fwd: Any, exact: Solution) -> None:
        """Check what holds for scores of any size: 1 <= l <= the visible keys, and o lies among the values."""
        xp, unit = self.xp, 2.0**-10
        seen = (exact.s > -np.inf).sum(-1)
        finite = xp.isfinite(exact.m)
        low, high = xp.where(finite, 1 - unit, 0), seen * (1 + unit)
        if fwd.l.size and not ((fwd.l >= low) & (fwd.l <= high) | xp.isnan(exact.l)).all():
            self.outcome.complaints.append(
                ("l", f"not in [1, visible keys]: {float(fwd.l.min())} {float(fwd.l.max())}")
            )

    def _backward(self, fwd: Any) -> None:
        g = self.given
        names, arrays = ("dq", "dk", "dv", "dbias"), (g["do"], g["q"], g["k"], g["v"])
        more = {"out_dtype": self.grad_dtype, "dlse": self.dlse}
        self._judge(names, self._call(cuattn.backward, *arrays, fwd, **more))
        if "deterministic" not in self.problem.checks:
            return
        more["deterministic"] = True
        first = self._call(cuattn.backward, *arrays, fwd, **more)
        self._judge(names, first, " deterministic")
        self._same("deterministic", first, self._call(cuattn.backward, *arrays, fwd, **more))
        if "out" in self.problem.checks:
            self._fills("backward", first, cuattn.backward, *arrays, fwd, **more)
        if self._has_boolean_twin():
            dense = self.target.put(self.problem.mask.dense())
            other = self._call(cuattn.backward, *arrays, fwd, **more, mask=dense)
            self._same("gradients of ColumnMask and boolean", first, other)

    def _has_boolean_twin(self) -> bool:
        """Whether the same mask as a boolean array must give the same bits; on a GPU, by a kernel that takes both."""
        own = "boolean" in self.problem.checks and isinstance(self.problem.mask, cuattn.ColumnMask)
        return own and (self.target.device == "cpu" or self.target.kernel == "sm80")

    def _parts(self, fwd: Any) -> None:
        """Compute it in shards: merged, they are the whole."""
        given = {**self.given, "bias": self.bias, "dlse": self.dlse}
        results, states = sharding.run_parts(
            self.problem.plan, self.problem, given, self.options, self.exact, self.xp, self._call
        )
        sums = results["l"].dtype
        if self.problem.variant.dtype == np.float64 != self.problem.variant.bias:
            results.pop("dbias", None)  # a float32 bias of float64 inputs: each part's gradient is rounded
        self._judge(results, results.values(), " of shards", sums)
        if states - {fwd.rng_state}:
            self.outcome.complaints.append(("rng_state of shards", f"{states}, expected {fwd.rng_state}"))

    def _same(self, name: str, first: Any, second: Any) -> None:
        for a, b in zip(first, second, strict=True):
            if a is None or b is None:
                continue
            bits = [self.xp.ascontiguousarray(x).view(np.uint8) for x in (a, b) if x.ndim]
            if len(bits) == 2 and not bool((bits[0] == bits[1]).all()):
                self.outcome.complaints.append(
                    (name, f"{int((bits[0] != bits[1]).sum())} bytes of {a.size} numbers differ")
                )
                return


def lay(xp: Any, x: Any, kind: str) -> Any:
    """Return the same array with other strides."""
    if x.dtype.itemsize == 2 and x.dtype != np.uint16:  # moving bits is all that CuPy does with bfloat16 everywhere
        return lay(xp, x.view(np.uint16), kind).view(x.dtype)
    if kind == "fortran":
        return xp.asfortranarray(x)
    if kind == "unaligned":
        flat = xp.empty(x.size + 1, x.dtype)[1:]
        flat[:] = x.reshape(-1)
        return flat.reshape(x.shape)
    if x.ndim < 2 or not x.size:
        return x
    if kind == "negative":
        return xp.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
    if kind == "step":
        wide = xp.ones((*x.shape[:-2], 2 * x.shape[-2], x.shape[-1]), x.dtype)
        wide[..., ::2, :] = x
        return wide[..., ::2, :]
    if kind == "swapped" and x.ndim > 2:
        return xp.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    if kind == "spread" and x.ndim > 2 and bool((x == x[..., :1, :, :]).all()):
        return xp.broadcast_to(x[..., :1, :, :], x.shape)
    return x
