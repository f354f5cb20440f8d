"""The commands that measure cuattn beside its peers: ``python -m bench.hopper``, ``portable``, ``lengths``, ``gpt2``.

``python -m bench.hopper --tables dense --directions forward --ours cuattn-sm90`` measures a part;
``--beside PATH`` measures another checkout of cuattn instead of the peers, in turn with this one, and says the ratios.
"""

from __future__ import annotations

import importlib
import json
import os
import site
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import beside, harness
from bench.cases import BOTH, select
from bench.compare import Comparison
from bench.peers import RUNNERS, make
from bench.rows import RESULTS, sources
from bench.timing import HostClock

__all__ = ["SUITES", "Suite", "main", "parser", "portions", "ratios"]

PAUSE, BATCH = 0.05, 0.003  # seconds between two samples on the CPU, and what a sample takes at least


@dataclass(frozen=True)
class Suite:
    """One command.

    Attributes
    ----------
    about : str
        What it measures.
    tables, optional : tuple of str
        Tables that it measures by default, and those that it measures when asked.
    peers : dict of str to tuple of str
        Peers by table, with ``""`` for tables not named.
    studies : dict of str to str
        Tables that are no `Case`, and the module whose ``points(arguments)`` measures them.
    ours : list of str
        Runners of cuattn.
    defaults : dict
        Other defaults of the options.
    """

    about: str
    tables: tuple[str, ...]
    peers: dict[str, tuple[str, ...]]
    optional: tuple[str, ...] = ()
    studies: dict[str, str] = field(default_factory=dict)
    ours: tuple[str, ...] = ("cuattn",)
    defaults: dict[str, Any] = field(default_factory=dict)


SUITES = {
    "hopper": Suite(
        "Hopper kernels beside every peer: dense sweep, twelve masks, dropout, deterministic gradients.",
        ("dense", "masks-8k", "masks-32k", "dropout", "deterministic"),
        {
            "": ("fa4", "fa4-varlen", "flex-FLASH", "flex", "cudnn"),
            "dense": ("cudnn", "fa4", "fa2"),
            "dropout": ("cudnn", "fa2"),
            "deterministic": ("fa4", "fa2"),
            "long": ("cudnn", "fa4"),
        },
        optional=("masks-128k", "masks-8k-d64", "masks-32k-d64", "masks-128k-d64", "long"),
    ),
    "portable": Suite(
        "Portable kernels: 16 bits, float32, float64, decode, host cost, column masks, first calls.",
        ("portable", "decode", "host", "sparsity"),
        {
            "": ("fa2", "cudnn", "mem-efficient", "math", "jax"),
            "decode": ("cudnn", "fa2", "flex", "fa4"),
            "host": ("cuattn-cupy", "cuattn-sm90", "sdpa", "flex", "fa4"),
            "sparsity": (),
        },
        studies={"first-call": "first_call"},
    ),
    "lengths": Suite(
        "FlashAttention's figure 3: runtime and memory of forward and backward from 128 to 64K tokens.",
        ("lengths",),
        {"": ("standard", "mem-efficient", "fa2", "cudnn")},
        defaults={"memory": True, "seconds": 0.6, "least": 3},
    ),
    "gpt2": Suite(
        "FlashAttention's first figure: GPT-2 medium's attention, by the clock and by hardware counters.",
        ("gpt2",),
        {"": ("standard", "fa2", "cudnn")},
        studies={"gpt2-bytes": "gpt2"},
        ours=("cuattn", "cuattn-sm80"),
        defaults={"most": 60},
    ),
    "cpu": Suite(
        "The CPU backend beside PyTorch and the NumPy formula; its time under a mask; its memory.",
        ("cpu", "cpu-torch", "cpu-small"),
        {"": ("sdpa-dense", "sdpa-documents"), "cpu-small": ("numpy", "sdpa-dense")},
        studies={"cpu-alone": "cpu"},
        ours=("cuattn-attention", "cuattn"),
        defaults={"device": "cpu", "seconds": 6.0, "budget": 1800.0},
    ),
}


def parser(name):
    """Return the parser of a suite's command."""
    suite = SUITES[name]
    found = harness.parser(suite.about, name)
    tables = [*suite.tables, *suite.studies]
    known = [*tables, *suite.optional]
    found.epilog = f"tables: {', '.join(known)}.  runners: {', '.join(RUNNERS)}."
    found.add_argument("--tables", nargs="+", choices=known, default=tables, help="which tables", metavar="TABLE")
    found.add_argument("--directions", nargs="+", choices=BOTH, default=BOTH)
    found.add_argument("--ours", nargs="*", default=list(suite.ours), metavar="RUNNER", help="cuattn, cuattn-sm90, ...")
    found.add_argument("--peers", nargs="*", metavar="RUNNER", help="by default all that may apply to the table")
    found.add_argument("--beside", type=Path, metavar="PATH", help="a checkout of cuattn to measure instead of peers")
    found.add_argument("--least", type=int, default=7, help="fewest samples of a runner")
    found.add_argument("--most", type=int, default=40, help="most samples of a runner")
    found.add_argument("--shared-mask", action="store_true", help="all sequences of a batch get one mask")
    found.add_argument("--memory", action="store_true", help="also observe the peak of allocated memory")
    found.add_argument("--site", metavar="FOLDER", help="unpacked wheels of peers, added like a site-packages folder")
    found.add_argument("--compile", action="store_true", help="only compile what standard input says; bench.prepare")
    found.set_defaults(**{"seconds": 1.5, **suite.defaults})
    return found


