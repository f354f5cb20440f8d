"""Hypothesis strategies for masks.

`column_masks` and `block_masks` draw masks of any content, `any_constructor` one of the paper's mask types.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cuattn import masks
from cuattn.masks import BlockMask, BooleanMask, ColumnMask, from_function
from cuattn.masks.constructors import band
from cuattn.tracing import MASK
from tests.tracing import expressions

MAX_LENGTH = 24
LEADING = ((), (1,), (3,), (2, 1), (1, 3), (2, 3))


def lengths_of(n):
    """Lists of lengths, some of them 0, that add up to n."""
    cuts = st.lists(st.integers(0, n), max_size=5).map(sorted)
    return cuts.map(lambda inner: [int(length) for length in np.diff([0, *inner, n])])


@st.composite
def intervals(draw, n_queries, shape, hostile=True):
    """Draw (start, end): random, or of the kinds that real masks have; `hostile` allows start > end."""
    start = draw(hnp.arrays(np.int32, shape, elements=st.integers(0, n_queries)))
    end = draw(hnp.arrays(np.int32, shape, elements=st.integers(0, n_queries)))
    kind = draw(st.sampled_from(("any", "any", "to the end", "from the start", "whole", "empty", "one interval")))
    if kind in ("to the end", "whole"):
        end = np.full_like(end, n_queries)
    if kind in ("from the start", "whole"):
        start = np.zeros_like(start)
    if kind == "empty":
        end = start.copy()
    if kind == "one interval" and start.size:
        start, end = np.full_like(start, start.flat[0]), np.full_like(end, end.flat[0])
    return (start, end) if hostile else (np.minimum(start, end), np.maximum(start, end))


def shapes(n_queries=None, n_keys=None, leading=None):
    """Draw the leading axes and lengths of a mask, each where it is None."""
    lengths = [st.integers(0, MAX_LENGTH) if n is None else st.just(n) for n in (n_queries, n_keys)]
    return st.tuples(st.sampled_from(LEADING) if leading is None else st.just(leading), *lengths)


@st.composite
def column_masks(draw, n_queries=None, n_keys=None, leading=None, hostile=True):
    """Draw a ColumnMask; what is None is drawn too."""
    leading, n_queries, n_keys = draw(shapes(n_queries, n_keys, leading))
    lts, lte = draw(intervals(n_queries, (*leading, n_keys), hostile))
    uts, ute = draw(intervals(n_queries, (*leading, n_keys), hostile))
    return ColumnMask(lts, lte, uts, ute, n_queries=n_queries)


@st.composite
def block_masks(draw, n_queries=None, n_keys=None, leading=None):
    """Draw (BlockMask, n_queries, n_keys): the mask alone does not know the lengths."""
    leading, n_queries, n_keys = draw(shapes(n_queries, n_keys, leading))
    block_m, block_n = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shape = (*leading, -(-n_queries // block_m), -(-n_keys // block_n))
    blocks = draw(hnp.arrays(np.bool_, shape))
    return BlockMask(blocks, block_m, block_n), n_queries, n_keys


@st.composite
def calls(draw, n):
    """Draw (constructor's name, arguments) of an n x n mask."""
    name = draw(st.sampled_from(sorted(_ARGUMENTS)))
    return name, _ARGUMENTS[name](draw, n)


def any_constructor(n):
    """Masks of n rows and keys from any constructor of `cuattn.masks`."""
    return calls(n).map(lambda call: getattr(masks, call[0])(*call[1]))


def _lengths(draw, n):
    return (draw(lengths_of(n)),)


def _prefix_documents(draw, n):
    return ([(draw(st.integers(0, length)), length) for length in draw(lengths_of(n))],)


def _questions(draw, n):
    documents = []
    for length in draw(lengths_of(n)):
        question, *answers = draw(lengths_of(length))
        documents.append((question, answers))
    return (documents,)


def _spans(draw, n):
    spans = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, n))
        spans.append((start, draw(st.integers(0, n - start))))
    return n, spans


_ARGUMENTS = {
    "full": lambda draw, n: (n,),
    "causal": lambda draw, n: (n,),
    "sliding_window": lambda draw, n: (n, draw(st.integers(0, n + 2))),
    "causal_document": _lengths,
    "document": _lengths,
    "share_question": _questions,
    "global_sliding_window": lambda draw, n: (n, draw(st.integers(0, n + 2)), draw(st.integers(0, n + 2))),
    "causal_blockwise": _lengths,
    "prefix_lm_causal": lambda draw, n: (n, draw(st.integers(0, n))),
    "prefix_lm_document": _prefix_documents,
    "qk_sparse": _spans,
    "hash_sparse": _lengths,
    "random_eviction": lambda draw, n: (n, draw(st.integers(0, n + 2)), draw(st.integers(0, 2**32))),
    "eviction": lambda draw, n: (draw(st.lists(st.integers(0, n), min_size=n, max_size=n)),),
}


@st.composite
def boolean_masks(draw, n_queries=None, n_keys=None, leading=None):
    """Draw a BooleanMask; one of its axes may stand for any length and is then bound to one."""
    leading, n_queries, n_keys = draw(shapes(n_queries, n_keys, leading))
    rows, keys = (draw(st.sampled_from((n, n, 1))) for n in (n_queries, n_keys))
    return BooleanMask(draw(hnp.arrays(np.bool_, (*leading, rows, keys)))).bind(n_queries, n_keys)


@st.composite
def function_masks(draw):
    """Draw a mask of an expression of integers."""
    text = expressions.condition(draw(st.randoms(use_true_random=False)), 3)
    batch, heads, *lengths = expressions.LIMITS
    return from_function(expressions.compiled(text, MASK), *lengths, batch=batch, heads=heads)


def band_masks(n_queries=None, n_keys=None):
    """Draw a band as the ColumnMask that it is."""
    sides = st.tuples(*[st.none() | st.integers(-3, 30)] * 2, st.integers(-20, 20))
    return st.builds(lambda shape, sides: band(*shape[1:], *sides), shapes(n_queries, n_keys), sides)
