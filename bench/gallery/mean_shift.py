"""Mean shift: every point moves to the weighted mean of all, over and over, and those that meet are a cluster."""

import numpy as np

from bench.style import SHADES, panels
from cuattn import pairwise


def shift(x, points, bandwidth):
    """Return the means of points, weighted by their kernel at each x."""
    ones = np.ones_like(points[:, :1])
    sums = pairwise.matvec(x, points, np.concatenate([points, ones], -1), bandwidth=bandwidth)
    return sums[:, :-1] / sums[:, -1:]


def clusters(points, bandwidth, n_iters=60):
    """Return each point's mode, and its number, the largest cluster first."""
    x = points
    for _ in range(n_iters):
        x = shift(x, points, bandwidth)
    modes, label = [], np.zeros(len(x), int)
    for number, mode in enumerate(x):
        near = next((n for n, other in enumerate(modes) if np.linalg.norm(mode - other) < bandwidth), len(modes))
        modes += [mode] * (near == len(modes))
        label[number] = near
    order = np.argsort(np.argsort(-np.bincount(label)))
    return x, order[label]


def blobs(count, rng):
    """Return points around five centres, of different spreads."""
    centres = np.array([[-4, -3], [-3, 3.5], [0, 0], [3.5, 3], [4, -2.5]])
    which = rng.integers(0, 5, count)
    return (centres[which] + rng.standard_normal((count, 2)) * (0.6 + 0.15 * which[:, None])).astype(np.float32)


def figure(count=4000, bandwidth=0.9):
    """Draw the points by their cluster, and the ways that some take."""
    points = blobs(count, np.random.default_rng(0))
    modes, label = clusters(points, bandwidth)
    drawn, (left, right) = panels(2, 4.6, 4.4)
    paths = [points[:: count // 40]]
    for _ in range(25):
        paths.append(shift(paths[-1], points, bandwidth))
    for way in np.stack(paths, 1):
        left.plot(*way.T, color=SHADES[0], linewidth=0.7, alpha=0.7)
    left.set_title("the ways of 40 points", fontsize=10)
    right.scatter(*points.T, s=2, c=[SHADES[min(n, len(SHADES) - 1)] for n in label])
    right.scatter(*modes.T, s=30, color="black", marker="x")
    right.set_title(f"{label.max() + 1} clusters of {count:,} points", fontsize=10)
    return drawn
