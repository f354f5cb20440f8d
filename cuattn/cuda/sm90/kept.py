"""What Hopper's backward of wide heads keeps of dS, so that dq is a product with it and no second pass over the scores.

Pairs of launches keep one slab after the other: all rows and some keys of some heads.  However long the rows are, a
slab takes a fixed multiple of q's memory.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from cuattn.cuda.arguments import Array, band_fields
from cuattn.cuda.sm90.forward import leaves_scores
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

BLOCK, STAGES = 64, 4  # rows and keys of a block of dS; steps in flight in sm90/bwd_dq.cu
_SLAB_TILES = 64  # key tiles of a slab, at most
_MOST = 8  # times q's memory that a slab takes, at most
_TURN = 2  # key tiles in whose time a slab's dq is read and written
_WORTH = 1.2  # times the rounds of key tiles that one launch would take: what a second pass costs more


class Kept(NamedTuple):
    """A slab: so many query heads from one on, counted through all batches, and so many key tiles from one on."""

    head: int
    heads: int
    tile: int
    tiles: int

    def fields(self, counts: Mapping[str, int], group: int, instances: int, parts: int = 1) -> dict[str, int]:
        """Return fields of ``Params`` of a kernel one of whose heads has `group` query heads, from its other counts."""
        section = counts["section"]
        if self.heads < instances:  # none straddles two slabs
            section = math.gcd(section, self.head // group, self.heads // group)
        found = {**counts, "section": section, "shared_key": self.head, "shared_tile": self.head + self.heads}
        return found if parts > 1 else found | {"splits": self.tile, "split_tiles": self.tiles}


def shows_all_keys(problem: Problem) -> bool:
    """Return whether the band hides no key from all rows."""
    fields, last = band_fields(problem), problem.n_queries
    left, right = fields.get("band_left", last), fields.get("band_right", problem.n_keys)
    return left >= 0 and left + right >= 0 and problem.n_keys <= last + right


def slabs(problem: Problem, counts: Mapping[str, int], parts: int, multiprocessors: int) -> list[Kept]:
    """Return the slabs in their order, or nothing where dq is made otherwise; `parts` blocks share a key tile."""
    group, tiles = problem.group, counts["key_tiles"]
    if not leaves_scores(problem) or problem.placed or problem.runs or not shows_all_keys(problem):
        return []
    heads, least = problem.instances // group, cdiv(tiles, _SLAB_TILES)

    def most(each: int) -> int:  # heads of a slab of so many key tiles
        return min(heads * _MOST * problem.head_dim // (each * BLOCK), heads)

    def rounds(together: int, each: int) -> int:
        full, rest = divmod(heads, together)
        slabs, last = divmod(tiles, each)
        sizes = (full * slabs, together * each), (full, together * last), (slabs, rest * each), (1, rest * last)
        return sum(times * cdiv(parts * size, multiprocessors) for times, size in sizes)

    def time(cut: tuple[int, int]) -> float:
        together, each = cut
        waiting = each / tiles if problem.band and parts * together * each <= multiprocessors else 0  # for the longest
        return rounds(*cut) * (1 + waiting + (_TURN / each if each < tiles else 0))

    sizes = {cdiv(tiles, least * n) for n in (1, 2, 4)}
    cuts = [(together, each) for each in sizes for together in range(most(each), most(each) // 2, -1)]
    if parts > 1:  # they have all tiles of all heads
        cuts = [cut for cut in cuts if cut == (heads, tiles)]
    together, each = min(cuts, key=time, default=(0, 0))
    if not together or time((together, each)) > _WORTH * rounds(heads, tiles):
        return []
    return [
        Kept(head * group, min(together, heads - head) * group, tile, min(each, tiles - tile))
        for head in range(0, heads, together)
        for tile in reversed(range(0, tiles, each))
    ]


def arrays(problem: Problem, kept: list[Kept], row_tiles: int, rows: int) -> dict[str, Array]:
    """Return the memory of the largest slab, and of dq while there are others; `rows` are those of padded tiles."""
    heads, tiles = max(each.heads for each in kept), max(each.tiles for each in kept)
    found = {"dbias_acc": Array((heads, tiles, row_tiles, BLOCK, BLOCK), problem.dtype)}
    if len({each.tile for each in kept}) > 1:
        found["dq_acc"] = Array((heads, rows, cdiv(problem.head_dim, 64) * 64), np.dtype(np.float32))
    return found
