"""Attention over keys that arrive in chunks: parts are merged exactly, so any memory holds any number of keys."""

import numpy as np

import cuattn
from bench.style import OURS, WORSE, panels


def chunk(number, size, d):
    """Return the keys and values of a chunk, as a file or a sensor would."""
    return np.random.default_rng(number).standard_normal((2, size, d), np.float32)


def arriving(q, chunks, size):
    """Yield the merged result after each chunk."""
    whole = None
    for number in range(chunks):
        part = cuattn.forward(q, *chunk(number, size, q.shape[-1]))
        whole = part if whole is None else cuattn.merge(whole, part)
        yield whole


def figure(chunks=16, size=8192, queries=64, d=32):
    """Draw how far the result so far is from the last one, and that one from a single call's over all keys."""
    q = np.random.default_rng(99).standard_normal((queries, d), np.float32)
    parts = list(arriving(q, chunks, size))
    k, v = np.concatenate([chunk(number, size, d) for number in range(chunks)], axis=1)
    whole = cuattn.forward(q, k, v)
    distance = [np.abs(part.o - whole.o).max() for part in parts]
    drawn, (left, right) = panels(2, 4.6, 3.4)
    left.semilogy(np.arange(1, chunks + 1) * size, distance, "o-", color=OURS)
    left.axhline(np.finfo(np.float32).eps, color=WORSE, linewidth=1)
    left.set(xlabel="keys so far", ylabel="distance from all keys' output")
    left.set_title(f"at the end {distance[-1]:.1e}; the line is float32's precision", fontsize=10)
    right.plot(np.arange(1, chunks + 1) * size, np.stack([part.lse[:8] for part in parts]), color=OURS, linewidth=1)
    right.set(xlabel="keys so far", ylabel="log-sum-exp of 8 queries")
    right.set_title("the statistic that makes it exact", fontsize=10)
    return drawn
