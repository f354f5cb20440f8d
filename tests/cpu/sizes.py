"""Forcing block sizes, so that small problems have many tiles, chunks, panels and stacks."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from unittest import mock

from hypothesis import strategies as st

from cuattn.cpu import blocks as blocks_module
from cuattn.cpu import threads
from cuattn.cpu.blocks import Blocks

USERS = [importlib.import_module(f"cuattn.cpu.{name}") for name in ("forward", "backward")]
_choose = blocks_module.choose

# (rows, keys, row tiles or heads together, tiles of a chunk, chunks of a panel)
block_sizes = st.tuples(
    st.sampled_from((16, 32, 48)),
    st.sampled_from((16, 32, 80)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from((1, 2, 100)),
)


@contextmanager
def forced(rows: int, keys: int, stack: int, chunk: int, chunks_of_panel: int, workers: int = 1):
    """Make the CPU backend use these block sizes and this many threads, however small the problem."""

    def choose(problem, operands) -> Blocks:
        usual = _choose(problem, operands)
        tiles = -(-problem.n_keys // keys)
        panel = min(chunks_of_panel * chunk, -(-tiles // chunk) * chunk)
        stacked = stack if problem.direction == "forward" or blocks_module.is_plain(problem) else 1
        team = min(stack, usual.team)
        return Blocks(rows, keys, stacked, team, chunk, panel, -(-problem.n_queries // rows), tiles)

    with mock.patch.object(threads, "useful", lambda problem, blocks: workers):
        for user in USERS:
            patch = mock.patch.object(user, "choose", choose)
            patch.start()
        try:
            yield
        finally:
            mock.patch.stopall()
