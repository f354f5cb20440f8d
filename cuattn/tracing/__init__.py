"""A plain Python function of (s, b, h, i, j), or of (b, h, i, j), as a graph; everything else follows from the graph.

:func:`trace` calls a function once with stand-ins and returns what it computes as a graph of :class:`Node`, which
with the arrays and numbers of a call (``traced.bind(args)``) is a :class:`Bound`.  From that:

- :func:`evaluate` computes it by NumPy, in float32 or float64;
- :func:`derivative`, :func:`weights` and :func:`along` are its derivatives, graphs again; :func:`addend` tells
  functions that only add to s, :func:`split_visible` those that hide;
- :func:`source` writes it as CUDA, several functions in one text if they are :func:`joined`;
- :func:`tile_states` classifies the tiles of a mask, :func:`tile_source` is the CUDA text that does so for arrays on
  a device, and :func:`columns` finds the column mask that a mask is.

Graphs that compute the same are one object, so that what is made of them is kept under them.
"""

from cuattn.tracing.bound import ANY_LENGTH, Bound, Facts, Frozen, facts, joined
from cuattn.tracing.cuda import Source, source
from cuattn.tracing.cuda_tiles import tile_source
from cuattn.tracing.derivatives import (
    Weight,
    addend,
    along,
    derivative,
    is_affine,
    is_linear,
    row_step,
    split_visible,
    weights,
)
from cuattn.tracing.functions import MASK, SCORE, Traced, kind_of_argument, recall, trace
from cuattn.tracing.graph import B, H, I, J, Node, S
from cuattn.tracing.recognition import columns
from cuattn.tracing.tiles import bounds, tile_states
from cuattn.tracing.values import Program, evaluate, host_value

__all__ = [
    "ANY_LENGTH",
    "MASK",
    "SCORE",
    "B",
    "Bound",
    "Facts",
    "Frozen",
    "H",
    "I",
    "J",
    "Node",
    "Program",
    "S",
    "Source",
    "Traced",
    "Weight",
    "addend",
    "along",
    "bounds",
    "columns",
    "derivative",
    "evaluate",
    "facts",
    "host_value",
    "is_affine",
    "is_linear",
    "joined",
    "kind_of_argument",
    "recall",
    "row_step",
    "source",
    "split_visible",
    "tile_source",
    "tile_states",
    "trace",
    "weights",
]
