"""Compute a problem in parts, each with its origin, and put the parts together again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuattn
from cuattn import masks

__all__ = ["Plan", "draw_plan", "run_parts"]

Pieces = list[tuple[int, int]]
"""Global (start, stop) of the pieces of an axis that a part takes, in ascending order."""


@dataclass(frozen=True)
class Plan:
    """How a problem is cut: row parts times key parts, for each of some slices of the leading axes."""

    rows: list[Pieces]
    keys: list[Pieces]
    leading: list[tuple[slice, ...]]
    group: int


def draw_plan(problem: Any, rng: np.random.Generator) -> Plan:
    """Cut a problem at random, where dropout and blocks allow."""
    dropout = 16 if problem.variant.dropout_p else 1
    units = [dropout, dropout]
    for part in getattr(problem.mask, "parts", (problem.mask,)):
        if isinstance(part, masks.BlockMask):
            units = [math.lcm(unit, block) for unit, block in zip(units, (part.block_m, part.block_n), strict=True)]
    lengths = problem.q.shape[-2], problem.k.shape[-2]
    rows, keys = (_parts(rng, length, unit) for length, unit in zip(lengths, units, strict=True))
    return Plan(rows, keys, *_leading(problem, rng))


def _parts(rng: np.random.Generator, length: int, unit: int) -> list[Pieces]:
    """Deal out the pieces between random cuts to at most three parts."""
    places = np.arange(unit, length, unit)
    cuts = np.sort(rng.choice(places, min(len(places), int(rng.integers(0, 6))), replace=False)).tolist()
    pieces = list(itertools.pairwise([0, *cuts, length]))
    owner = rng.integers(0, rng.integers(1, 4), len(pieces))
    parts = [[piece for piece, index in zip(pieces, owner, strict=True) if index == own] for own in np.unique(owner)]
    return [part for part in parts if part]


def _leading(problem: Any, rng: np.random.Generator) -> tuple[list[tuple[slice, ...]], int]:
    """Cut the first batch axis or the heads in two where every operand has them; return the slices and the group."""
    lead, key_lead = problem.lead, problem.k.shape[:-2]
    group = lead[-1] // key_lead[-1] if "grouped" in problem.features and key_lead[-1] > 1 else 1
    own_mask = problem.mask is not None and not isinstance(problem.mask, np.ndarray)
    full = problem.q.shape[:-2] == lead and problem.v.shape[:-2] == key_lead and len(key_lead) == len(lead)
    full = full and key_lead == (*lead[:-1], lead[-1] // group) if lead else False
    if own_mask or not full or 0 in lead or rng.random() < 0.5:
        return [()], group
    slices = []
    for n, unit in ((lead[0], 1), (lead[-1], group)) if len(lead) == 2 else ((lead[-1], group),):
        cut = unit * int(rng.integers(0, n // unit))
        slices.append([slice(0, n)] if len(lead) > 2 or not cut else [slice(0, cut), slice(cut, n)])
    whole = [slice(None)] * (len(lead) - len(slices))
    return [(*whole, *combination) for combination in itertools.product(*slices)], group


def run_parts(
    plan: Plan, problem: Any, given: dict[str, Any], options: dict[str, Any], exact: Any, xp: Any, call: Callable
) -> tuple[dict[str, Any], set[Any]]:
    """Compute forward and backward part by part.

    Parameters
    ----------
    plan : Plan
    problem : Problem
    given : dict of str to array
        q, k, v, do and, where there are, bias and dlse, as the library gets them.
    options : dict
        Keyword arguments of both directions but these.
    exact : Solution
        Whose shapes the results have.
    xp : module
    call : callable
        ``call(function, *arrays, **options)``.

    Returns
    -------
    results : dict of str to array
        Under the names of the API, in the precision of the sums.
    states : set
        The random states that the merged forwards hold.
    """
    sums = np.float64 if given["q"].dtype == np.float64 else np.float32
    names = [name for name in ("o", "l", "m", "dq", "dk", "dv", "dbias") if getattr(exact, name) is not None]
    results = {name: xp.zeros(getattr(exact, name).shape, sums) for name in names}
    states = set()
    for lead, rows in itertools.product(plan.leading, plan.rows):
        parts, sizes = [], (problem.q.shape[-2], problem.k.shape[-2])
        for keys in plan.keys:
            arrays = _cut(xp, given, lead, plan.group, rows, keys)
            origin = _origin(problem, lead, rows, keys, sizes)
            mask = _cut_mask(xp, options["mask"], lead, rows, keys)
            more = {**options, "mask": mask, "bias": arrays.get("bias"), "origin": origin, "out_dtype": sums}
            fwd = call(cuattn.forward, arrays["q"], arrays["k"], arrays["v"], **more)
            parts.append((keys, arrays, more, fwd))
        merged = cuattn.merge(*(fwd for *_, fwd in parts))
        states.add(merged.rng_state)
        i = _indices(xp, rows)
        for name, x in zip("olm", merged[:3], strict=True):
            results[name][_place(results[name], lead, i if name != "o" else (i, None))] = x
        for keys, arrays, more, fwd in parts:
            whole = merged._replace(rng_state=fwd.rng_state)
            more["dlse"] = arrays.get("dlse")
            grads = call(cuattn.backward, arrays["do"], arrays["q"], arrays["k"], arrays["v"], whole, **more)
            j = _indices(xp, keys)
            key_lead = _key_slices(lead, plan.group)
            for name, x, at in (("dq", grads.dq, lead), ("dk", grads.dk, key_lead), ("dv", grads.dv, key_lead)):
                results[name][_place(results[name], at, (i if name == "dq" else j, None))] += x
            if grads.dbias is not None:
                _add_bias(xp, results["dbias"], grads.dbias, lead, i, j)
    return results, states


def _origin(problem: Any, lead: tuple[slice, ...], rows: Pieces, keys: Pieces, sizes: tuple[int, int]) -> Any:
    cut = {} if not lead else {"head": lead[-1].start or 0, "heads": problem.lead[-1]}
    if len(lead) == 2:
        cut["batch"] = lead[0].start or 0
    return cuattn.Origin(row=_runs(rows), key=_runs(keys), n_queries=sizes[0], n_keys=sizes[1], **cut)


def _runs(pieces: Pieces) -> Any:
    """Return the pieces as an origin names them."""
    if len(pieces) == 1:
        return pieces[0][0]
    local = itertools.accumulate((stop - start for start, stop in pieces[:-1]), initial=0)
    return tuple((at, start) for at, (start, _) in zip(local, pieces, strict=True))


def _indices(xp: Any, pieces: Pieces) -> Any:
    return xp.concatenate([xp.arange(*piece) for piece in pieces])


def _key_slices(lead: tuple[slice, ...], group: int) -> tuple[slice, ...]:
    if not lead or lead[-1].start is None:
        return lead
    return (*lead[:-1], slice(lead[-1].start // group, lead[-1].stop // group))


def _cut(
    xp: Any, given: dict[str, Any], lead: tuple[slice, ...], group: int, rows: Pieces, keys: Pieces
) -> dict[str, Any]:
    """Return a part's arrays."""
    i, j, found = _indices(xp, rows), _indices(xp, keys), {}
    for name, x in given.items():
        if x is None:
            continue
        if name == "bias":
            found[name] = _cut_scores(x, lead, i, j)
        elif name == "dlse":
            found[name] = x[lead][..., i] if lead else x[..., i]
        else:
            at = lead if name in ("q", "do") else _key_slices(lead, group)
            found[name] = (x[at] if at else x)[..., i if name in ("q", "do") else j, :]
    return found


