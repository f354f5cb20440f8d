"""TEMPORARY dense stand-in on this branch until the tiled backend is wired to the new door."""

import numpy as np

from cuattn import rng as _rng
from cuattn.plans import Plan

FAMILIES = ("cpu",)


def plan(problem, operands, masks):
    return Plan("cpu", problem.operation, 1, 1, 1, 0, 0, "dense stand-in")


def _heads(x, problem, rank):
    return (
        np.broadcast_to(x, (*problem.batch, problem.heads, *x.shape[rank - 2 :]))
        if x.shape[rank - 3] in (1, problem.heads)
        else np.broadcast_to(
            np.repeat(x, problem.heads // x.shape[rank - 3], axis=rank - 3),
            (*problem.batch, problem.heads, *x.shape[rank - 2 :]),
        )
    )


def _scores(problem, operands, masks, state, place):
    stat = problem.stat_dtype
    rank = len(problem.batch) + 3
    q, k, v = (_heads(operands[n].astype(stat), problem, rank) for n in "qkv")
    x = np.float64(problem.scale) * (q @ k.swapaxes(-1, -2))
    t = problem.softcap * np.tanh(x / problem.softcap) if problem.softcap else x
    s = t + operands["bias"].astype(stat) if "bias" in operands else t.copy()
    s = np.broadcast_to(s, problem.score_shape).astype(np.float64)
    see = np.ones(problem.score_shape, bool)
    for mask in masks:
        see &= np.broadcast_to(mask.bind(problem.n_queries, problem.n_keys).dense(), problem.score_shape)
    if problem.band:
        i = np.arange(problem.n_queries)[:, None] + problem.band.offset + place.shift
        j = np.arange(problem.n_keys)
        if problem.band.left is not None:
            see &= j >= i - problem.band.left
        if problem.band.right is not None:
            see &= j <= i + problem.band.right
    s = np.where(see, s, -np.inf)
    keep = np.ones(problem.score_shape)
    if problem.dropout:
        for n, index in enumerate(np.ndindex(*problem.batch, problem.heads)):
            ib, ih = divmod(n, problem.heads)
            b = (place.batch + ib) * place.heads + place.head + ih
            rows = (
                place.row + np.arange(problem.n_queries)
                if place.row_blocks is None
                else (place.row_blocks[:, None] + np.arange(16)).ravel()[: problem.n_queries]
            )
            keys = (
                place.key + np.arange(problem.n_keys)
                if place.key_blocks is None
                else (place.key_blocks[:, None] + np.arange(16)).ravel()[: problem.n_keys]
            )
            full = _rng.draws(state, b, (0, int(rows.max()) + 1), (0, int(keys.max()) + 1)) >= problem.dropout
            keep[index] = full[np.ix_(rows, keys)] * problem.dropout_scale
    return q, k, v, x, t, s, keep


def _give(name, value, dtype, out):
    value = value.astype(dtype)
    if name in out:
        out[name][...] = value
        return out[name]
    return value


def run(problem, operands, masks, state, place, out):
    q, k, v, x, t, s, keep = _scores(problem, operands, masks, state, place)
    stat = problem.stat_dtype
    if problem.operation == "forward":
        m = s.max(-1, initial=-np.inf)
        e = np.exp(s - np.where(np.isfinite(m), m, 0)[..., None])
        l = e.sum(-1)
        o = (e * keep / np.where(l, l, 1)[..., None]) @ v
        found = {"o": _give("o", o, problem.out_dtype, out)}
        if problem.statistics:
            found |= {"l": _give("l", l, stat, out), "m": _give("m", m, stat, out)}
        return found
    l, m = operands["l"].astype(np.float64), operands["m"].astype(np.float64)
    do, o = operands["do"].astype(np.float64), operands["o"].astype(np.float64)
    p = np.exp(s - np.where(np.isfinite(m), m, 0)[..., None]) / np.where(l, l, 1)[..., None]
    p = np.where(l[..., None] > 0, p, 0)
    D = (do * o).sum(-1) - (operands["dlse"] if "dlse" in operands else 0)
    ds = p * ((do @ v.swapaxes(-1, -2)) * keep - D[..., None])
    dx = ds * (1 - (t / problem.softcap) ** 2) if problem.softcap else ds
    grads = {
        "dq": problem.scale * dx @ k,
        "dk": problem.scale * dx.swapaxes(-1, -2) @ q,
        "dv": (p * keep).swapaxes(-1, -2) @ do,
        "dbias": ds,
    }
    found = {}
    for name, g in grads.items():
        if name[1:] not in operands:
            continue
        like = operands[name[1:]]
        group = problem.heads // like.shape[-3] if name in ("dk", "dv") and like.shape[-3] > 1 else 1
        if group > 1:
            g = g.reshape(*g.shape[:-3], like.shape[-3], group, *g.shape[-2:]).sum(-3)
        for axis, (a, b) in enumerate(zip(g.shape, like.shape)):
            if a != b:
                g = g.sum(axis, keepdims=True)
        dtype = problem.out_dtype if name != "dbias" else problem.grad_dtype(like.dtype)
        found[name] = _give(name, g, dtype, out)
    return found


def merge(parts):
    stat = parts[0][1].dtype
    m = np.maximum.reduce([p[2] for p in parts])
    safe = np.where(np.isfinite(m), m, 0)
    w = [p[1] * np.exp(p[2] - safe) for p in parts]
    l = sum(w)
    o = sum(p[0].astype(np.float64) * x[..., None] for p, x in zip(parts, w)) / np.where(l, l, 1)[..., None]
    return o.astype(parts[0][0].dtype), l.astype(stat), m
