"""Functions of scores and masks, biases, softcap and boolean masks beside every peer.

    python -m bench.prepare scores --quick --site SITE     # compiles in many processes
    python -m bench.scores --quick --site SITE             # the most telling cases; then the bars are shown

The table ``scores-tables`` is measured here: what a mask function costs before the first tile is computed.
"""

import functools
import statistics
from time import perf_counter
from typing import NamedTuple

from bench import harness, inputs, timing
from bench.cases import Case
from bench.harness import Calls, Point, matches, peak
from bench.peers import make
from bench.score_samples import MASKS
from bench.suites import main

LENGTHS, TINY = (131072, 8192), (192,)
TIMES = 3  # that tables are made


class Bar(NamedTuple):
    """What a group of cases has to reach.

    Attributes
    ----------
    what : str
        The group.
    cases : str
        Patterns of the cases' names.
    mean, worst : float
        Least geometric mean, and least ratio of any case.
    runner, rival : str
        The ratio is the rival's time over the runner's; by default the fastest peer's.
    """

    what: str
    cases: str
    mean: float
    worst: float
    runner: str = "cuattn"
    rival: str = ""


class Limit(NamedTuple):
    """What a value may be at most: `key` of the rows of some cases, less that of the case `beyond`."""

    what: str
    cases: str
    most: float
    key: str = "rate"
    beyond: str = ""


BARS = (
    Bar("bias of pairs, B 256, H 4, N 256, d 32: forward", "scores-bias/d32-*/forward", 1.1, 1.1),
    Bar("the same: backward", "scores-bias/d32-*/backward", 1.1, 1.1),
    Bar("bias (1,H,N,N), B 1, N 2048, d 64: forward", "scores-bias/d64-N2048-*-pairs-*/forward", 1.6, 1.6),
    Bar("the same: backward", "scores-bias/d64-N2048-*-pairs-*/backward", 2.0, 2.0),
    Bar("bias (B,1,1,N), N 4096, d 128: forward", "scores-bias/d128-N4096-full-keys-learned/forward", 1.6, 1.6),
    Bar("the same: backward", "scores-bias/d128-N4096-full-keys-learned/backward", 2.0, 2.0),
    Bar("bias (B,1,1,N): time without over with it", "scores-bias/*-keys-*", 0.95, 0.95, rival="cuattn-without"),
    Bar("softcap, causal, N 4096, d 128: forward", "scores/d128-N4096-causal-softcap/forward", 1.1, 1.1),
    Bar("the same: backward", "scores/d128-N4096-causal-softcap/backward", 1.0, 1.0),
    Bar("every score", "scores/* scores-learned/* scores-bias/*", 1.3, 1.0),
    Bar("learned arrays: backward", "scores-learned/*/backward", 2.0, 1.0),
    Bar("functions of visibility", "scores-masks/*", 1.3, 0.98),
    Bar("recognised functions over constructors", "scores-columns/*", 0.99, 0.99, "cuattn-function", "cuattn"),
    Bar("boolean masks over column masks", "scores-columns/*", 0.90, 0.90, "cuattn-boolean", "cuattn"),
    Bar("the same, tables made in each call", "scores-columns/*", 0.75, 0.75, "cuattn-array", "cuattn"),
    Bar("on the CPU: time without over with it", "cpu-scores/*", 1 / 1.3, 1 / 1.3, rival="cuattn-without"),
    Bar("identity: time without over with it", "scores/*-identity/*", 0.99, 0.99, rival="cuattn-without"),
)
LIMITS = (
    Limit("tables at 128K on the device, ms", "scores-tables/N131072-*", 10.0, "device_ms"),
    Limit("recognition at 128K on the host, ms", "scores-tables/N131072-*", 100.0, "host_ms"),
    Limit("memory of making the tables at 128K, bytes", "scores-tables/N131072-*", 100e6, "mask_bytes"),
    Limit("first call, cold, s", "scores-first-call/cold-*", 3.0),
    Limit("first call, from the disk cache, s", "scores-first-call/disk-*", 0.1),
    Limit("host time of a function, us", "scores-host/d64-N256-full-alibi/*", 2.0, beyond="scores-host/d64-N256-full"),
    Limit("and of an array, us", "scores-host/*-slopes-learned/*", 3.5, beyond="scores-host/d64-N256-full"),
)


def ratios(rows, bar):
    """Return, by case, the rival's time over the runner's; 0 where the runner failed.

    Examples
    --------
    >>> rows = [{"case": "t/a/forward", "runner": name, "median_us": us} for name, us in (("cuattn", 4), ("flex", 5))]
    >>> ratios(rows, Bar("", "t/*", 1.3, 1.0))
    {'t/a/forward': 1.25}
    """
    times = {}
    for row in rows:
        times.setdefault(row["case"], {})[row["runner"]] = row.get("median_us")
    found = {}
    for case in (case for case in times if matches(case, bar.cases.split())):
        theirs = [us for name, us in times[case].items() if us and _is_rival(name, bar)]
        if theirs and bar.runner in times[case]:
            found[case] = min(theirs) / (times[case][bar.runner] or float("inf"))
    return found


