"""The commands that measure cuattn beside its peers: ``python -m bench.hopper``, ``shapes``, ``portable``, ...

``python -m bench.hopper --tables dense --directions forward --ours cuattn-sm90`` measures a part;
``--beside PATH`` measures another checkout of cuattn instead of the peers, in turn with this one, and says the ratios.
"""

import importlib
import json
import os
import site
from pathlib import Path
from types import SimpleNamespace

from bench import bars, beside, harness
from bench.cases import BOTH, select
from bench.compare import Comparison
from bench.peers import RUNNERS, make
from bench.rows import sources
from bench.timing import HostClock

PAUSE, BATCH = 0.05, 0.04  # seconds between two samples on the CPU, and what those of short calls take


class Suite(SimpleNamespace):
    """One command: what it measures.

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
    ours : tuple of str
        Runners of cuattn.
    quick : tuple of str
        Patterns of the most telling cases, for ``--quick``.
    defaults : dict
        Other defaults of the options; ``memory``: also observe the peak of allocated memory.
    """

    optional = ()
    studies = defaults = {}  # noqa: RUF012, never written to
    ours = ("cuattn",)
    quick: tuple[str, ...] = ()


SUITES = {
    "hopper": Suite(
        about="Hopper kernels beside every peer: dense sweep, twelve masks, dropout, deterministic gradients.",
        tables=("dense", "masks-8k", "masks-32k", "dropout", "deterministic"),
        peers={
            "": ("fa4", "fa3", "fa4-varlen", "fa3-varlen", "flex-FLASH", "flex", "cudnn"),
            "dense": ("cudnn", "fa4", "fa3", "fa2"),
            "dropout": ("cudnn", "fa2"),
            "deterministic": ("fa4", "fa3", "fa3-varlen", "fa2"),
            "long": ("cudnn", "fa4", "fa3"),
        },
        optional=("masks-128k", "masks-8k-d64", "masks-32k-d64", "masks-128k-d64", "long"),
    ),
    "shapes": Suite(
        about="Shapes that users call, in vision, video, language, structure and more, beside every peer.",
        tables=("shapes",),
        peers={"": ("cudnn", "fa4", "fa3", "fa2", "mem-efficient", "flex")},
        defaults={"seconds": 0.5},
    ),
    "portable": Suite(
        about="Portable kernels: 16 bits, float32, float64, decode, host cost, first calls.",
        tables=("portable", "decode", "host"),
        peers={
            "": ("fa2", "cudnn", "mem-efficient", "math", "jax"),
            "decode": ("cuattn", "cuattn-cupy", "cudnn", "fa3", "fa2", "sdpa"),
            "host": ("cuattn", "cuattn-cupy", "sdpa", "cudnn", "fa3", "fa2"),
        },
        studies={"first-call": "first_call"},
        ours=("cuattn-sm80",),
    ),
    "scores": Suite(
        about="Functions of scores and masks, biases, softcap, boolean masks beside every peer that takes them.",
        tables=("scores-bias", "scores", "scores-learned", "scores-masks", "scores-columns", "scores-host"),
        peers={
            "": ("flex", "flex-autotune", "flex-FLASH", "fa4"),
            "scores": ("cuattn-without", "flex", "flex-autotune", "flex-FLASH", "fa4", "fa3"),
            "scores-bias": ("cuattn-without", "flex", "flex-autotune", "flex-FLASH", "mem-efficient", "cudnn"),
            "scores-columns": ("cuattn-function", "cuattn-boolean", "cuattn-array", "flex"),
            "scores-host": ("flex",),
        },
        studies={"scores-tables": "scores", "scores-first-call": "first_call"},
        quick=(
            "scores-bias/d64-N2048-full-pairs-learned/*",
            "scores-bias/d32-*",
            "scores-bias/d128-N4096-full-keys-learned/*",
            "scores/d128-N4096-causal-softcap/*",
            "scores/d128-N4096-causal-alibi/*",
            "scores-learned/d128-N4096-*-slopes-learned/*",
            "scores-learned/d128-N4096-*-relative-learned/*",
            "scores-masks/d128-N4096-full-natten/*",
            "scores-masks/d128-N4096-full-document_ids/*",
            "scores-columns/d128-N8192-causal_document/*",
            "scores-tables/N131072-natten/*",
            "scores-tables/N131072-document_ids/*",
            "scores-host/*",
        ),
        defaults={"seconds": 0.4, "skip": ["flex-autotune"]},  # which compiles for half a minute a case
    ),
    "lengths": Suite(
        about="FlashAttention's figure 3: runtime and memory of forward and backward from 128 to 64K tokens.",
        tables=("lengths",),
        peers={"": ("standard", "mem-efficient", "fa2", "fa3", "cudnn")},
        defaults={"memory": True, "seconds": 0.6, "least": 3},
    ),
    "gpt2": Suite(
        about="FlashAttention's first figure: GPT-2 medium's attention, by the clock and by hardware counters.",
        tables=("gpt2",),
        peers={"": ("standard", "fa2", "fa3", "cudnn")},
        studies={"gpt2-bytes": "gpt2"},
        ours=("cuattn", "cuattn-sm80"),
        defaults={"most": 60},
    ),
    "cpu": Suite(
        about="The CPU backend beside PyTorch and the NumPy formula; its time under a mask; its memory.",
        tables=("cpu", "cpu-torch", "cpu-small", "cpu-scores"),
        peers={
            "": ("sdpa-dense", "sdpa-documents"),
            "cpu-small": ("numpy", "sdpa-dense"),
            "cpu-scores": ("cuattn-without",),
        },
        studies={"cpu-alone": "cpu"},
        ours=("cuattn-attention", "cuattn"),
        defaults={"device": "cpu", "seconds": 6.0, "most": 20, "budget": 1800.0},
    ),
}


