"""The command line that the measuring scripts share."""

from __future__ import annotations

import argparse
import os
import site
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import rows
from bench.cases import BOTH, Case, select
from bench.peers import RUNNERS, Runner, make
from bench.session import Session

__all__ = ["parser", "read_part", "run", "units"]


def parser(description: str, tables: Sequence[str], optional: Sequence[str], out: str) -> argparse.ArgumentParser:
    """Return the parser of a script.

    Parameters
    ----------
    description : str
        What the script measures.
    tables, optional : sequence of str
        Tables that it measures by default, and those that it measures when asked.
    out : str
        Default file.
    """
    known = [*tables, *optional]
    epilog = f"tables: {', '.join(known)}.  runners: {', '.join(RUNNERS)}."
    found = argparse.ArgumentParser(description=description, epilog=epilog)
    found.add_argument("--tables", nargs="+", choices=known, default=list(tables), help="which tables", metavar="TABLE")
    found.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="cases whose name or a word matches")
    found.add_argument("--directions", nargs="+", choices=BOTH, default=BOTH)
    found.add_argument("--ours", nargs="*", default=["cuattn"], metavar="RUNNER", help="cuattn, cuattn-sm90, ...")
    found.add_argument("--peers", nargs="*", metavar="RUNNER", help="by default all that may apply to the table")
    found.add_argument("--budget", type=float, default=540.0, metavar="SECONDS", help="start no case past this time")
    found.add_argument("--seconds", type=float, default=1.5, help="device time to sample per case")
    found.add_argument("--least", type=int, default=7, help="fewest samples of a runner")
    found.add_argument("--most", type=int, default=40, help="most samples of a runner")
    found.add_argument("--shared-mask", action="store_true", help="all sequences of a batch get one mask")
    found.add_argument("--memory", action="store_true", help="also observe the peak of allocated memory")
    found.add_argument("--trees", metavar="NAME=ID,...", help="git tree ids of a copy without git")
    found.add_argument("--site", metavar="FOLDER", help="unpacked wheels of peers, added like a site-packages folder")
    found.add_argument("--out", type=Path, default=Path(out), metavar="FILE", help="rows are added to this JSON file")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--compile", action="store_true", help="only compile what standard input says; bench.prepare")
    found.add_argument("--list", action="store_true", help="print the cases and stop")
    return found


def read_part(text: str) -> tuple[int, int]:
    """Read ``I/N``: part I, from 0, of N."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: expected I/N with 0 <= I < N")
    return int(part), int(parts)


def units(calls: Sequence[tuple[Runner, Case]]) -> list[list[tuple[Runner, Case]]]:
    """Return what must be compiled, in portions for processes to take in turn, the longest first.

    A portion is one runner's cases that differ in length or direction alone: compilers make much the same for them,
    and what one of them made the next finds in memory.
    """
    found: dict[tuple[object, ...], list[tuple[Runner, Case]]] = {}
    for runner, case in sorted(calls, key=lambda call: -call[0].compile_seconds):
        if runner.compile_seconds and runner.why_not(case) is None:
            family = (runner.name, case.head_dim, case.dtype, case.pattern, case.dropout, case.deterministic)
            found.setdefault(family, []).append((runner, case))
    return list(found.values())


def _compile(calls: Sequence[tuple[Runner, Case]], session: Session) -> None:
    """Compile the portions whose numbers, of four characters each, stand on the standard input that processes share."""
    portions = units(calls)
    while (number := os.read(sys.stdin.fileno(), 4)) and int(number) < len(portions):
        for runner, case in portions[int(number)]:
            session.compile(runner, case)


def run(arguments: argparse.Namespace, peers: dict[str, Sequence[str]]) -> int:
    """Measure what the arguments ask for.

    Parameters
    ----------
    arguments : Namespace
        Of `parser`.
    peers : dict of str to sequence of str
        Peers by table, with ``""`` for tables not named.

    Returns
    -------
    int
        Exit status: 0, or 1 when a result was wrong.
    """
    console = Console(width=None if Console().is_terminal else 200)
    if arguments.list:
        for case in select(arguments.tables, arguments.only, arguments.directions):
            console.print(case.name, highlight=False)
        return 0
    if arguments.site:
        site.addsitedir(arguments.site)
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # as all other compilers keep what they made
    options = {"shared_mask": arguments.shared_mask}
    file = rows.RowFile(arguments.out, rows.environment(arguments.device, arguments.trees, options))
    left: list[Case] = []
    begin = time.monotonic()
    calls: list[tuple[Runner, Case]] = []
    for table in arguments.tables:
        names = [*arguments.ours, *(peers.get(table, peers[""]) if arguments.peers is None else arguments.peers)]
        session = Session(
            make(names),
            arguments.device,
            file,
            seconds=arguments.seconds,
            least=arguments.least,
            most=arguments.most,
            shared_mask=arguments.shared_mask,
            memory=arguments.memory,
            console=console,
        )
        cases = select([table], arguments.only, arguments.directions)
        if arguments.compile:
            calls += [(runner, case) for case in cases for runner in session.runners]
            continue
        left += session.run(cases, arguments.budget - (time.monotonic() - begin))
    if arguments.compile:
        _compile(calls, session)
        return 0
    mine = [row for row in file.rows if row["run"] == file.run]
    wrong = sum(row["status"] == "wrong" for row in mine)
    spent = time.monotonic() - begin
    console.print(f"{len(mine)} rows in {spent:.0f} s, {wrong} wrong, {len(left)} cases left; {arguments.out}")
    if left:
        console.print("left: " + " ".join(case.name for case in left), soft_wrap=True)
    return 1 if wrong else 0