def main(name, arguments=None):
    """Run a suite's command; return 0, or 1 when a result was wrong."""
    return run(name, SUITES[name], parser(name).parse_args(arguments))


def run(name, suite, arguments):
    """Measure what the arguments ask for; see `main`."""
    if arguments.site:
        site.addsitedir(arguments.site)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # as all other compilers keep what they made
    options = {"shared_mask": arguments.shared_mask}
    if arguments.beside:
        beside.load(arguments.beside)
        options["beside"] = sources(names=("kernels", "cuattn"), root=arguments.beside.resolve())
        if arguments.out == RESULTS / f"{name}.json":
            arguments.out = RESULTS / f"beside-{name}.json"
    rounds = {key: getattr(arguments, key) for key in ("seconds", "least", "most")}
    resting = HostClock(pause=PAUSE, batch=BATCH) if arguments.device == "cpu" else None
    comparison = Comparison(
        arguments.device, resting, shared_mask=arguments.shared_mask, memory=arguments.memory, **rounds
    )
    points = []
    calls = []
    for table in arguments.tables:
        if table in suite.studies:
            points += importlib.import_module(f"bench.{suite.studies[table]}").points(arguments)
            continue
        runners = make(_names(suite, arguments, table))
        cases = [x for x in select([table], arguments.directions) if harness.matches(x.name, arguments.only)]
        points += comparison.points(cases, runners)
        calls += [(runner, case) for case in cases for runner in runners]
    if arguments.compile and not arguments.list:
        _compile(calls, comparison)
        return 0
    harness.run(arguments, points, options)
    if arguments.beside and arguments.out.exists() and not arguments.list:
        _show(ratios(json.loads(arguments.out.read_text())["rows"]))
    return 1 if comparison.wrong else 0


def _names(suite, arguments, table):
    """Return the runners of a table: ours, then the other checkout's twins, or the peers."""
    usual = () if arguments.beside else suite.peers.get(table, suite.peers[""])
    twins = [runner.replace("cuattn", "base", 1) for runner in arguments.ours if arguments.beside]
    return [*arguments.ours, *twins, *(usual if arguments.peers is None else arguments.peers)]


def ratios(rows):
    """Return, by case and runner of this checkout, the other checkout's time over its own: above 1, it is faster.

    Examples
    --------
    >>> both = [{"case": "t/a/forward", "runner": name, "median_us": us} for name, us in (("cuattn", 4), ("base", 5))]
    >>> ratios(both)
    {('t/a/forward', 'cuattn'): 1.25}
    """
    times = {(row["case"], row["runner"]): row["median_us"] for row in rows if "median_us" in row}
    twins = {(case, name): (case, name.replace("cuattn", "base", 1)) for case, name in times if "cuattn" in name}
    return {key: times[twin] / times[key] for key, twin in twins.items() if twin in times}


def _show(found):
    """Print the ratio of every row; per table the geometric mean and the worst."""
    tables = {}
    for (case, runner), ratio in found.items():
        table, _, row = case.partition("/")
        tables.setdefault(table, {})[f"{row} {runner}"] = ratio
    for table, rows in tables.items():
        for row, ratio in sorted(rows.items(), key=lambda item: item[1]):
            print(f"  {ratio:.3f}  {table}/{row}")
        worst = min(rows, key=rows.__getitem__)
        mean = statistics.geometric_mean(rows.values())
        print(f"{table}: geometric mean {mean:.3f} of {len(rows)} rows, worst {rows[worst]:.3f} ({worst})")


def portions(calls):
    """Return what must be compiled, in portions for processes to take in turn, the longest first.

    A portion is one runner's cases that differ in length or direction alone: compilers make much the same for them,
    and what one of them made the next finds in memory.
    """
    found = {}
    for runner, case in sorted(calls, key=lambda call: -call[0].compile_seconds):
        if runner.compile_seconds and runner.unsupported_reason(case) is None:
            family = (runner.name, case.head_dim, case.dtype, case.pattern, case.dropout, case.deterministic)
            found.setdefault(family, []).append((runner, case))
    return list(found.values())


def _compile(calls, comparison):
    """Compile the portions whose numbers, of four characters each, stand on the standard input that processes share."""
    found = portions(calls)
    while (number := os.read(sys.stdin.fileno(), 4)) and int(number) < len(found):
        for runner, case in found[int(number)]:
            print(comparison.compile(runner, case), flush=True)
