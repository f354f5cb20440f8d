"""Runners side by side on one case: each is checked against one reference, then all are timed in turn."""

import contextlib
import functools
import time
import warnings

from bench import harness, timing
from bench import inputs as problem_inputs
from bench.harness import Point, free_caches, peak
from bench.reference import distance
from bench.rows import clocks

AGREEMENT = 4.0  # a peer may be this many times the textbook's own error away from cuattn, over whole arrays
DROPPED_SPREAD = (0.8, 1.25)  # a peer's dropout noise over the noise that its probability predicts
BRIEF = 0.1  # seconds
ROOMY = 0.6  # share of the device's memory below which caches are emptied between cases


class Refused(Exception):
    """A runner that is not timed: the status of its row, and why."""


class Comparison:
    """Measure cases on one device.

    Parameters
    ----------
    device : {"cuda", "cpu"}
        Where.
    clock : CudaClock or HostClock, optional
        By default the device's.
    cold : HostClock, optional
        Of first calls after a pause, which are timed too (``cold_us``) where calls take less than `BRIEF`.
    memory : bool
        Also observe the peak of allocated memory in one more call.
    **rounds
        ``seconds``, ``least``, ``most`` of `timing.measure`, per case.

    Attributes
    ----------
    wrong : int
        Results that were refused so far.
    """

    def __init__(self, device, clock=None, *, cold=None, memory=False, **rounds):
        self.device, self._clock, self._cold = device, clock, cold
        self.memory, self.rounds = memory, rounds
        self.wrong = 0
        self._inputs, self._references = None, {}
        self._differentiated = set()  # problems whose gradients some case asks for

    @functools.cached_property
    def clock(self):
        """The clock, made when it is first needed: on a GPU it loads PyTorch."""
        return self._clock or harness.clock(self.device)

    def points(self, cases, runners):
        """Return the points of some cases, those of the same problem one after the other."""
        place = {problem: i for i, problem in enumerate(dict.fromkeys(case.problem for case in cases))}
        self._differentiated |= {case.problem for case in cases if case.direction != "forward"}
        names = tuple(runner.name for runner in runners)
        return [
            Point(case.name, names, functools.partial(self.measure, case, runners), retry=False)
            for case in sorted(cases, key=lambda case: place[case.problem])
        ]

    def measure(self, case, runners):
        """Check and time one case with every runner; return the values of their rows."""
        inputs = self._prepare(case)
        rows, bound, truth = {}, {}, None
        try:
            for runner in runners:
                row = {"ours": runner.ours, "status": "ok", "problem": case.as_dict(), "rho": round(inputs.rho, 6)}
                rows[runner.name] = row
                try:
                    call, results = self._check(runner, case, inputs, truth, row)
                except Refused as refused:
                    row["status"], row["reason"] = refused.args
                    continue
                bound[runner.name] = call
                truth = results if runner.ours and truth is None else truth
                del results
            truth = None
            for name, part in self._time(case, bound, inputs.rho).items():
                rows[name] |= part
        finally:
            bound.clear()
            for runner in runners:
                runner.close()
            self._free()
        self.wrong += sum(row["status"] == "wrong" for row in rows.values())
        return rows

    def compile(self, runner, case):
        """Call a runner once on zeros, so that a later run finds in the disk caches what its compilers made."""
        begin = time.perf_counter()
        try:
            inputs = problem_inputs.make(case.problem, self.device, blank=True)
            scoped(runner.bind(case, inputs))()
            self.clock.synchronize()
            said = f"{time.perf_counter() - begin:.1f} s"
        except Exception as error:  # the run that measures will say so in its rows
            said = _reason(error, ())
        inputs = None
        runner.close()
        self._free(at_once=True)
        return f"{case.name} {runner.name}: {said}"

    def _prepare(self, case):
        """Return the inputs of a case, kept from the case before when the problem is the same."""
        if self._inputs is None or self._inputs.case != case.problem:
            self._inputs, self._references = None, {}
            self._free()
            self._inputs = problem_inputs.make(case.problem, self.device)
        return self._inputs

    def _reference(self, case, inputs, dropped):
        """Return the reference of the current inputs, with or without cuattn's dropout, made once."""
        key = (dropped, case.direction != "forward" or case.problem in self._differentiated)
        if key not in self._references:
            self._references[key] = problem_inputs.reference(inputs, key[1], dropped)
        return self._references[key]

    def _check(self, runner, case, inputs, truth, row):
        """Bind a runner and check its results, noting in its row what is seen; return its call and its results."""
        if reason := runner.unsupported_reason(case):
            raise Refused("unsupported", reason)
        begin = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call = runner.bind(case, inputs)
                with call.scope():
                    results = dict(zip(case.results, call.convert(call.call()), strict=False))
                self.clock.synchronize()
            except Exception as error:  # a peer may fail in any way it likes; the others go on
                raise Refused("failed", _reason(error, said)) from error
        row |= {"first_call_s": round(time.perf_counter() - begin, 3), "plan": call.plan}
        if self.memory:
            with peak(self.device) as used:
                again = scoped(call)()
                self.clock.synchronize()
            del again
            row["peak_bytes"] = used.bytes
        if call.exact and (wrong := self._judge(runner, case, inputs, results, truth, row)):
            raise Refused("wrong", wrong)
        return call, results

    def _judge(self, runner, case, inputs, results, truth, row):
        """Note a result's errors in its row; return what is wrong with it, or None."""
        if broken := [name for name, x in results.items() if not bool(x.isfinite().all())]:
            return f"{', '.join(broken)} not finite"
        if case.dropout and not runner.ours:
            return self._judge_dropout(case, inputs, results, row)
        reference = self._reference(case, inputs, bool(case.dropout))
        row["error"] = reference.errors(results, peer=not runner.ours)
        for name, found in row["error"].items():
            if not found["of_allowed"] <= 1:
                return f"error of {name} is {found['of_allowed']:.2f} of what is allowed"
        if truth is not None and not runner.ours:
            row["disagreement"] = {name: distance(results[name], truth[name]) for name in results}
            limit = AGREEMENT * reference.spread(results)
            for name, found in row["disagreement"].items():
                if not found <= limit:
                    return f"{name} is {found:.2g} away from cuattn's; at most {limit:.2g} expected"
        return None

    def _judge_dropout(self, case, inputs, results, row):
        """Judge a peer that draws its own dropout: the noise in o must be what its probability predicts."""
        if "o" not in results:
            return None
        noise = problem_inputs.dropout_noise(inputs, self._reference(case, inputs, False), results["o"])
        row["dropout_noise"] = noise
        low, high = DROPPED_SPREAD
        return None if low <= noise <= high else f"the noise of dropout is {noise:.2f} of what its probability predicts"

    def _time(self, case, bound, rho):
        """Time the bound calls; return what each row gains."""
        calls = {name: scoped(call) for name, call in bound.items()}
        try:
            if case.host:
                samples = {name: timing.host_cost(call, self.clock) for name, call in calls.items()}
            else:
                alone = {name for name, call in bound.items() if call.alone}
                samples = timing.measure(calls, self.clock, alone=alone, **self.rounds)
        except Exception as error:  # out of memory, mostly: the other cases go on
            reason = f"{type(error).__name__} while timing: {error}"[:300]
            return {name: {"status": "failed", "reason": reason} for name in bound}
        heat = self._clocks_at_work(calls)
        rows = {name: {**timing.timed(spent), "flops": case.flops(rho)} for name, spent in samples.items()}
        for row in rows.values():
            rate = float(f"{case.rate(row['median_us'] / 1e6, rho):.5g}")
            row |= {"rate": rate, "unit": case.unit, "clocks": heat}
        if self._cold and max((row["median_us"] for row in rows.values()), default=0) < BRIEF * 1e6:
            for name, spent in timing.measure(calls, self._cold, seconds=0.0).items():
                rows[name]["cold_us"] = timing.timed(spent)["median_us"]
        return rows

    def _clocks_at_work(self, calls):
        """Read the clocks while the device still works, on one call: all of them can take ten seconds."""
        if self.device != "cuda" or not calls:
            return None
        next(iter(calls.values()))()
        heat = clocks()
        self.clock.synchronize()
        return heat

    def _free(self, at_once=False):
        """Give memory back when the two allocators together hold much of the device, or at once."""
        if self.device != "cuda":
            return
        import torch

        free, total = torch.cuda.mem_get_info()
        if at_once or free < ROOMY * total:
            free_caches()


def _reason(error, said):
    """Return the first lines of an error, and of the warnings in which PyTorch tells why no kernel fits."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()[:2]
    lines += [str(warning.message).strip().splitlines()[0] for warning in said]
    return "; ".join(line.partition(" (Triggered")[0] for line in lines)[:400]


def scoped(bound):
    """Return the call of a runner, inside its scope."""
    if bound.scope is contextlib.nullcontext:
        return bound.call

    def call():
        with bound.scope():
            return bound.call()

    return call
