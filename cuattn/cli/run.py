"""``python -m cuattn run``: attention on the arrays of a file."""

import sys
import time

import numpy as np

import cuattn
from cuattn.cli import devices, files
from cuattn.cli.mask_argument import build_mask, literal
from cuattn.errors import ArgumentError, ShapeError

__all__ = ["run"]


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
    archive = files.Archive(options.input, ("q", "k", "v", "do") if options.backward else ("q", "k", "v"))
    state, keywords = _state(options), _keywords(options, archive)
    _check_shapes(archive, keywords)
    device = devices.pick(options.device, options.kernel)
    q, k, v = (device.put(archive.load(name)) for name in "qkv")
    keywords |= {name: device.put(archive.load(name)) for name in ("bias", "mask") if name in archive.arrays}
    print(f"computing on {device.backend} ({device.reason})", file=sys.stderr)
    start = time.perf_counter()
    fwd = cuattn.forward(q, k, v, rng=state, out_dtype=options.out_dtype, **keywords)
    results = fwd._asdict()
    state = results.pop("rng_state")
    if options.backward:
        if archive.arrays["do"].shape != fwd.o.shape:
            raise ShapeError(f"do has shape {archive.arrays['do'].shape}; expected {fwd.o.shape}, the shape of o")
        do = device.put(archive.load("do"))
        results |= cuattn.backward(do, q, k, v, fwd, deterministic=options.deterministic, **keywords)._asdict()
    results = {name: device.fetch(array) for name, array in results.items() if array is not None}
    seconds = time.perf_counter() - start
    if state is not None:
        results["rng_state"] = np.array(state, np.uint64)
    files.write(options.output, results)
    shapes = ", ".join(f"{name} {array.shape} {array.dtype}" for name, array in results.items())
    print(f"wrote {options.output} after {seconds:.3f} s: {shapes}")
    return 0


def _keywords(options, archive):
    """Return the keyword arguments that forward and backward share, but for arrays."""
    mask = None
    if options.mask is not None:
        if "mask" in archive.arrays:
            raise ArgumentError(f"--mask {options.mask[0]} is given and {options.input} has a mask; expected one mask")
        shapes = [archive.arrays[name].shape for name in "qk"]
        mask = build_mask(options.mask, *(shape[-2] if len(shape) >= 2 else 0 for shape in shapes))
    window = options.window and tuple(literal("--window", word) for word in options.window)
    names = "is_causal", "scale", "softcap", "dropout_p", "enable_gqa", "precision", "kernel"
    return {"mask": mask, "window": window, **{name: getattr(options, name) for name in names}}


def _check_shapes(archive, keywords):
    """Raise what the API raises for arrays that do not fit together, before they take memory."""
    arrays = {name: array for name, array in archive.arrays.items() if name != "do"}
    cuattn.plan(arrays.pop("q"), arrays.pop("k"), arrays.pop("v"), **{**keywords, "kernel": None, **arrays})


def _state(options):
    """Return dropout's random state, or None for a fresh one."""
    if options.seed is not None:
        return cuattn.RNGState(options.seed, options.offset)
    if options.offset:
        raise ArgumentError(f"--offset {options.offset} is given without --seed; expected both")
    return None
