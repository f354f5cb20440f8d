"""Documents of different lengths in one call: packed, with a mask that keeps them apart, or padded to the longest."""

import time

import numpy as np

import cuattn
from bench.style import OURS, QUIET, panels
from cuattn import masks


def packed(q, k, v, lengths):
    """Return attention within each document, of all of them in a row: (heads, tokens, d)."""
    return cuattn.attention(q, k, v, mask=masks.causal_document(lengths))


def padded(q, k, v, lengths):
    """Return the same by a batch of documents that are as long as the longest, most of it padding."""
    starts = np.cumsum([0, *lengths])
    batch = np.zeros((3, len(lengths), q.shape[0], max(lengths), q.shape[2]), q.dtype)
    for number, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        batch[:, number, :, :length] = np.stack([q, k, v])[:, :, start : start + length]
    o = cuattn.attention(*batch, is_causal=True)
    return np.concatenate([o[number, :, :length] for number, length in enumerate(lengths)], axis=1)


def seconds(function, *arguments, turns=3):
    """Return the shortest time of some calls, and the result."""
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        result = function(*arguments)
        times.append(time.perf_counter() - start)
    return min(times), result


def figure(tokens=4096, heads=4, d=64):
    """Draw the mask, and the time of both."""
    lengths = [*np.random.default_rng(1).integers(40, tokens // 6, 10), 0]
    lengths[-1] = max(tokens - sum(lengths), 1)
    q, k, v = np.random.default_rng(0).standard_normal((3, heads, sum(lengths), d), np.float32)
    (of_packed, o), (of_padded, same) = (seconds(way, q, k, v, lengths) for way in (packed, padded))
    np.testing.assert_allclose(o, same, atol=1e-5)
    mask = masks.causal_document(lengths)
    drawn, (left, right) = panels(2, 4.4, 3.8)
    mask.plot(left)
    left.set_title(f"{len(lengths)} documents: {mask.block_sparsity():.0%} of the tiles are skipped", fontsize=10)
    right.barh(["packed, with a mask", "padded to the longest"], [of_packed, of_padded], color=[OURS, QUIET])
    right.set(xlabel="seconds")
    right.set_title("the same outputs", fontsize=10)
    return drawn
