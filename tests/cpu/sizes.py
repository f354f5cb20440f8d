"""Forcing the ways through the CPU backend, so that small problems have many tiles, parts, stacks or batches."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

from hypothesis import strategies as st

from cuattn.cpu import blocks, call, direct, threads, walk
from cuattn.io_model.sizes import cdiv

_choose = blocks.choose

# (rows, keys, heads together, row tiles of a stack, key tiles at a time, steps of keys that are held)
block_sizes = st.tuples(
    st.sampled_from((16, 32, 48)),
    st.sampled_from((16, 32, 80)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from((1, 2, 100)),
)


@contextmanager
def tiled(rows=16, keys=16, heads=2, stack=2, step=3, steps=100, workers=1):
    """Make the CPU backend walk over tiles of these sizes, however small the problem, on this many threads."""

    def choose(problem, masks):
        usual, tiles = _choose(problem, masks), cdiv(problem.n_keys, keys)
        together, at_a_time = min(heads, usual.heads), min(tiles, step)
        return blocks.Blocks(
            rows,
            keys,
            together,
            stack if usual.stack > 1 else 1,
            at_a_time,
            min(tiles, steps * at_a_time),
            cdiv(problem.n_queries, rows),
            tiles,
        )

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(call, "is_small", lambda problem: False))
        patches.enter_context(mock.patch.object(walk, "choose", choose))
        patches.enter_context(mock.patch.object(threads, "useful", lambda items, nanoseconds: workers))
        yield


@contextmanager
def whole_heads(scores=1 << 17, workers=1):
    """Make the CPU backend compute whole heads, with up to so many scores at a time, on this many threads."""
    direct.layout.cache_clear()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(call, "is_small", lambda problem: not problem.dropout))
        patches.enter_context(mock.patch.object(direct, "_SCORES", scores))
        patches.enter_context(mock.patch.object(threads, "useful", lambda items, nanoseconds: workers))
        yield
    direct.layout.cache_clear()


def ways(sizes, workers=1):
    """Return the ways through the backend: tiles of these sizes, and whole heads by one or by all."""
    return (
        lambda: tiled(*sizes, workers=workers),
        lambda: whole_heads(1, workers=workers),
        lambda: whole_heads(workers=workers),
    )
