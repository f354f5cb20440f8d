"""How many blocks of Hopper's backward share a key tile; along tangents, a head's first row or key tile.

One block has all query heads that share the tile.  Then most multiprocessors may wait for the longest, which under
causality is as long as two others; and few heads may have fewer key tiles than there are multiprocessors.  So the
query heads are dealt out to several blocks, or, where that is not enough, slices of each one's rows.  Parts of dK and
dV cost memory traffic, and each the time in which a block begins.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from cuattn.cuda.arguments import band_fields
from cuattn.cuda.sm90.balance import makespan
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Band, Problem

# Rows that a block could walk while it begins and ends a key tile; while a part travels; while a launch begins.
_ITEM_ROWS, _PART_ROWS, _PASS_ROWS = 128, 256, 128
_MANY = 8  # key tiles for each multiprocessor, of which none need be shared
_FIRST_PARTS, _LEAST_PART = 4, 8  # of a head's first tile, at most; tiles of the other side in each, at least
_FEW = 16  # tiles for each multiprocessor, up to which one that sees all takes as long as what another one has
_MOST_COUNTED = 1 << 15  # tiles of the other side
_SLICES, _WORTH = 8, 0.97  # of a head's rows, at most; share of the time that parts may take to be worth it
# If key tiles differ, blocks drift apart by this share of the longest item's time.  What they share leaves the L2 cache
# if they walk more bytes than these side by side, which costs this share of the time whenever those double.
_SPREAD, _NEAR, _FAR = 0.1, 128 << 20, 0.04


def visible_rows(problem: Problem, block_n: int) -> list[int]:
    """Return of how many rows the band shows something of each key tile."""
    fields, last = band_fields(problem), problem.n_queries
    right, left = fields.get("band_right", problem.n_keys), fields.get("band_left", last)
    starts = range(0, problem.n_keys, block_n)
    ends = (min(start + block_n, problem.n_keys) + left for start in starts)
    return [max(min(end, last) - max(start - right, 0), 0) for start, end in zip(starts, ends, strict=True)]


def side_by_side(n_keys: int, block_n: int, multiprocessors: int) -> int:
    """Return of how many heads of k key tiles are worked on side by side, at least, where they differ.

    Those of the last heads that are as long as two others then begin while there is other work.
    """
    return 1 << (cdiv(2 * multiprocessors, cdiv(n_keys, block_n)).bit_length() - 1)


class Tail(NamedTuple):
    """The key tiles that would make a last round: so many, from this number on, each shared by so many blocks."""

    first: int
    tiles: int
    slices: int


def cut_tail(problem: Problem, counts: Mapping[str, int], multiprocessors: int) -> Tail | None:
    """Return how the last of key tiles of equal length are shared by blocks, slices of rows for each; None if not."""
    tiles, row_tiles = problem.instances // problem.group * counts["key_tiles"], counts["row_tiles"]
    last = tiles % multiprocessors
    if tiles < multiprocessors or not last:
        return None

    def time(slices: int) -> float:
        rows = problem.n_queries / row_tiles * cdiv(row_tiles, slices)
        return cdiv(last * slices, multiprocessors) * (rows + _ITEM_ROWS + _PART_ROWS * (slices > 1))

    best = min(range(1, min(row_tiles, 2 * multiprocessors // last + _SLICES) + 1), key=time)
    return Tail(tiles - last, last, best) if best > 1 else None


def count_parts(problem: Problem, counts: Mapping[str, int], block_n: int, moved: int, multiprocessors: int) -> int:
    """Return how many blocks are best for a key tile.

    Parameters
    ----------
    problem : Problem
    counts : mapping of str to int
        row_tiles and key_tiles.
    block_n : int
        Keys of a tile.
    moved : int
        Bytes that a block moves for each row of a head.
    multiprocessors : int

    Returns
    -------
    int
        A divisor of the problem's group, or a multiple: so many slices of each head's rows.  In a fixed order it
        depends on no mask and no band, so that two which say the same give the same bits.
    """
    group, most = problem.group, _MANY * multiprocessors
    heads = problem.instances // group
    tiles = heads * counts["key_tiles"]
    if tiles >= most:
        return 1
    seen = replace(problem, band=Band(None, 0, 0)) if problem.deterministic else problem
    rows = sorted(visible_rows(seen, block_n), reverse=True)
    walked = side_by_side(problem.n_keys, block_n, multiprocessors) * problem.n_queries * moved

    def time(parts: int) -> float:
        beside = _ITEM_ROWS + _PART_ROWS * (parts > 1)
        lengths = [cdiv(n * group, parts) + beside for n in rows]
        spent = makespan(lengths, [heads * parts] * len(lengths), multiprocessors) + _PASS_ROWS * (parts > 1)
        if rows[0] == rows[-1]:
            return spent
        far = math.log2(max(walked * group / parts / _NEAR, 1))
        return (spent + _SPREAD * lengths[0]) * (1 + _FAR * far)

    found = [n for n in range(1, group + 1) if group % n == 0]
    if not problem.deterministic:  # turns are told for whole heads
        found += [group * n for n in range(2, min(_SLICES, counts["row_tiles"]) + 1)]
    times = {n: time(n) for n in found if n == 1 or tiles * n <= 2 * most}
    best = min(times, key=times.__getitem__)
    return best if times[best] < _WORTH * times[1] else 1


def count_first_parts(problem: Problem, owners: int, tiles: int, multiprocessors: int) -> int:
    """Return into how many parts each head's first row or key tile is divided, by the tiles of the other side.

    Global tokens come first, see all and are seen by all: of few heads, their tile takes longer than all the others.
    Whether a mask has such tokens is not asked, so that masks which say the same give the same bits.

    Parameters
    ----------
    problem : Problem
    owners : int
        Row or key tiles of all heads.
    tiles : int
        Of the other side, of a head.
    multiprocessors : int
    """
    masked = bool(problem.masks) or problem.twin
    if not masked or owners > _FEW * multiprocessors or tiles >= _MOST_COUNTED:
        return 1
    return max(min(tiles // _LEAST_PART, _FIRST_PARTS), 1)
