"""Hypothesis strategies for whole attention problems, with their dense twins for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cuattn
from cuattn import rng as cuattn_rng
from tests import oracle

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))

MASK_KINDS = ("none", "causal", "window", "dense", "column", "block", "document")


@dataclass(repr=False)
class Case:
    """An attention problem: arrays, keyword arguments, and the dense visibility and keep matrices."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    visible: np.ndarray | None
    options: dict = field(default_factory=dict)  # for the library
    bias: np.ndarray | None = None
    note: str = ""

    def __repr__(self):
        shapes = f"q {self.q.shape}, k {self.k.shape}, v {self.v.shape}, {self.q.dtype}"
        options = {name: _short(value) for name, value in self.options.items()}
        return f"Case({shapes}, bias {None if self.bias is None else self.bias.shape}, {self.note}, {options})"

    def arguments(self, put=lambda x: x):
        """Return (q, k, v) and keyword arguments for the library."""
        options = {
            name: put(np.asarray(value)) if isinstance(value, np.ndarray) else value
            for name, value in self.options.items()
        }
        if self.bias is not None:
            options["bias"] = put(self.bias)
        return (put(self.q), put(self.k), put(self.v)), options

    @property
    def keep(self):
        """Dense keep decisions and their scale."""
        t = cuattn_rng.threshold(self.options.get("dropout_p", 0.0))
        if not t:
            return None, 1.0
        state = cuattn_rng.resolve(self.options["rng"])
        lead = self.do.shape[:-2]
        nq, nk = self.q.shape[-2], self.k.shape[-2]
        count = int(np.prod(lead)) if lead else 1
        kept = [cuattn_rng.keep(state, t, b, (0, nq), (0, nk)) for b in range(count)]
        return np.array(kept, bool).reshape(*lead, nq, nk), 65536 / (65536 - t)

    def reference(self):
        """Return keyword arguments for the oracle."""
        keep, keep_scale = self.keep
        return dict(
            visible=self.visible,
            bias=self.bias,
            scale=self.options.get("scale"),
            softcap=self.options.get("softcap"),
            keep=keep,
            keep_scale=keep_scale,
        )


def _short(value):
    return f"array{value.shape}" if isinstance(value, np.ndarray) else value


def normal(rng, shape, dtype):
    """Normal numbers with a few outliers and an offset, so that the softmax is peaked in places."""
    x = rng.standard_normal(shape)
    if x.size:
        x[rng.random(shape) < 0.02] *= 4
    return (x + 0.2).astype(dtype)


@st.composite
def cases(draw, dtypes=DTYPES, max_length=70, head_dims=(1, 8, 16, 33, 64), mask_kinds=MASK_KINDS, plain=False):
    """Draw a :class:`Case`; `plain` leaves out dropout, bias, softcap, broadcasting and grouped heads."""
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nq = draw(st.integers(0, max_length))
    nk = nq if draw(st.booleans()) else draw(st.integers(0, max_length))
    d, dv = draw(st.sampled_from(head_dims)), draw(st.sampled_from(head_dims))
    layout = "heads" if plain else draw(st.sampled_from(("rank2", "heads", "batch", "gqa", "broadcast", "swapped")))
    q, k, v = _operands(draw, rng, layout, nq, nk, d, dv, dtype)
    lead = np.broadcast_shapes(
        q.shape[:-2], k.shape[:-2] if layout != "gqa" else (), v.shape[:-2] if layout != "gqa" else ()
    )
    options, visible = _visibility(draw, rng, mask_kinds, lead, nq, nk)
    bias = None
    if layout == "gqa":
        options["enable_gqa"] = True
    if not plain:
        if draw(st.booleans()):
            options["scale"] = draw(st.sampled_from((0.3, -0.2, 0.0, 1.0)))
        if draw(st.integers(0, 3)) == 0:
            options["softcap"] = draw(st.sampled_from((1.5, 20.0)))
        if draw(st.integers(0, 2)) == 0:
            options["dropout_p"] = draw(st.sampled_from((0.1, 0.5, 0.9)))
            options["rng"] = cuattn.RNGState(draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 9)))
        if draw(st.integers(0, 2)) == 0:
            bias = _bias(draw, rng, lead, nq, nk, dtype)
    do = normal(rng, (*lead, nq, dv), dtype)
    return Case(q, k, v, do, visible, options, bias, layout)


