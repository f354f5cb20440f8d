"""The command line: ``cuattn`` (or ``python -m cuattn``) and ``cuattn run``.

Without a command it prints which versions, devices and caches there are and what will be used, runs forward and
backward on the best device against a textbook computation in higher precision, and says what to do next.  ``run``
computes attention on the arrays of an .npz file.

Exit codes: 0 when all is well, 1 when the self-check found something off, 2 for bad arguments or files and 130 when
interrupted (both with one line on standard error).
"""

import argparse
import sys

from rich.console import Console

import cuattn
from cuattn.cli import check, devices, report
from cuattn.cli.run import run
from cuattn.cuda import FAMILIES
from cuattn.errors import CuattnError

__all__ = ["main"]

_CODES = (
    "exit codes: 0 all is well; 1 the self-check found something off; 2 bad arguments or files; 130 interrupted "
    "(the last two with one line on standard error)"
)
_WIDTH = 80  # where the output is no terminal


def main(argv=None):
    """Run the command line.

    Parameters
    ----------
    argv : list of str, optional
        The arguments; by default those of the process.

    Returns
    -------
    int
        The exit code.
    """
    options = _parser().parse_args(argv)
    try:
        return options.command(options)
    except (CuattnError, OSError, MemoryError) as error:
        print(f"cuattn: error: {str(error) or 'not enough memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cuattn: interrupted", file=sys.stderr)
        return 130


def _parser():
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="cuattn",
        description="Print versions, devices, caches and what will be used; then check forward and backward on the "
        "best device against a textbook computation in higher precision.",
        epilog=_CODES,
    )
    parser.add_argument("--version", action="version", version=f"cuattn {cuattn.__version__}")
    parser.add_argument("--no-check", action="store_true", help="print the report only")
    parser.set_defaults(command=_report_and_check)
    command = parser.add_subparsers(title="commands").add_parser(
        "run",
        help="compute attention on the arrays of an .npz file",
        description="Read q, k, v (and do, bias, mask) from an .npz file, write o, l, m, rng_state (and dq, dk, dv, "
        "dbias) to another. bfloat16 arrays are stored as uint16, with an entry dtype = 'bfloat16'.",
        epilog=_CODES,
    )
    command.set_defaults(command=run)
    add = command.add_argument  # files, then the keyword arguments of the API under their own names
    add("input", metavar="INPUT.npz", help="arrays q, k, v; with --backward also do; optional bias, mask")
    add("--output", metavar="OUT.npz", required=True, help="a file appears complete or not at all")
    add("--backward", action="store_true", help="compute dq, dk, dv (and dbias) too")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU when there is one")
    add(
        "--mask", nargs="+", metavar=("NAME", "ARG"),
        help="a constructor of cuattn.masks and its arguments as Python literals; lengths that come first in its "
        "signature (n, n_queries, n_keys) are taken from the data: --mask sliding_window 128, "
        "--mask causal_document '[100, 28]'",
    )  # fmt: skip
    add(
        "--causal", dest="is_causal", nargs="?", const=True, default=False, choices=("top_left", "bottom_right"),
        help="a query sees no later key; with as many queries as keys no alignment is needed",
    )  # fmt: skip
    add("--window", nargs="+", metavar="SIDE", help="LEFT RIGHT [ALIGNMENT]; none leaves a side open")
    add("--scale", type=float, help="factor of the scores (default head_dim ** -0.5)")
    add("--softcap", type=float, metavar="CAP", help="scores become CAP * tanh(score / CAP)")
    add("--dropout-p", type=float, default=0.0, metavar="P", help="share of the weights to drop (default 0)")
    add("--seed", type=int, help="dropout's seed, 0 <= SEED < 2**64 (default: a fresh random one)")
    add("--offset", type=int, default=0, help="dropout's counter offset (with --seed)")
    add("--enable-gqa", action="store_true", help="allow grouped key and value heads")
    add("--precision", choices=("tf32",), help="permits less than float32 accuracy")
    add("--kernel", choices=("cpu", *FAMILIES), help="one kernel family, or an error (default: the plan's choice)")
    add("--out-dtype", choices=("float32",), help="keep o unrounded")
    add("--deterministic", action="store_true", help="bitwise reproducible gradients")
    return parser


def _report_and_check(options):
    """Print the report, run the self-check, and say what to do next."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    device = devices.best()
    report.show(console, device)
    code = 0 if options.no_check else check.show(console, device)
    report.show_next(console, device, well=not code)
    return code
