"""Tile sizes of the portable kernels, as data.

A tile is chosen by the shared memory that a block may have, the way of multiplying (`Dtype.products`) and the padded
head dimension (the larger of head_dim and head_dim_v).  All variants of one forward tile share ``block_n``: a row of
the result depends on it, and must not depend on how its mask was given.
"""

from typing import NamedTuple, TypeVar

VALUE_COLUMNS = {"half": 256, "split": 128, "double": 128}
"""Columns of v that one block of the forward accumulates; wider v are done in several blocks."""

_KB = 1024
_LARGE = 200 * _KB  # shared memory from here on: 227 KB on sm_90, sm_100, sm_103
_MEDIUM = 160 * _KB  # 163 KB on sm_80, sm_87; else 99 KB: sm_86, sm_89, sm_120


class Tile(NamedTuple):
    """One way of cutting a forward: sizes, warps, pipeline depth, and blocks meant to share a multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    stages: int = 2
    min_blocks: int = 1


class BackwardTile(NamedTuple):
    """One way of cutting a backward: sizes, warps, warps along the rows of the scores, pipeline depth."""

    block_m: int
    block_n: int
    warps: int
    scores_m: int
    stages: int = 1


def _tile(block_m: int, block_n: int, stages: int = 1, warps: int = 8) -> BackwardTile:
    """Return a tile in which warps lie along the rows first: up to four of them, beside many keys two."""
    return BackwardTile(block_m, block_n, warps, min(block_m // 16, 4 if block_n <= 64 else 2), stages)


class BackwardTiles(NamedTuple):
    """Tiles of the key kernel, of the key kernel with a heavy mask or score, of the row and of the bias kernel.

    `few`: of the key kernel where it holds all rows and keys.
    """

    keys: BackwardTile
    heavy: BackwardTile
    rows: BackwardTile = _tile(128, 64, 2)
    bias: BackwardTile = _tile(64, 64)
    few: BackwardTile | None = None


# Shared memory at least -> products -> padded head dimension at most -> tile; first match wins, down to the last row.
FORWARD: dict[int, dict[str, dict[int, Tile]]] = {
    _LARGE: {
        "half": {
            64: Tile(128, 96, 4, 2, 2),
            128: Tile(128, 64, 4, 2, 2),
            256: Tile(128, 64, 8),
        },
        "split": {128: Tile(256, 32, 8), 256: Tile(128, 16, 8), 512: Tile(64, 16, 4)},
        "double": {
            64: Tile(64, 32, 4, 2, 2),
            128: Tile(128, 16, 8),
            256: Tile(64, 16, 4),
            512: Tile(16, 16, 1),
        },
    },
    _MEDIUM: {
        "half": {
            64: Tile(128, 64, 4, 2, 2),
            128: Tile(128, 32, 4, 2, 2),
            256: Tile(128, 32, 8),
            512: Tile(64, 32, 4),
        },
        "split": {
            64: Tile(256, 32, 8),
            128: Tile(128, 32, 8),
            256: Tile(64, 16, 4),
            512: Tile(32, 16, 2),
        },
        "double": {
            64: Tile(64, 32, 4),
            128: Tile(64, 16, 4),
            256: Tile(32, 16, 2),
            512: Tile(16, 16, 1, 1),
        },
    },
    0: {
        "half": {
            64: Tile(128, 64, 4, 2, 2),
            96: Tile(128, 32, 8, 2, 2),
            128: Tile(128, 32, 8),
            256: Tile(64, 32, 4),
            512: Tile(32, 16, 2),
        },
        "split": {
            64: Tile(128, 32, 8),
            128: Tile(64, 32, 4),
            256: Tile(32, 16, 2),
            512: Tile(16, 16, 1, 1),
        },
        "double": {64: Tile(64, 16, 4), 128: Tile(32, 16, 2), 256: Tile(16, 16, 1, 1)},
    },
}


def _all(tile: BackwardTile) -> BackwardTiles:
    return BackwardTiles(tile, tile, tile, tile)


_SMALL = _tile(32, 32, warps=4)
_SQUARE, _SQUARE_2 = _tile(64, 64), _tile(64, 64, 2)
_LONG, _LONG_2 = _tile(64, 128), _tile(64, 128, 2)
BACKWARD: dict[int, dict[str, dict[int, BackwardTiles]]] = {
    _LARGE: {
        "half": {
            64: BackwardTiles(_tile(128, 128, 2), _LONG_2, few=_tile(64, 64, 2, warps=4)),
            128: BackwardTiles(_LONG_2, _SQUARE_2),
            192: BackwardTiles(_SQUARE_2, _tile(32, 64, 2), _SQUARE_2),
            256: BackwardTiles(_SQUARE_2, _tile(32, 64), _SQUARE_2),
            512: BackwardTiles(_tile(32, 32, 2), _tile(32, 32, 2), _tile(64, 32), _tile(64, 32)),
        },
        "split": {64: BackwardTiles(_LONG, _SQUARE_2, _SQUARE_2), 128: _all(_SQUARE)},
        "double": {
            64: _all(_SMALL),
            128: BackwardTiles(_tile(16, 64, 2), _tile(16, 64), _SMALL, _SMALL),
            256: _all(_tile(16, 32)),
        },
    },
    _MEDIUM: {
        "half": {
            64: BackwardTiles(_LONG_2, _LONG_2),
            96: BackwardTiles(_LONG_2, _SQUARE_2),
            128: BackwardTiles(_LONG, _SQUARE_2),
            256: BackwardTiles(_SQUARE, _tile(32, 64), _SQUARE),
        },
        "split": {64: _all(_SQUARE), 128: _all(_tile(32, 64)), 256: _all(_tile(32, 32))},
        "double": {64: _all(_SMALL), 128: BackwardTiles(_tile(32, 32), _tile(32, 32), _SMALL, _SMALL)},
    },
    0: {
        "half": {
            64: BackwardTiles(_LONG, _LONG),
            128: _all(_SQUARE),
            256: _all(_SMALL),
        },
        "split": {64: BackwardTiles(_tile(32, 64), _tile(32, 64), _SQUARE), 128: _all(_SMALL)},
        "double": {64: _all(_SMALL)},
    },
}

# Where rows are too wide for the tiles above; these fit every GPU.
WIDE = {"half": _all(_SQUARE_2), "split": _all(_SQUARE_2), "double": _all(_tile(32, 32, 2, warps=4))}

_Found = TypeVar("_Found", Tile, BackwardTiles)


def look_up(
    table: dict[int, dict[str, dict[int, _Found]]], shared_bytes: int, products: str, head_dim: int
) -> _Found | None:
    """Return the tiles of a table for padded head dimensions up to `head_dim`, or None where it has none so wide."""
    for shared, kinds in table.items():
        if shared_bytes >= shared:
            for limit, tile in kinds[products].items():
                if head_dim <= limit:
                    return tile
    return None