def _operands(draw, rng, layout, nq, nk, d, dv, dtype):
    """Return q, k, v of one of the layouts that the API takes."""
    heads = draw(st.integers(1, 4))
    if layout == "rank2":
        return normal(rng, (nq, d), dtype), normal(rng, (nk, d), dtype), normal(rng, (nk, dv), dtype)
    if layout == "gqa":
        kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return (
            normal(rng, (2, kv * group, nq, d), dtype),
            normal(rng, (2, kv, nk, d), dtype),
            normal(rng, (2, kv, nk, dv), dtype),
        )
    if layout == "broadcast":
        one = draw(st.sampled_from(((1, heads), (2, 1), (1, 1), (heads,), ())))
        return (
            normal(rng, (2, heads, nq, d), dtype),
            normal(rng, (*one, nk, d), dtype),
            normal(rng, (*draw(st.sampled_from((one, (2, heads)))), nk, dv), dtype),
        )
    if layout == "swapped":  # (B, N, H, d) data seen through swapaxes, and a reversed axis
        q, k, v = (normal(rng, (2, n, heads, e), dtype).swapaxes(1, 2) for n, e in ((nq, d), (nk, d), (nk, dv)))
        return q[:, :, ::-1], k, v[::-1]
    lead = (heads,) if layout == "heads" else (draw(st.integers(0, 2)), draw(st.integers(1, 2)), heads)
    return normal(rng, (*lead, nq, d), dtype), normal(rng, (*lead, nk, d), dtype), normal(rng, (*lead, nk, dv), dtype)


def _visibility(draw, rng, kinds, lead, nq, nk):
    """Return the mask arguments and their dense meaning (None: everything is visible)."""
    kind = draw(st.sampled_from(kinds))
    offset = {"top_left": 0, "bottom_right": nk - nq}
    if kind == "none":
        return {}, None
    if kind == "causal":
        align = draw(st.sampled_from(("top_left", "bottom_right")))
        value = True if nq == nk and draw(st.booleans()) else align
        return {"is_causal": value}, oracle.visible_band(nq, nk, None, 0, offset[align])
    if kind == "window":
        align = draw(st.sampled_from(("top_left", "bottom_right")))
        left, right = (draw(st.one_of(st.none(), st.integers(0, 20))) for _ in range(2))
        return {"window": (left, right, align)}, oracle.visible_band(nq, nk, left, right, offset[align])
    if kind == "dense":
        shape = draw(st.sampled_from([(nq, nk), (1, nk), (nq, 1), (*lead, nq, nk)]))
        mask = rng.random(shape) < draw(st.sampled_from((0.1, 0.6)))
        return {"mask": mask}, np.broadcast_to(mask, (*np.broadcast_shapes(shape[:-2]), nq, nk))
    if kind == "block":
        bm, bn = draw(st.sampled_from((1, 5, 16, 64))), draw(st.sampled_from((1, 7, 32)))
        blocks = rng.random((*draw(st.sampled_from([(), lead])), -(-nq // bm), -(-nk // bn))) < 0.5
        dense = np.repeat(np.repeat(blocks, bm, -2), bn, -1)[..., :nq, :nk]
        mask = cuattn.BlockMask(blocks, bm, bn) if nq and nk else None
        return ({"mask": mask}, dense) if mask is not None else ({}, None)
    if kind == "document" and nq == nk:
        cuts = np.sort(rng.integers(0, nq + 1, 2))
        lengths = [int(cuts[0]), int(cuts[1] - cuts[0]), int(nq - cuts[1])]
        mask = cuattn.masks.causal_document(lengths)
        options = {"mask": mask}
        visible = mask.dense()
        if draw(st.booleans()):
            options["window"] = (5, 5)
            visible = visible & oracle.visible_band(nq, nk, 5, 5, 0)
        return options, visible
    vectors = [rng.integers(0, nq + 1, (*draw(st.sampled_from([(), lead])), nk)) for _ in range(4)]
    lts, lte, uts, ute = (x.astype(np.int32) for x in np.broadcast_arrays(*vectors))
    mask = cuattn.ColumnMask(lts, lte, uts, ute, n_queries=nq)
    i = np.arange(nq)[:, None]
    hidden = ((lts[..., None, :] <= i) & (i < lte[..., None, :])) | ((uts[..., None, :] <= i) & (i < ute[..., None, :]))
    return {"mask": mask}, ~hidden


def _bias(draw, rng, lead, nq, nk, dtype):
    shape = draw(st.sampled_from([(nq, nk), (1, nk), (nq, 1), (1, 1), (*lead, nq, nk), (*(1 for _ in lead), nq, nk)]))
    bias = rng.standard_normal(shape).astype(draw(st.sampled_from((dtype, np.dtype(np.float32)))))
    if draw(st.booleans()) and bias.size:
        bias[rng.random(shape) < 0.2] = -np.inf
    return bias if dtype != np.float64 or bias.dtype == dtype else bias.astype(np.float32)
