"""Hypothesis strategies for whole attention problems, with their dense twins for the oracle."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import cuattn
from bench.fuzz.masking import MAKERS
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
        options = self.options if self.bias is None else {**self.options, "bias": self.bias}
        found = {name: put(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
        return (put(self.q), put(self.k), put(self.v)), found

    def reference(self):
        """Return keyword arguments for the oracle."""
        shape = (*self.do.shape[:-1], self.k.shape[-2])
        dropped = oracle.dropped(self.options.get("rng"), self.options.get("dropout_p", 0.0), shape)
        given = {name: self.options.get(name) for name in ("scale", "softcap")}
        return dict(visible=self.visible, bias=self.bias, **dropped, **given)


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
    shapes = _leading(draw, layout)
    q, k, v = (normal(rng, (*s, *n), dtype) for s, n in zip(shapes, ((nq, d), (nk, d), (nk, dv)), strict=True))
    lead = shapes[0] if layout == "gqa" else np.broadcast_shapes(*shapes)
    if layout == "swapped":  # (B, N, H, d) data seen through swapaxes, and a reversed axis
        q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v))
        q, v = q[:, :, ::-1], v[::-1]
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


def _leading(draw, layout):
    """Return the leading axes of q, k and v in one of the layouts that the API takes."""
    heads = draw(st.integers(1, 4))
    if layout == "gqa":
        kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        return (2, kv * group), (2, kv), (2, kv)
    if layout == "broadcast":
        one = draw(st.sampled_from(((1, heads), (2, 1), (1, 1), (heads,), ())))
        return (2, heads), one, draw(st.sampled_from((one, (2, heads))))
    if layout == "batch":
        return 3 * ((draw(st.integers(0, 2)), draw(st.integers(1, 2)), heads),)
    return 3 * ({"rank2": (), "heads": (heads,), "swapped": (2, heads)}[layout],)


def _visibility(draw, rng, kinds, lead, nq, nk):
    """Return the mask arguments and their dense meaning (None: everything is visible)."""
    kind = draw(st.sampled_from(kinds))
    if kind == "none":
        return {}, None
    if kind in ("causal", "window"):
        align = draw(st.sampled_from(("top_left", "bottom_right")))
        offset = nk - nq if align == "bottom_right" else 0
        if kind == "causal":
            value = True if nq == nk and draw(st.booleans()) else align
            return {"is_causal": value}, oracle.visible_band(nq, nk, None, 0, offset)
        left, right = (draw(st.one_of(st.none(), st.integers(0, 20))) for _ in range(2))
        return {"window": (left, right, align)}, oracle.visible_band(nq, nk, left, right, offset)
    if kind == "document" and nq == nk:
        cuts = np.sort(rng.integers(0, nq + 1, 2))
        mask = cuattn.masks.causal_document(np.diff(cuts, prepend=0, append=nq).tolist())
        if draw(st.booleans()):
            return {"mask": mask, "window": (5, 5)}, mask.dense() & oracle.visible_band(nq, nk, 5, 5, 0)
        return {"mask": mask}, mask.dense()
    mask, visible, _ = MAKERS[{"dense": "boolean", "document": "column"}.get(kind, kind)](rng, *lead, nq, nk)
    return {"mask": mask}, visible


def _bias(draw, rng, lead, nq, nk, dtype):
    shape = draw(st.sampled_from([(nq, nk), (1, nk), (nq, 1), (1, 1), (*lead, nq, nk), (*(1 for _ in lead), nq, nk)]))
    bias = rng.standard_normal(shape).astype(draw(st.sampled_from((dtype, np.dtype(np.float32)))))
    if draw(st.booleans()) and bias.size:
        bias[rng.random(shape) < 0.2] = -np.inf
    return bias if dtype != np.float64 or bias.dtype == dtype else bias.astype(np.float32)
