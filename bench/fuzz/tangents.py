"""Hold a problem's derivatives along tangents to the rule."""

from __future__ import annotations

import numpy as np

import cuattn
from tests import oracle
from tests.derivatives import GRADIENTS, JVP, TANGENTS, Known, tangents_of

__all__ = ["check"]

OPERANDS = ("q", "k", "v", "do", "bias")


def check(run, state):
    """Compute a problem's jvp, backward_jvp and double backward along the tangents that it names.

    Parameters
    ----------
    run : object
        The run of `bench.fuzz.running`, with its problem, target, and what the library is given.
    state : RNGState or None
        Of dropout.
    """
    problem, target, wide = run.problem, run.target, run.problem.stat_dtype
    clean = {name: problem.arrays.get(name) for name in OPERANDS}
    tangents = tangents_of(clean, problem.tangents)
    options = {name: problem.options.get(name) for name in ("scale", "softcap")}
    options |= {"visible": problem.visible, "dlse": problem.arrays.get("dlse")}
    options |= oracle.dropped(state, problem.options.get("dropout_p", 0.0), problem.shape)
    with np.errstate(all="ignore"):
        known = Known({**clean, **tangents}, options, samples=6)  # of equal numbers one may be small by luck
    given = {name: None if x is None else target.put(_poisoned(run, name[1:], x)) for name, x in tangents.items()}
    along = {name: x for name, x in given.items() if name != "tdo"}
    jvp = run._call(cuattn.jvp, **along, out_dtype=wide)
    _hold(run, known, JVP, [*jvp[:3], *jvp[4:]])
    for deterministic in {False, "deterministic" in problem.checks}:
        pair = run._call(cuattn.backward_jvp, jvp, **given, deterministic=deterministic, out_dtype=None)
        for names, found in zip((GRADIENTS, TANGENTS), pair, strict=True):
            _hold(run, known, names, found)
    if given["tdo"] is None:
        gradients = [along.pop(name) for name in ("tq", "tk", "tv")]
        options = {**run.given, **run.options, "gdbias": along["tbias"], "out_dtype": None}
        taken = {name: x for name, x in options.items() if name not in ("q", "k", "v", "do", "rng")}
        arrays = [options[name] for name in ("do", "q", "k", "v")]
        double = cuattn.double_backward(*gradients, *arrays, jvp, **taken)
        _hold(run, known, ("to", *TANGENTS), double)


def _poisoned(run, name, tangent):
    """Return a tangent with something bad wherever that is in its operand."""
    host, clean = run.host[name], run.problem.arrays[name]
    with np.errstate(invalid="ignore"):
        bad = ~((host == clean) | (np.isnan(host.astype(np.float64)) & np.isnan(clean.astype(np.float64))))
    return np.where(bad, tangent.dtype.type(run.problem.poison or 0), tangent)


def _hold(run, known, names, results):
    """Note what does not keep the rule."""
    for name, x in zip(names, results, strict=True):
        try:
            known.check([name], [None if x is None else run.target.get(x)])
        except AssertionError as error:
            run.complain(f"{name} along tangents", str(error))