def parser(name):
    """Return the parser of a suite's command."""
    suite = SUITES[name]
    tables = [*suite.tables, *suite.studies]
    known = [*tables, *suite.optional]
    checkout = "a checkout of cuattn to measure instead of peers"
    more = {
        "--tables": dict(nargs="+", choices=known, default=tables, help="which tables", metavar="TABLE"),
        "--directions": dict(nargs="+", choices=BOTH, default=BOTH),
        "--ours": dict(nargs="*", default=list(suite.ours), metavar="RUNNER", help="cuattn, cuattn-sm90, ..."),
        "--peers": dict(nargs="*", metavar="RUNNER", help="by default all that may apply to the table"),
        "--skip": dict(nargs="*", default=[], metavar="RUNNER", help="leave these out; without names, none"),
        "--beside": dict(type=Path, metavar="PATH", help=checkout),
        "--least": dict(type=int, default=7, help="fewest samples of a runner"),
        "--most": dict(type=int, default=40, help="most samples of a runner"),
        "--site": dict(nargs="+", default=[], metavar="FOLDER", help="unpacked wheels of peers, like site-packages"),
    }
    if suite.quick:
        most = dict(dest="only", action="store_const", const=list(suite.quick), help="the most telling cases alone")
        more["--quick"] = most
    found = harness.parser(suite.about, name, more, **{"seconds": 1.5, "memory": False, **suite.defaults})
    found.epilog = f"tables: {', '.join(known)}.  runners: {', '.join(RUNNERS)}."
    return found


def main(name, words=None):
    """Run a suite's command; return 0, or 1 when a result was wrong."""
    arguments = parser(name).parse_args(words)
    compared = comparison(arguments)
    options = {"tiny": True} if arguments.tiny else {}
    if arguments.beside:
        options["beside"] = sources(names=("kernels", "cuattn"), root=arguments.beside.resolve())
    points = [point for cases, runners in tables(name, arguments) for point in compared.points(cases, runners)]
    for table, module in SUITES[name].studies.items():
        if table in arguments.tables:
            points += importlib.import_module(f"bench.{module}").points(arguments)
    harness.run(arguments, points, options)
    if not arguments.list and (file := harness.destination(arguments)).exists():
        rows = json.loads(file.read_text())["rows"]
        bars.show(bars.beside(rows) if arguments.beside else bars.BARS.get(name, ()), rows)
    return 1 if compared.wrong else 0


def comparison(arguments):
    """Return what measures, and compiles, as the arguments say."""
    for folder in arguments.site:
        site.addsitedir(folder)
    if arguments.beside:
        beside.load(arguments.beside)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # as all other compilers keep what they made
    asked = {key: getattr(arguments, key) for key in ("memory", "seconds", "least", "most")}
    if arguments.device != "cpu":
        return Comparison(arguments.device, **asked)
    return Comparison("cpu", HostClock(pause=PAUSE, batch=BATCH), cold=HostClock(pause=PAUSE), **asked)


def tables(name, arguments):
    """Yield the cases of each table that is asked for, and its runners: ours, then peers or the other checkout's."""
    suite = SUITES[name]
    for table in arguments.tables:
        if table not in suite.studies:
            peers = suite.peers.get(table, suite.peers[""]) if arguments.peers is None else arguments.peers
            runners = [runner for runner in (*arguments.ours, *peers) if runner not in arguments.skip]
            if arguments.beside:
                mine = [runner for runner in runners if runner.startswith("cuattn")]
                runners = [*mine, *(runner.replace("cuattn", "base", 1) for runner in mine)]
            cases = select([table], arguments.directions)
            cases = dict.fromkeys(case.tiny if arguments.tiny else case for case in cases)
            yield [case for case in cases if harness.matches(case.name, arguments.only)], make(runners)


def portions(calls):
    """Return what must be compiled, in portions for processes to take in turn, the longest first.

    A portion is one runner's cases that differ in length or direction alone: compilers make much the same for them,
    and what one of them made the next finds in memory.
    """
    found = {}
    for runner, case in sorted(calls, key=lambda call: -call[0].compile_seconds):
        if runner.compile_seconds and runner.unsupported_reason(case) is None:
            made_for = case.kind, case.score, case.learned, case.dropout, case.deterministic
            family = (runner.name, case.head_dim, case.dtype, *made_for)
            found.setdefault(family, []).append((runner, case))
    return list(found.values())
