"""The constructors' predicates as plain broadcasting, i a column of rows, j a row of keys; and what tiles truly are."""

import numpy as np


def states_of(visible, block_m, block_n):
    """Return what the tiles of a boolean array (..., rows, keys) truly are: 0 hidden, 1 partly visible, 2 visible."""
    *leading, rows, keys = visible.shape
    states = np.empty((*leading, -(-rows // block_m), -(-keys // block_n)), np.int8)
    for m, n in np.ndindex(states.shape[-2:]):
        tile = visible[..., m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
        states[..., m, n] = tile.any(axis=(-2, -1)).astype(np.int8) + tile.all(axis=(-2, -1))
    return states


def assert_sound(states, visible, block_m, block_n):
    """Any tile may be called partial, but what is called skipped or full must be."""
    truth = states_of(visible, block_m, block_n)
    assert states.dtype == np.int8 and states.shape == truth.shape
    assert ((states == truth) | (states == 1)).all()


def equation_4(bounds, n_queries, block_m, block_n):
    """Return, per interval and tile (K, Tr, Tc), whether the extremes of its bounds say it hides all, and may hide any.

    The bounds (2 K, n_keys) are starts and ends in turn, start <= end.
    """
    first = np.arange(0, n_queries, block_m)[:, None]
    last = np.minimum(first + block_m, n_queries)
    tiles = np.arange(0, bounds.shape[1], block_n)
    least, most = (extreme.reduceat(bounds, tiles, axis=1)[:, None] for extreme in (np.minimum, np.maximum))
    return (first >= most[::2]) & (last <= least[1::2]), (first < most[1::2]) & (last > least[::2])


def _labels(lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


def full(i, j, n):
    return (i >= 0) & (j >= 0)


def causal(i, j, n):
    return j <= i


def sliding_window(i, j, n, window):
    return (i - j >= 0) & (i - j < window)


def causal_document(i, j, lengths):
    return document(i, j, lengths) & (j <= i)


def document(i, j, lengths):
    label = _labels(lengths)
    return label[i] == label[j]


def share_question(i, j, documents):
    label = _labels([question + sum(answers) for question, answers in documents])
    segments = [length for question, answers in documents for length in (question, *answers)]
    kinds = [kind for question, answers in documents for kind in (True, *[False] * len(answers))]
    segment = _labels(segments)
    is_question = np.array(kinds, dtype=bool)[segment]
    return (j <= i) & (label[i] == label[j]) & (is_question[j] | (segment[i] == segment[j]))


def global_sliding_window(i, j, n, window, n_global):
    return (np.abs(i - j) <= window) | (i < n_global) | (j < n_global)


def causal_blockwise(i, j, lengths):
    label = _labels(lengths)
    return (j <= i) & ((label[i] == label[j]) | (label[i] == len(lengths) - 1))


def prefix_lm_causal(i, j, n, prefix):
    return (j <= i) | (j < prefix)


def prefix_lm_document(i, j, documents):
    lengths = [length for _, length in documents]
    prefix = np.array([prefix for prefix, _ in documents], dtype=int)
    start = np.cumsum([0, *lengths])
    label = _labels(lengths)
    return (label[i] == label[j]) & ((j <= i) | (j < start[label[j]] + prefix[label[j]]))


def qk_sparse(i, j, n, spans):
    visible = j <= i
    for start, length in spans:
        visible = visible & ~((j >= start) & (j < start + length) & (i < start + length))
    return visible


hash_sparse = causal_document


def eviction(i, j, evicted_at):
    return (j <= i) & (i < np.asarray(evicted_at, dtype=int)[j])
