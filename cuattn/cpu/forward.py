"""The forward pass: online softmax over chunks of keys, one row tile at a time.

For each row the state is a reference, the true maximum of its scores so far, the sum of the exponentials and the
sum of the weighted values, the last two relative to the reference.  The reference follows the maximum only when
the two have drifted apart by more than ``WINDOW``: most chunks then rescale nothing, and the product that makes
the scores subtracts the reference for free.  What is decided for a row depends on the row's own scores alone, and
every sum over tiles runs in the order of the tiles, so a tile that contributes nothing may be skipped or visited:
the bits of the result are the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cuattn.cpu import threads
from cuattn.cpu.blocks import ABREAST, LANES, Blocks, Shape, choose, is_plain, stack_shape, sum_columns, summed_keys
from cuattn.cpu.bound import WINDOW
from cuattn.cpu.buffers import Buffers
from cuattn.cpu.dropout import Dropout
from cuattn.cpu.exponent import exponential, from_units, to_units
from cuattn.cpu.heads import Team, pick_team, team_groups
from cuattn.cpu.inplace import InPlace
from cuattn.cpu.panel import Panel
from cuattn.cpu.passes import Pass, Stack
from cuattn.cpu.scores import Scores
from cuattn.cpu.sweep import Sweep
from cuattn.cpu.tiles import Tiles
from cuattn.cpu.views import Chunk, Group, View
from cuattn.problem import Operands, Problem

__all__ = ["forward"]


class Item(NamedTuple):
    """A stack of row tiles, of a head or of a team of heads, and what they see."""

    team: Team
    row_tile: int  # the first
    groups: list[Group]


def forward(
    problem: Problem, operands: Operands, *, statistics: bool = True
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Compute attention and the statistics of its softmax.

    Parameters
    ----------
    problem : Problem
        What to compute.
    operands : Operands
        Its arrays, on the host.
    statistics : bool
        Whether l and m are wanted.

    Returns
    -------
    o : ndarray, problem.o_shape, problem.out_dtype
        The output; 0 in empty rows.
    l, m : ndarray, problem.stat_shape, float32 | float64, or None
        Row sum of ``exp(s - m)`` and row maximum of the scores s, natural units; 0 and -inf in empty rows.

    Notes
    -----
    Bitwise reproducible, whatever the number of threads.  Extra memory is a few MB per thread.

    References
    ----------
    T. Dao et al., "FlashAttention", NeurIPS 2022, algorithm 2, with the loops exchanged.
    """
    l = m = None
    if statistics:
        l = np.zeros(problem.stat_shape, problem.stat_dtype)
        m = np.full(problem.stat_shape, -np.inf, problem.stat_dtype)
    if problem.n_keys == 0 or 0 in problem.stat_shape:
        return np.zeros(problem.o_shape, problem.out_dtype), l, m
    o = np.empty(problem.o_shape, problem.out_dtype)  # in huge pages, where zeros would have to be small ones
    blocks = choose(problem, operands)
    tiles = Tiles(problem, operands, blocks)
    groups = team_groups(problem, operands, blocks.team)
    stacks = -(-blocks.row_tiles // blocks.stack)
    apart = operands.bias is not None or problem.dropout or problem.softcap is not None

    def prepare(group: int, index: int) -> Item:
        team, stack = divmod(index, stacks)
        team, row_tile = groups[group][team], stack * blocks.stack
        stop = min(row_tile + (1 if is_plain(problem) else blocks.stack), blocks.row_tiles)
        return Item(team, row_tile, tiles.groups(team.heads[0], row_tile, stop, 1 if apart else ABREAST))

    threads.run(
        threads.Dispatcher([len(group) * stacks for group in groups]),
        prepare,
        lambda: _Worker(problem, operands, blocks, tiles, (o, l, m)),
        threads.useful(problem, blocks),
    )
    return o, l, m


class _Worker:
    """Computes stacks of row tiles, in one thread."""

    def __init__(self, problem: Problem, operands: Operands, blocks: Blocks, tiles: Tiles, results: tuple) -> None:
        self._problem, self._blocks, self._tiles, self._results = problem, blocks, tiles, results
        self._statistics = results[1] is not None
        self._buffers = Buffers(problem.stat_dtype)
        plain, narrow = is_plain(problem), summed_keys(problem.head_dim_v, blocks.keys) < blocks.keys
        common = problem, operands, blocks, tiles, self._buffers
        self._panel = Panel(*common, counts=sum_columns(problem), upright=not (plain or narrow))
        self._in_place = InPlace(problem, operands, blocks)
        self._scores = Scores(problem, operands, blocks, tiles, self._buffers)
        self._dropout = Dropout(problem, operands, blocks) if problem.dropout else None
        # Without a mask only whole tiles, all of which a panel holds, are taken in one list of calls.
        whole = not problem.n_keys % blocks.keys and blocks.panel >= blocks.key_tiles
        self._may_sweep = whole or not is_plain(problem)
        self._stacks: dict[Shape, tuple[Stack, Sweep | None]] = {}

    def __call__(self, item: Item) -> None:
        stack, sweep = self._stack_at(item)
        start = item.row_tile * self._blocks.rows
        rows = slice(start, min(start + stack.shape.tiles * stack.shape.rows, self._problem.n_queries))
        views = [view for group in item.groups for view in group.views]
        if not any(view.runs for view in views):
            pick_team(self._results[0], item.team)[:, rows] = 0
            return
        stack.start(views)
        self._scores.load(item.team, rows, stack.q)
        for group in item.groups:
            row_tile = item.row_tile + group.start
            if group.parts and not self._take_all(stack, sweep, group, item.team, row_tile):
                for n, view in enumerate(group.views):
                    self._take_each(stack.passes[group.start + n], item.team, row_tile + n, view)
        self._finish(stack, item.team, rows)

    def _take_all(self, stack: Stack, sweep: Sweep | None, group: Group, team: Team, row_tile: int) -> bool:
        """Take a group through all that it sees, where no score needs a look; return whether."""
        source = self._source(team, group.views[0].indices, masked=sweep is not None)
        if source is None:
            return False
        states = stack.passes[group.start : group.start + len(group.views)]
        for state in states:
            state.bounded, state.fresh = True, False
        if sweep is not None:
            self._scores.begin(team, row_tile, states[0].q)
            sweep(group, team, row_tile, source.keys, source.values)
        else:
            for call in states[0].take_all(group.views[0].chunks):
                call()
        return True

    def _source(self, team: Team, chunks: tuple[int, ...], *, masked: bool) -> Panel | InPlace | None:
        """Return where the keys and values of all these chunks are, if no reference would move on the way."""
        if masked and self._in_place.hold(team, chunks):
            return self._in_place if self._bounded(self._in_place.reach) else None
        held = self._panel.hold(team, chunks)
        return self._panel if held and self._bounded(self._panel.reach) and self._may_sweep else None

    def _take_each(self, state: Pass, team: Team, row_tile: int, view: View) -> None:
        """Take a pass through the keys that it sees, chunk by chunk."""
        self._scores.begin(team, row_tile, state.q)
        for chunk in view.chunks:
            self._panel.hold(team, (chunk.index,))
            bounded = self._scores.farthest == 0 and self._bounded(self._panel.reach)
            state.bounded |= bounded
            self._advance(state, team, row_tile, chunk, bounded=bounded)

    def _bounded(self, reach: float) -> bool:
        """Whether no reference would move from 0, whatever the scores with keys of a length up to `reach` are."""
        return self._scores.span(reach) <= WINDOW

    def _advance(self, state: Pass, team: Team, row_tile: int, chunk: Chunk, *, bounded: bool) -> None:
        """Take a pass through a chunk of keys."""
        scores, step = self._scores, state.step(chunk)
        for call in step.make_products if bounded else step.make_scores:
            call()
        scores.complete(step.s, chunk, hide=self._statistics or not bounded)
        if not bounded:
            step.find_highest()
            if not (np.maximum.reduce(state.here, None) <= WINDOW and state.all_seen):
                self._move(state, step.s)
        elif self._statistics:
            step.find_highest()
        if self._statistics:
            state.follow()
        scores.exponentiate(step.s, self._panel.reach)
        for call in step.add_up:
            call()
        if self._dropout is not None:
            self._dropout.zero(step.s, self._dropout.dropped(chunk, team.heads[0], row_tile))
        for call in step.begin if state.fresh else step.weigh:
            call()
        state.fresh = False

    def _stack_at(self, item: Item) -> tuple[Stack, Sweep | None]:
        shape = stack_shape(self._problem, self._blocks, len(item.team.heads), item.row_tile)
        if shape not in self._stacks:
            common = self._problem, self._blocks, self._panel, self._buffers
            stack = Stack(*common, shape, statistics=self._statistics)
            sweep = None if stack.together else Sweep(stack, self._tiles, self._scores, self._dropout)
            self._stacks[shape] = stack, sweep
        return self._stacks[shape]

    def _move(self, state: Pass, s: np.ndarray) -> None:
        """Move the references of the rows whose highest score has left the window."""
        state.look_back()
        here = state.here.reshape(len(s), LANES, -1)
        highest = np.maximum.reduce(here, axis=1)
        if np.maximum.reduce(highest, None) <= WINDOW and np.minimum.reduce(highest, None) >= -WINDOW:
            state.seen.fill(True)
            state.all_seen = True
            return
        away = ~(highest <= WINDOW) | (~state.seen & (highest < -WINDOW) & (highest > -np.inf))
        shift = np.where(away, highest, 0)
        shrink = np.where(state.seen, exponential(-shift), 0)  # what is yet unseen has nothing to shrink
        state.seen |= highest != -np.inf
        state.all_seen = bool(state.seen.all())
        if not away.any():
            return
        np.subtract(s, shift[:, None, None], out=s)
        state.reference += shift
        self._scores.subtract(state.reference)
        state.sums *= shrink[:, None, None]
        state.o *= shrink[:, None]
        # What was the highest score is the reference now; those of earlier chunks do not count any more.
        np.copyto(state.highest.reshape(here.shape), -np.inf, where=away[:, None])
        np.copyto(here, 0, where=away[:, None])

    def _finish(self, stack: Stack, team: Team, rows: slice) -> None:
        total, beside = stack.finish()
        o = pick_team(self._results[0], team)[:, rows]
        heads, tiles, height = stack.shape
        width = self._problem.head_dim_v
        # By the sums that had the roundings of o, where there are any.
        below = total * total.dtype.type(1 / self._problem.dropout_scale) if beside is None else beside
        unseen = None if stack.seen.all() else ~stack.seen
        if unseen is not None:
            below[unseen] = 1
        weighed = stack.o[:, :width]
        np.divide(weighed, below[:, None], out=weighed)
        by_tile = weighed.reshape(heads, tiles, width, height).swapaxes(2, 3)
        whole, rest = divmod(o.shape[1], height)
        o[:, : whole * height].reshape(heads, whole, *by_tile.shape[2:])[...] = by_tile[:, :whole]
        if rest:
            o[:, whole * height :] = by_tile[:, whole, :rest]
        if self._statistics:
            self._write_statistics(stack, team, rows, total, unseen)

    def _write_statistics(
        self, stack: Stack, team: Team, rows: slice, total: np.ndarray, unseen: np.ndarray | None
    ) -> None:
        l, m = (pick_team(result, team)[:, rows] for result in self._results[1:])
        heads, tiles, height = stack.shape
        highest = np.maximum.reduce(stack.highest.reshape(len(stack.o), LANES, height), axis=1)

        def of_rows(x: np.ndarray) -> np.ndarray:
            """Return x, (members, rows), as (heads, count)."""
            return x.reshape(heads, tiles * height)[:, : l.shape[1]]

        reference = of_rows(stack.reference)
        m[:] = from_units(of_rows(highest) + reference)
        # l is relative to m as it is returned, after its rounding: what the backward makes of both is then exact.
        np.multiply(of_rows(total), exponential((reference - to_units(m)).astype(l.dtype)), out=l)
        if unseen is not None:
            l[of_rows(unseen)], m[of_rows(unseen)] = 0, -np.inf
