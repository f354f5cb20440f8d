"""What groups of measured cases have to reach beside the fastest peer of the same run, and what they reach.

Every command of `bench.suites` that has bars shows them behind its rows.
"""

import statistics
from typing import NamedTuple

from bench.harness import matches


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

    def found(self, rows):
        """Return, by case, the rival's time over the runner's; 0 where the runner failed.

        Examples
        --------
        >>> times = {"cuattn": 4, "flex": 5}
        >>> rows = [{"case": "t/a/forward", "runner": name, "median_us": us} for name, us in times.items()]
        >>> Bar("", "t/*", 1.3, 1.0).found(rows)
        {'t/a/forward': 1.25}
        """
        times = {}
        for row in rows:
            times.setdefault(row["case"], {})[row["runner"]] = row.get("median_us")
        found = {}
        for case in (case for case in times if matches(case, self.cases.split())):
            theirs = [us for name, us in times[case].items() if us and self._counts(name)]
            if theirs and self.runner in times[case]:
                found[case] = min(theirs) / (times[case][self.runner] or float("inf"))
        return found

    def _counts(self, name):
        return name == self.rival if self.rival else not name.startswith("cuattn")

    def judged(self, found):
        """Return what some ratios reach."""
        worst = min(found, key=found.get)
        mean = statistics.geometric_mean([max(ratio, 1e-3) for ratio in found.values()])
        met = mean >= self.mean and found[worst] >= self.worst
        reached = {"mean": mean, "to reach": f">= {self.mean:.3g}", "worst": found[worst]}
        return {**reached, "at least": self.worst, "case": worst, "met": met}


class Limit(NamedTuple):
    """What a value may be at most: `key` of the rows of some cases, less that of the case `beyond`.

    On a slower machine it may be as many `times` what PyTorch's plain forward takes.
    """

    what: str
    cases: str
    most: float
    key: str = "rate"
    beyond: str = ""
    times: int = 0

    def on_this_machine(self, rows):
        """Return the limit for the machine of some rows."""
        plain = [row[self.key] for row in rows if (row["case"], row["runner"]) == PLAIN and self.key in row]
        return self._replace(most=max([self.most, *(self.times * x for x in plain)]))

    def found(self, rows):
        """Return the values by case."""
        return {row["case"]: row[self.key] - self._before(rows, row) for row in self._ours(rows, self.cases)}

    def _ours(self, rows, cases):
        return [row for row in rows if row["runner"] == "cuattn" and self.key in row and matches(row["case"], [cases])]

    def _before(self, rows, row):
        """Return what does not count."""
        if not self.beyond:
            return 0.0
        direction = row["case"].rpartition("/")[2]
        return next((x[self.key] for x in self._ours(rows, f"{self.beyond}/{direction}")), 0.0)

    def judged(self, found):
        """Return what some values reach."""
        worst = max(found, key=found.get)
        reached = {"mean": statistics.mean(found.values()), "to reach": f"<= {self.most:g}", "worst": found[worst]}
        return {**reached, "at least": None, "case": worst, "met": found[worst] <= self.most}


PLAIN = "host/d64-N256-full/forward", "sdpa"
MASKS = {  # tables of the twelve masks: means that were reached, forward and backward
    "masks-8k": (1.21, 1.14),
    "masks-32k": (1.12, 1.11),
    "masks-128k": (1.07, 1.08),
    "masks-8k-d64": (1.31, 1.26),
    "masks-32k-d64": (1.22, 1.21),
    "masks-128k-d64": (1.16, 1.13),
}
UNCHANGED = 0.995, 0.98  # the mean and the worst ratio to a version of the same speed
BARS = {  # suite: what is to be reached
    "hopper": (
        Bar("dense: forward", "dense/*/forward", 1.04, 0.99),
        Bar("dense: backward", "dense/*/backward", 1.06, 0.99),
        *(
            Bar(f"{table}: {way}", f"{table}/*/{way}", mean, 0.98)
            for table, means in MASKS.items()
            for way, mean in zip(("forward", "backward"), means, strict=True)
        ),
        Bar("reproducible gradients", "deterministic/*-deterministic/*", 1.0, 1.0),
    ),
    "shapes": (
        Bar("shapes that users call: forward", "shapes/*/forward", 1.10, 0.97),
        Bar("the same: backward", "shapes/*/backward", 1.10, 0.97),
        Bar("one key head: backward", "shapes/*-kv1/backward", 1.0, 1.0),
        Bar("few heads: backward", "shapes/few-*/backward shapes/video-*/backward", 1.0, 1.0),
        Bar("short sequences beside cuDNN: forward", "shapes/short-*/forward", 1.0, 1.0, rival="cudnn"),
        Bar("decode", "shapes/decode-*", 1.0, 1.0),
    ),
    "portable": (
        Bar("decode", "decode/*", 1.0, 1.0),
        Limit("host time: forward, us", "host/d64-N256-full/forward", 12.0, times=1),
        Limit("with a column mask, us", "host/*-causal_document/forward", 15.0, times=1),
        Limit("backward, us", "host/d64-N256-full/backward", 25.0, times=2),
    ),
    "cpu": (
        Bar("functions of scores: time without over with it", "cpu-scores/*", 1 / 1.3, 1 / 1.3, rival="cuattn-without"),
    ),
    "scores": (
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
        Bar("identity: time without over with it", "scores/*-identity/*", 0.99, 0.99, rival="cuattn-without"),
        Limit("tables at 128K on the device, ms", "scores-tables/N131072-*", 10.0, "device_ms"),
        Limit("recognition at 128K on the host, ms", "scores-tables/N131072-*", 100.0, "host_ms"),
        Limit("memory of making the tables at 128K, bytes", "scores-tables/N131072-*", 100e6, "mask_bytes"),
        Limit("first call, cold, s", "scores-first-call/cold-*", 3.0),
        Limit("first call, from the disk cache, s", "scores-first-call/disk-*", 0.1),
        Limit(
            "host time of a function, us", "scores-host/d64-N256-full-alibi/*", 2.0, beyond="scores-host/d64-N256-full"
        ),
        Limit("and of an array, us", "scores-host/*-slopes-learned/*", 3.5, beyond="scores-host/d64-N256-full"),
    ),
}


def beside(rows):
    """Return the bars of each runner and table beside another checkout, which must not have been faster."""
    both = {(row["case"].partition("/")[0], row["runner"]): None for row in rows if row["runner"].startswith("cuattn")}
    other = {name: name.replace("cuattn", "base", 1) for _, name in both}
    return [Bar(f"{table}, {name}", f"{table}/*", *UNCHANGED, name, other[name]) for table, name in both]


def standings(bars, rows):
    """Return a line for every bar and limit of which there are rows: what is to be reached, and what was."""
    bars = (bar.on_this_machine(rows) if isinstance(bar, Limit) else bar for bar in bars)
    found = ((bar, bar.found(rows)) for bar in bars)
    return [{"what": bar.what, "cases": len(values), **bar.judged(values)} for bar, values in found if values]


def show(bars, rows):
    """Print the standings."""
    for line in standings(bars, rows):
        met = "   " if line["met"] else "NOT"
        print(f"{met} {line['what']}: {line['mean']:.3g} {line['to reach']} (of {line['cases']}), ", end="")
        print(f"worst {line['worst']:.3g} {line['case']}")