def _is_rival(name, bar):
    return name == bar.rival if bar.rival else not name.startswith("cuattn")


def standings(rows):
    """Return a line for every bar and limit of which there are rows: what is to be reached, and what was."""
    lines = []
    for bar in BARS:
        if found := ratios(rows, bar):
            worst = min(found, key=found.get)
            mean = statistics.geometric_mean([max(ratio, 1e-3) for ratio in found.values()])
            said = {"cases": len(found), "mean": mean, "to reach": f">= {bar.mean:.3g}", "worst": found[worst]}
            met = mean >= bar.mean and found[worst] >= bar.worst
            lines.append({"what": bar.what, **said, "at least": bar.worst, "case": worst, "met": met})
    for limit in LIMITS:
        found = {row["case"]: row[limit.key] - _before(rows, row, limit) for row in _ours(rows, limit.cases, limit.key)}
        if found:
            worst = max(found, key=found.get)
            said = {"cases": len(found), "mean": statistics.mean(found.values()), "to reach": f"<= {limit.most:g}"}
            met = found[worst] <= limit.most
            lines.append(
                {"what": limit.what, **said, "worst": found[worst], "at least": None, "case": worst, "met": met}
            )
    return lines


def _ours(rows, cases, key):
    return [row for row in rows if row["runner"] == "cuattn" and key in row and matches(row["case"], [cases])]


def _before(rows, row, limit):
    """Return what a limit does not count."""
    if not limit.beyond:
        return 0.0
    direction = row["case"].rpartition("/")[2]
    return next((x[limit.key] for x in _ours(rows, f"{limit.beyond}/{direction}", limit.key)), 0.0)


def show(rows):
    """Print the standings."""
    for line in standings(rows):
        met = "   " if line["met"] else "NOT"
        print(f"{met} {line['what']}: {line['mean']:.3g} {line['to reach']} (of {line['cases']}), ", end="")
        print(f"worst {line['worst']:.3g} {line['case']}")


def measure(name, n, device):
    """Make the tables of a mask function from nothing, on the host and on the device; FlexAttention's beside them.

    On the device it is the first forward with a mask, less a warm one; all kernels are compiled before.
    """
    case = Case("scores-tables", "forward", 1, 1, 1, n, n, 64, score=name)
    made = inputs.make(case, device)
    wall = functools.partial(_wall, harness.namespace(device))
    (runner,) = make(["cuattn"])
    operands = [runner.array(x) for x in made.operands[:3]]
    samples = []
    for _ in range(1 + TIMES):
        on_host, mask = wall(lambda: harness.placed(inputs.mask_of(case), device))
        calls = Calls(*operands, mask=mask)
        first, warm, *_ = (wall(calls.forward)[0] for _ in range(2))
        samples.append((on_host, max(first - warm, 0.0)))
    with peak(device) as usual:
        calls.forward()
    with peak(device) as most:
        Calls(*operands, mask=harness.placed(inputs.mask_of(case), device)).forward()
    host, on_device = (statistics.median(spent) for spent in zip(*samples[1:], strict=True))
    ours = {"host_ms": 1e3 * host, "device_ms": 1e3 * on_device, "mask_bytes": max(most.bytes - usual.bytes, 0)}
    theirs = {}
    if device == "cuda":
        from bench.peers.flex import own_block_mask

        tables = functools.partial(own_block_mask, case, made.functions({})[1], made.mask.leading, made.q.device)
        tables()
        with peak(device) as most:
            tables()
        theirs = {"flex": {**_row([wall(tables)[0] for _ in range(TIMES)]), "mask_bytes": most.bytes}}
    return {"cuattn": {**_row(map(sum, samples[1:])), **ours, "mask": repr(mask)}, **theirs}


def _row(seconds):
    found = timing.timed(list(seconds))
    return {**found, "rate": round(found["median_us"] / 1e6, 6), "unit": "s"}


def _wall(xp, call):
    """Return the seconds until what a call enqueued is done, and its result."""
    harness.synchronize(xp)
    begin = perf_counter()
    result = call()
    harness.synchronize(xp)
    return perf_counter() - begin, result


def points(arguments):
    """Return one point per mask function and length."""
    runners = ("cuattn", "flex") if arguments.device == "cuda" else ("cuattn",)
    return [
        Point(f"scores-tables/N{n}-{name}/tables", runners, functools.partial(measure, name, n, arguments.device))
        for n in (TINY if arguments.tiny else LENGTHS)
        for name in MASKS
    ]


if __name__ == "__main__":
    raise SystemExit(main("scores"))
