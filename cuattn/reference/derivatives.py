"""Textbook derivatives of attention along tangents, every N x N matrix written out: what results are compared with.

As :mod:`cuattn.reference.textbook`, the exact answer, or that of a chain of array operations in a low precision.
"""

from typing import Any, NamedTuple

import numpy as np

from cuattn.reference.textbook import arithmetic, exponentials, repeat_heads, sum_heads, sum_to, visibility


class Derivatives(NamedTuple):
    """What `differentiate` returns, under the names of the API; "t" stands for a tangent.

    Attributes
    ----------
    o, l, m, to, tlse : array
        Of :func:`cuattn.jvp`.
    dq, dk, dv, dbias, tdq, tdk, tdv, tdbias : array
        Of :func:`cuattn.backward_jvp`; None without `do`, dbias and tdbias without a bias.
    s, ts, ds, tds : array, (..., Hq, Nq, Nk)
        Masked scores, the gradients of scores, and the tangents of both.
    """

    o: Any
    l: Any
    m: Any
    to: Any
    tlse: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    tdq: Any
    tdk: Any
    tdv: Any
    tdbias: Any
    s: Any
    ts: Any
    ds: Any
    tds: Any


def differentiate(
    q,
    k,
    v,
    do=None,
    *,
    tq=None,
    tk=None,
    tv=None,
    tbias=None,
    tdo=None,
    visible=None,
    keep=None,
    keep_scale=1.0,
    bias=None,
    scale=None,
    softcap=None,
    score=None,
    dlse=None,
    low=None,
    noise=None,
):
    """Compute attention, its derivative along tangents and, with `do`, the gradients and theirs.

    Parameters
    ----------
    q, k, v, do : array
        As of :func:`cuattn.reference.textbook.solve`, of which this is the derivative.
    tq, tk, tv, tbias, tdo : array, optional
        Tangents; None is 0.
    visible, keep, keep_scale, bias, scale, softcap, dlse, low : optional
        As there; dlse has no tangent.
    score : callable, optional
        Of scores and their tangents, which it replaces: it returns the new ones, the derivative by scores, and the
        tangent of that.

    noise : (callable, callable, callable), optional
        In place of rounding to `low`: what becomes of intermediate results, of weights in products, and of what these
        sum up to over the keys.

    Returns
    -------
    Derivatives

    Examples
    --------
    >>> import numpy as np
    >>> x = np.eye(2)
    >>> differentiate(x, x, x, tv=np.ones((2, 2))).to
    array([[1., 1.],
           [1., 1.]], dtype=float128)
    """
    xp, work, plain = arithmetic(q, low)
    rounded, short, summed = noise or (plain, plain, plain)
    scale = work.type(q.shape[-1] ** -0.5 if scale is None else scale)
    seen, dead, empty = visibility(xp, q, k, v, visible, bias)
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    with np.errstate(all="ignore"):

        def taken(x, hidden, like):
            return xp.zeros(like.shape, work) if x is None else xp.where(hidden, 0, repeat_heads(x, q).astype(work))

        q, tq = (taken(x, empty, q) for x in (q, tq))
        k, tk = (taken(x, dead, repeat_heads(k, q)) for x in (k, tk))
        v, tv = (taken(x, dead, repeat_heads(v, q)) for x in (v, tv))
        x = rounded(scale * rounded(q @ k.swapaxes(-1, -2)))
        tx = rounded(scale * rounded(tq @ k.swapaxes(-1, -2) + q @ tk.swapaxes(-1, -2)))
        s, ts, slope, tslope = x, tx, work.type(1), work.type(0)
        if softcap is not None:
            cap, tanh = work.type(softcap), rounded(xp.tanh(x / work.type(softcap)))
            s, slope, tslope = rounded(cap * tanh), 1 - tanh**2, -2 * tanh * (1 - tanh**2) * tx / cap
            ts = rounded(slope * tx)
        if score is not None:
            s, ts, by_cap, tby_cap = (np.where(seen, y, 0).astype(work) for y in score(s, ts))
            s, ts, slope, tslope = rounded(s), rounded(ts), slope * by_cap, tslope * by_cap + slope * tby_cap
        if bias is not None:
            s = rounded(s + bias.astype(work))
            ts = ts if tbias is None else rounded(ts + tbias.astype(work))
        s, ts = xp.where(seen, s, -np.inf), xp.where(seen, ts, 0)
        m, l, p, none = exponentials(xp, s)
        p = short(xp.where(none, 0, p / l[..., None]))
        z = 1 if keep is None else keep * work.type(keep_scale)
        tlse = rounded((p * ts).sum(-1))
        gap = rounded(ts - tlse[..., None])
        tp = short(p * gap)
        dropped, tdropped = short(p * z), short(tp * z)
        o, to = summed(dropped @ v), summed(tdropped @ v + dropped @ tv)
        if do is None:
            return Derivatives(o, l, m, to, tlse, *[None] * 8, s, ts, None, None)
        do, tdo = (taken(y, empty, do) for y in (do, tdo))
        dp = rounded(rounded(do @ v.swapaxes(-1, -2)) * z)
        tdp = rounded(rounded(do @ tv.swapaxes(-1, -2) + tdo @ v.swapaxes(-1, -2)) * z)
        terms = (p * dp, tp * dp + p * tdp) if noise is None else (rounded(do * o), rounded(tdo * o) + rounded(do * to))
        delta, tdelta = (rounded(y.sum(-1)) for y in terms)  # with noise as whoever cannot hold p and dp has them
        if dlse is not None:
            delta = delta - dlse.astype(work)
        ds = rounded(p * (dp - delta[..., None]))
        tds = rounded(gap * ds + p * (tdp - tdelta[..., None]))
        dbias, tdbias = (None if bias is None else rounded(sum_to(y, bias.shape)) for y in (ds, tds))
        dx = short(xp.where(ds == 0, 0, ds * slope))
        tdx = short(xp.where(tds == 0, 0, tds * slope) + xp.where(ds == 0, 0, ds * tslope))
        dq = rounded(sum_to(scale * (dx @ k), shapes["q"]))
        dk = rounded(sum_heads(scale * (dx.swapaxes(-1, -2) @ q), shapes["k"]))
        dv = rounded(sum_heads(dropped.swapaxes(-1, -2) @ do, shapes["v"]))
        tdq = rounded(sum_to(scale * (tdx @ k + dx @ tk), shapes["q"]))
        tdk = rounded(sum_heads(scale * (tdx.swapaxes(-1, -2) @ q + dx.swapaxes(-1, -2) @ tq), shapes["k"]))
        tdv = rounded(sum_heads(tdropped.swapaxes(-1, -2) @ do + dropped.swapaxes(-1, -2) @ tdo, shapes["v"]))
    return Derivatives(o, l, m, to, tlse, dq, dk, dv, dbias, tdq, tdk, tdv, tdbias, s, ts, ds, tds)
