"""One run: each case checked, then timed with all its runners in turn, then written, until the budget is spent."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import inputs as problem_inputs
from bench import timing
from bench.cases import Case
from bench.memory import peak
from bench.peers import Bound, Runner
from bench.reference import Reference, distance
from bench.rows import RowFile, clocks

__all__ = ["Session"]

AGREEMENT = 4.0  # a peer may be this many times the textbook's own error away from cuattn, over whole arrays
DROPPED_SPREAD = (0.8, 1.25)  # a peer's dropout noise over the noise that its probability predicts


class Session:
    """Measure cases on one device.

    Parameters
    ----------
    runners : list of Runner
        Who takes part; the first of ours is what peers are compared with.
    device : {"cuda", "cpu"}
        Where.
    file : RowFile
        Where rows go.
    seconds, least, most : float, int, int
        As in `timing.measure`, per case.
    shared_mask : bool
        Give all sequences of a batch the same mask.
    memory : bool
        Also observe the peak of allocated memory in one more call.
    console : Console, optional
        Where progress is shown.
    """

    def __init__(
        self,
        runners: list[Runner],
        device: str,
        file: RowFile,
        *,
        seconds: float = 2.0,
        least: int = 7,
        most: int = 50,
        shared_mask: bool = False,
        memory: bool = False,
        console: Console | None = None,
    ) -> None:
        self.runners = runners
        self.device = device
        self.file = file
        self.rounds = {"seconds": seconds, "least": least, "most": most}
        self.shared_mask = shared_mask
        self.memory = memory
        self.console = console or Console()
        self.clock = timing.CudaClock() if device == "cuda" else timing.HostClock()
        self._inputs: problem_inputs.Inputs | None = None
        self._references: dict[tuple[bool, bool], Reference] = {}
        self._differentiated: set[Case] = set()  # problems whose gradients some case asks for

    def run(self, cases: Iterable[Case], budget: float) -> list[Case]:
        """Measure cases that the file lacks, until `budget` seconds have passed.

        Returns
        -------
        list of Case
            What is left for another run.
        """
        names = [runner.name for runner in self.runners]
        todo = [case for case in _by_problem(cases) if not self.file.done(case.name, names)]
        self._differentiated = {case.problem for case in todo if case.direction != "forward"}
        started, longest = time.monotonic(), 0.0
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            task = progress.add_task("cases", total=len(todo))
            for index, case in enumerate(todo):
                begin = time.monotonic()
                if begin - started + longest > budget:
                    return todo[index:]
                progress.update(task, description=case.name)
                self.file.add(self.measure(case))
                longest = max(longest, time.monotonic() - begin)
                progress.advance(task)
        return []

    def compile(self, runner: Runner, case: Case) -> None:
        """Call a runner once on zeros, so that a later run finds in the disk caches what its compilers made."""
        begin = time.perf_counter()
        try:
            inputs = problem_inputs.make(case.problem, self.device, self.shared_mask, blank=True)
            _scoped(runner.bind(case, inputs))()
            self.clock.synchronize()
            said = f"{time.perf_counter() - begin:.1f} s"
        except Exception as error:  # the run that measures will say so in its rows
            said = _reason(error, [])
        inputs = None
        runner.close()
        self._free(at_once=True)
        self.console.print(f"{case.name} {runner.name}: {said}", highlight=False, soft_wrap=True)

    def measure(self, case: Case) -> list[dict[str, Any]]:
        """Check and time one case with every runner; return its rows."""
        inputs = self._prepare(case)
        rows, bound = {}, {}
        truth: dict[str, Any] | None = None
        try:
            for runner in self.runners:
                row, call, results = self._check(runner, case, inputs, truth)
                rows[runner.name] = row
                if call is not None:
                    bound[runner.name] = call
                    truth = results if runner.ours and truth is None else truth
                del results
            truth = None
            for name, part in self._time(case, bound, inputs.rho).items():
                rows[name] |= part
        finally:
            bound.clear()
            for runner in self.runners:
                runner.close()
            self._free()
        self._show(case, rows)
        return list(rows.values())

    def _prepare(self, case: Case) -> problem_inputs.Inputs:
        """Return the inputs of a case, kept from the case before when the problem is the same."""
        if self._inputs is None or self._inputs.case != case.problem:
            self._inputs, self._references = None, {}
            self._free()
            self._inputs = problem_inputs.make(case.problem, self.device, self.shared_mask)
        return self._inputs

    def _reference(self, case: Case, inputs: problem_inputs.Inputs, dropped: bool) -> Reference:
        """Return the reference of the current inputs, with or without cuattn's dropout, made once."""
        gradients = case.direction != "forward" or case.problem in self._differentiated
        key = (dropped, gradients)
        if key not in self._references:
            self._references[key] = problem_inputs.reference(inputs, gradients, dropped)
        return self._references[key]

    def _check(
        self, runner: Runner, case: Case, inputs: problem_inputs.Inputs, truth: dict[str, Any] | None
    ) -> tuple[dict[str, Any], Bound | None, dict[str, Any] | None]:
        """Bind a runner and check its results; return its row, and its call when it may be timed."""
        row: dict[str, Any] = {"case": case.name, "runner": runner.name, "ours": runner.ours, "status": "unsupported"}
        row["problem"] = case.as_dict()
        row["rho"] = round(inputs.rho, 6)
        reason = runner.why_not(case)
        if reason is not None:
            return {**row, "reason": reason}, None, None
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call = runner.bind(case, inputs)
                with call.scope():
                    results = call.convert(call.call())
                self.clock.synchronize()
            except Exception as error:  # a peer may fail in any way it likes; the others go on
                return {**row, "status": "failed", "reason": _reason(error, said)}, None, None
        row["first_call_s"] = round(time.perf_counter() - begin, 3)
        row["plan"] = call.plan
        if self.memory:
            with peak(self.device) as used:
                again = _scoped(call)()
                self.clock.synchronize()
            del again
            row["peak_bytes"] = used.bytes
        wrong = self._judge(runner, case, inputs, results, truth, row)
        if wrong:
            return {**row, "status": "wrong", "reason": wrong}, None, None
        return {**row, "status": "ok"}, call, results

    def _judge(
        self,
        runner: Runner,
        case: Case,
        inputs: problem_inputs.Inputs,
        results: dict[str, Any],
        truth: dict[str, Any] | None,
        row: dict[str, Any],
    ) -> str | None:
        """Note a result's errors in its row; return what is wrong with it, or None."""
        broken = [name for name, x in results.items() if not bool(x.isfinite().all())]
        if broken:
            return f"{', '.join(broken)} not finite"
        if case.dropout and not runner.ours:
            return self._judge_dropout(case, inputs, results, row)
        reference = self._reference(case, inputs, bool(case.dropout))
        row["error"] = reference.errors(results, peer=not runner.ours)
        bad = [name for name, found in row["error"].items() if not found["of_allowed"] <= 1]
        if bad:
            return f"error of {bad[0]} is {row['error'][bad[0]]['of_allowed']:.2f} of what is allowed"
        if truth is not None and not runner.ours:
            row["disagreement"] = {name: distance(results[name], truth[name]) for name in results}
            limit = AGREEMENT * reference.spread(results)
            far = [name for name, found in row["disagreement"].items() if not found <= limit]
            if far:
                return f"{far[0]} is {row['disagreement'][far[0]]:.2g} away from cuattn's; at most {limit:.2g} expected"
        return None

    def _judge_dropout(
        self, case: Case, inputs: problem_inputs.Inputs, results: dict[str, Any], row: dict[str, Any]
    ) -> str | None:
        """Judge a peer that draws its own dropout: the noise in o must be what its probability predicts."""
        if "o" not in results:
            return None
        row["dropout_noise"] = problem_inputs.dropout_noise(inputs, self._reference(case, inputs, False), results["o"])
        low, high = DROPPED_SPREAD
        if low <= row["dropout_noise"] <= high:
            return None
        return f"the noise of dropout is {row['dropout_noise']:.2f} of what its probability predicts"

    def _time(self, case: Case, bound: dict[str, Bound], rho: float) -> dict[str, dict[str, Any]]:
        """Time the bound calls; return what each row gains."""
        try:
            if case.host:
                samples = {}
                for name, call in bound.items():
                    with call.scope():
                        samples[name] = timing.host_cost(call.call, self.clock)
            else:
                calls = {name: _scoped(call) for name, call in bound.items()}
                alone = {name for name, call in bound.items() if call.alone}
                samples = timing.measure(calls, self.clock, alone=alone, **self.rounds)
        except Exception as error:  # out of memory, mostly: the other cases go on
            reason = f"{type(error).__name__} while timing: {error}"[:300]
            return {name: {"status": "failed", "reason": reason} for name in bound}
        heat = self._clocks_at_work(bound)
        return {name: {**_timed(case, samples[name], rho), "clocks": heat} for name in bound}

    def _clocks_at_work(self, bound: dict[str, Bound]) -> dict[str, float] | None:
        """Read the clocks while the device still works, on one call: all of them can take ten seconds."""
        if self.device != "cuda":
            return None
        for call in list(bound.values())[:1]:
            _scoped(call)()
        heat = clocks()
        self.clock.synchronize()
        return heat

    def _free(self, at_once: bool = False) -> None:
        """Give memory back when the two allocators together hold much of the device, or at once."""
        if self.device != "cuda":
            return
        import sys

        import torch

        free, total = torch.cuda.mem_get_info()
        if at_once or free < 0.6 * total:
            torch.cuda.empty_cache()
            if "cupy" in sys.modules:
                sys.modules["cupy"].get_default_memory_pool().free_all_blocks()

    def _show(self, case: Case, rows: dict[str, dict[str, Any]]) -> None:
        """Print one line per case."""
        parts = []
        for name, row in rows.items():
            if "rate" in row:
                parts.append(f"{name} [bold]{row['rate']:.4g}[/]")
            elif row["status"] != "unsupported":
                parts.append(f"{name} [red]{row['status']}[/]: {row['reason']}")
        self.console.print(f"{case.name} ({case.unit}): " + ", ".join(parts), highlight=False, soft_wrap=True)


def _by_problem(cases: Iterable[Case]) -> list[Case]:
    """Bring cases of the same problem together, in the order in which problems first appear."""
    groups: dict[Case, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.problem, []).append(case)
    return [case for group in groups.values() for case in group]


def _reason(error: Exception, said: list[warnings.WarningMessage]) -> str:
    """Return the first lines of an error, and of the warnings in which PyTorch tells why no kernel fits."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()[:2]
    lines += [str(warning.message).strip().splitlines()[0] for warning in said]
    return "; ".join(line.partition(" (Triggered")[0] for line in lines)[:400]


def _scoped(bound: Bound) -> Callable[[], Any]:
    """Return the call of a runner, inside its scope."""
    if bound.scope is contextlib.nullcontext:
        return bound.call

    def call() -> Any:
        with bound.scope():
            return bound.call()

    return call


def _timed(case: Case, samples: list[float], rho: float) -> dict[str, Any]:
    """Return the part of a row that timing adds."""
    return {
        **timing.timed(samples),
        "flops": case.flops(rho),
        "rate": float(f"{case.rate(timing.summary(samples)['median'], rho):.5g}"),
        "unit": case.unit,
    }
