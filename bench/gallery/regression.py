"""Nadaraya-Watson regression of 20,000 noisy samples: each prediction is an attention over all of them."""

import numpy as np

from bench.style import panels
from cuattn.sklearn import NadarayaWatson


def field(x):
    """Return what is measured, at points (..., 2)."""
    a, b = x[..., 0], x[..., 1]
    return np.sin(3 * a) * np.cos(2 * b) + np.exp(-4 * ((a - 0.5) ** 2 + (b + 0.3) ** 2))


def samples(count, noise, rng):
    """Return scattered places, and the field there with noise."""
    x = rng.uniform(-1.5, 1.5, (count, 2)).astype(np.float32)
    return x, (field(x) + noise * rng.standard_normal(count)).astype(np.float32)


def grid(side):
    """Return the points of a square grid."""
    axis = np.linspace(-1.5, 1.5, side, dtype=np.float32)
    return np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)


def figure(count=20_000, side=64, noise=0.7):
    """Draw samples, predictions and the truth."""
    x, y = samples(count, noise, np.random.default_rng(0))
    places = grid(side)
    found = NadarayaWatson(bandwidth=0.08).fit(x, y).predict(places)
    error = np.sqrt(np.square(found - field(places)).mean())
    drawn, (left, middle, right) = panels(3, 3.6, 3.6)
    about = dict(cmap="RdBu", vmin=-2, vmax=2)
    left.scatter(*x.T, c=y, s=0.6, **about)
    left.set_title(f"{count:,} samples with noise of {noise:g}", fontsize=10)
    for axis, values in ((middle, found), (right, field(places))):
        axis.imshow(values.reshape(side, side), origin="lower", extent=(-1.5, 1.5, -1.5, 1.5), **about)
    middle.set_title(f"regression: error {error:.2f}", fontsize=10)
    right.set_title("truth", fontsize=10)
    for axis in (left, middle, right):
        axis.set(xticks=(), yticks=(), aspect="equal", xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
    return drawn
