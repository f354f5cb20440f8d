"""A kernel density of a million points on a grid, without a tree and without bins: all pairs are summed."""

import time

import numpy as np

from bench.style import QUIET, panels
from cuattn import pairwise


def spiral(count, rng):
    """Return points along the arms of a galaxy, and in its bulge."""
    arm, bulge = int(count * 0.8), count - int(count * 0.8)
    turn = np.sqrt(rng.random(arm)) * 3 * np.pi
    side = rng.integers(0, 2, arm) * np.pi
    arms = turn[:, None] * np.stack([np.cos(turn + side), np.sin(turn + side)], -1)
    arms += rng.standard_normal((arm, 2)) * (0.3 + 0.08 * turn[:, None])
    return np.concatenate([arms, 1.2 * rng.standard_normal((bulge, 2))]).astype(np.float32)


def density(points, side, bandwidth=0.25, extent=12.0):
    """Return the log density on a square grid."""
    axis = np.linspace(-extent, extent, side, dtype=np.float32)
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    return pairwise.log_density(grid, points, bandwidth=bandwidth).reshape(side, side)


def figure(count=1_000_000, side=64):
    """Draw some of the points, and their density."""
    points = spiral(count, np.random.default_rng(0))
    start = time.perf_counter()
    logs = density(points, side)
    seconds = time.perf_counter() - start
    drawn, (left, right) = panels(2, 4.6, 4.6)
    left.scatter(*points[:: max(count // 20_000, 1)].T, s=0.2, color=QUIET)
    left.set_title(f"one in {max(count // 20_000, 1)} of {count:,} points", fontsize=10)
    right.imshow(np.exp(logs), origin="lower", extent=(-12, 12, -12, 12), cmap="magma", interpolation="bicubic")
    right.set_title(f"density at {side**2:,}: {count * side**2 / 1e9:.1f} billion pairs, {seconds:.1f} s", fontsize=10)
    for axis in (left, right):
        axis.set(xlim=(-12, 12), ylim=(-12, 12), aspect="equal", xticks=(), yticks=())
    return drawn
