"""The examples of the gallery do what they say, in small."""

import io

import numpy as np
import pytest

pytest.importorskip("sklearn")

from bench.gallery import __main__ as gallery
from bench.gallery import colours, density, mean_shift, ridge


def test_every_example_draws():
    small = [density.figure(2000, 12), ridge.figure(200, (1.0,)), colours.figure(16, 150), mean_shift.figure(200)]
    assert len(small) == len(gallery.EXAMPLES)
    for figure in small:
        figure.savefig(io.BytesIO(), dpi=20)


def test_density_integrates_to_one():
    points = density.spiral(3000, np.random.default_rng(0))
    logs = density.density(points, 60, 0.5, 16.0)
    assert abs(np.exp(logs).sum() * (32 / 59) ** 2 - 1) < 0.02


def test_digits_are_read():
    assert ridge.accuracy(*ridge.split(600), 1.6)[0] > 0.9


def test_colours_are_the_others():
    first, second = colours.photographs(12)
    moved, found = colours.carry(first, second, 300)
    assert found.error < 0.05
    distance = [abs(image.mean((0, 1)) - second.mean((0, 1))).max() for image in (first, moved)]
    assert distance[1] < 0.25 * distance[0]


def test_mean_shift_finds_the_blobs():
    _, label = mean_shift.clusters(mean_shift.blobs(400, np.random.default_rng(0)), 0.9)
    assert (np.bincount(label) > 40).sum() == 5
