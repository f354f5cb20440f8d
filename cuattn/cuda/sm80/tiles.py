"""Tile sizes of the portable kernels, as data.

A row is chosen by the shared memory that a block may have, the element size and the padded head dimension (the larger
of head_dim and head_dim_v).  All variants of one row share ``block_n``: a row of the result depends on it, and must
not depend on how its mask was given.
"""

from typing import NamedTuple

__all__ = ["FORWARD", "TICKETS", "VALUE_COLUMNS", "Card", "Tile", "forward_tile"]

# Element bytes -> columns of v that one block accumulates; wider v are done in several blocks.
VALUE_COLUMNS = {2: 256, 4: 128, 8: 128}

TICKETS = 1024  # counters that blocks of one stream share, each 0 between launches


class Card(NamedTuple):
    """What a plan needs to know about a GPU."""

    arch: str  # "sm_90"
    multiprocessors: int
    shared_bytes: int  # per block, opt-in maximum
    l2_bytes: int


class Tile(NamedTuple):
    """One way of cutting a problem: sizes, warps, pipeline depth, and blocks meant to share a multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    min_blocks: int


_KB = 1024

# (shared memory per block at least, element bytes, head dimension at most) -> tile; first match wins.
FORWARD: tuple[tuple[int, int, int, Tile], ...] = (
    # 227 KB: sm_90, sm_100, sm_103
    (200 * _KB, 2, 64, Tile(128, 96, 4, 2, 2)),
    (200 * _KB, 2, 128, Tile(128, 64, 4, 2, 2)),
    (200 * _KB, 2, 256, Tile(128, 64, 8, 2, 1)),
    (200 * _KB, 2, 512, Tile(64, 32, 4, 2, 1)),
    (200 * _KB, 4, 128, Tile(256, 32, 8, 2, 1)),
    (200 * _KB, 4, 256, Tile(128, 16, 8, 2, 1)),
    (200 * _KB, 4, 512, Tile(64, 16, 4, 2, 1)),
    (200 * _KB, 8, 64, Tile(64, 32, 4, 2, 2)),
    (200 * _KB, 8, 128, Tile(128, 16, 8, 2, 1)),
    (200 * _KB, 8, 256, Tile(64, 16, 4, 2, 1)),
    (200 * _KB, 8, 512, Tile(16, 16, 1, 2, 1)),
    # 163 KB: sm_80, sm_87
    (160 * _KB, 2, 64, Tile(128, 64, 4, 2, 2)),
    (160 * _KB, 2, 128, Tile(128, 32, 4, 2, 2)),
    (160 * _KB, 2, 256, Tile(128, 32, 8, 2, 1)),
    (160 * _KB, 2, 512, Tile(64, 32, 4, 2, 1)),
    (160 * _KB, 4, 64, Tile(256, 32, 8, 2, 1)),
    (160 * _KB, 4, 128, Tile(128, 32, 8, 2, 1)),
    (160 * _KB, 4, 256, Tile(64, 16, 4, 2, 1)),
    (160 * _KB, 4, 512, Tile(32, 16, 2, 2, 1)),
    (160 * _KB, 8, 64, Tile(64, 32, 4, 2, 1)),
    (160 * _KB, 8, 128, Tile(64, 16, 4, 2, 1)),
    (160 * _KB, 8, 256, Tile(32, 16, 2, 2, 1)),
    (160 * _KB, 8, 512, Tile(16, 16, 1, 1, 1)),
    # 99 KB: sm_86, sm_89, sm_120
    (0, 2, 64, Tile(128, 64, 4, 2, 2)),
    (0, 2, 96, Tile(128, 32, 8, 2, 2)),
    (0, 2, 128, Tile(128, 32, 8, 2, 1)),
    (0, 2, 256, Tile(64, 32, 4, 2, 1)),
    (0, 2, 512, Tile(32, 16, 2, 2, 1)),
    (0, 4, 64, Tile(128, 32, 8, 2, 1)),
    (0, 4, 128, Tile(64, 32, 4, 2, 1)),
    (0, 4, 256, Tile(32, 16, 2, 2, 1)),
    (0, 4, 512, Tile(16, 16, 1, 1, 1)),
    (0, 8, 64, Tile(64, 16, 4, 2, 1)),
    (0, 8, 128, Tile(32, 16, 2, 2, 1)),
    (0, 8, 256, Tile(16, 16, 1, 1, 1)),
)


def forward_tile(shared_bytes: int, element_bytes: int, head_dim: int) -> Tile | None:
    """Return the forward's tile for padded head dimensions up to `head_dim`, or None if there is none."""
    for shared, size, limit, tile in FORWARD:
        if shared_bytes >= shared and element_bytes == size and head_dim <= limit:
            return tile
    return None
