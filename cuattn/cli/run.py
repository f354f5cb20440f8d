"""``cuattn run``: attention on the arrays of a file."""

import sys
import time

import numpy as np
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import cuattn
from cuattn.cli import devices, files
from cuattn.cli.mask_argument import build_mask, literal
from cuattn.errors import ArgumentError, ShapeError

_COLUMNS = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()


def run(options):
    """Read, compute, write.

    Parameters
    ----------
    options : argparse.Namespace
        The arguments of the command.

    Returns
    -------
    int
        The exit code.
    """
    files.check_output(options.output)
    archive = files.Archive(options.input, [*"qkv", "do"] if options.backward else [*"qkv"])
    if options.offset and options.seed is None:
        raise ArgumentError(f"--offset {options.offset} is given without --seed; expected both")
    state = None if options.seed is None else cuattn.RNGState(options.seed, options.offset)
    keywords = _keywords(options, archive)
    _check_shapes(archive, keywords)
    device = devices.pick(options.device, options.kernel)

    def load(name):
        return device.put(archive.load(name))

    q, k, v = map(load, "qkv")
    keywords |= {name: load(name) for name in ("bias", "mask") if name in archive.arrays}
    print(f"computing on {device.backend} ({device.reason})", file=sys.stderr)
    start = time.perf_counter()
    with Progress(*_COLUMNS, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("forward", total=None)  # the first call of a kernel may compile it
        fwd = cuattn.forward(q, k, v, rng=state, out_dtype=options.out_dtype, **keywords)
        results = fwd._asdict()
        if fwd.rng_state is not None:
            results["rng_state"] = np.array(fwd.rng_state, np.uint64)
        if options.backward:
            progress.update(task, description="backward")
            if archive.arrays["do"].shape != fwd.o.shape:
                raise ShapeError(f"do has shape {archive.arrays['do'].shape}; expected {fwd.o.shape}, the shape of o")
            grads = cuattn.backward(load("do"), q, k, v, fwd, deterministic=options.deterministic, **keywords)
            results |= grads._asdict()
        results = {name: device.fetch(array) for name, array in results.items() if array is not None}
    seconds = time.perf_counter() - start
    files.write(options.output, results)
    shapes = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in results.items())
    print(f"wrote {options.output} after {seconds:.3f} s: {shapes}")
    return 0


def _keywords(options, archive):
    """Return the keyword arguments that forward and backward share, but for arrays."""
    names = "is_causal", "scale", "softcap", "dropout_p", "enable_gqa", "precision", "kernel"
    keywords = {name: getattr(options, name) for name in names}
    if options.mask:
        if "mask" in archive.arrays:
            raise ArgumentError(f"--mask {options.mask[0]} is given and {options.input} has a mask; expected one mask")
        lengths = [np.atleast_2d(archive.arrays[name]).shape[-2] for name in "qk"]
        keywords["mask"] = build_mask(options.mask, *lengths)
    if options.window:
        keywords["window"] = tuple(literal("--window", word) for word in options.window)
    return keywords


def _check_shapes(archive, keywords):
    """Raise what the API raises for arrays that do not fit together, before they take memory."""
    given = {**keywords, "kernel": None, **archive.arrays}
    given.pop("do", None)
    cuattn.plan(given.pop("q"), given.pop("k"), given.pop("v"), **given)