def _cut_scores(x: Any, lead: tuple[slice, ...], i: Any, j: Any) -> Any:
    """Return a part of an array that broadcasts to the scores."""
    x = x[_where_long(x.shape[:-2], lead)]
    x = x if x.shape[-2] == 1 else x[..., i, :]
    return x if x.shape[-1] == 1 else x[..., j]


def _where_long(shape: tuple[int, ...], lead: tuple[slice, ...]) -> tuple[slice, ...]:
    """Return the slices of the leading axes that an array of leading `shape` has and does not broadcast."""
    if not lead or not shape:
        return ()
    lead = lead[-len(shape) :]
    return tuple(slice(None) if n == 1 else part for n, part in zip(shape[-len(lead) :], lead, strict=True))


def _cut_mask(xp: Any, mask: Any, lead: tuple[slice, ...], rows: Pieces, keys: Pieces) -> Any:
    if mask is None:
        return None
    if hasattr(mask, "restrict"):
        return mask.restrict(rows, keys)
    return _cut_scores(mask, lead, _indices(xp, rows), _indices(xp, keys))


def _place(x: Any, lead: tuple[slice, ...], rows: Any) -> tuple[Any, ...]:
    """Return the index of some rows of some heads."""
    rows, *rest = rows if isinstance(rows, tuple) else (rows,)
    return (
        *lead,
        *(slice(None) for _ in range(x.ndim - len(lead) - 1 - len(rest))),
        rows,
        *(slice(None) for _ in rest),
    )


def _add_bias(xp: Any, total: Any, part: Any, lead: tuple[slice, ...], i: Any, j: Any) -> None:
    view = total[_where_long(total.shape[:-2], lead)]
    i, j = (at if n != 1 else xp.zeros(1, int) for at, n in zip((i, j), view.shape[-2:], strict=True))
    view[..., i[:, None], j] += part
