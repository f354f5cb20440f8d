"""The examples of the gallery do what they say, in small."""

import io

import numpy as np
import pytest

pytest.importorskip("sklearn")

import cuattn
from bench.gallery import __main__ as gallery
from bench.gallery import chunks, colours, density, documents, functions, hopfield, mean_shift, regression, ridge


def test_every_example_draws():
    small = [density.figure(2000, 12), ridge.figure(200, (1.0,)), colours.figure(16, 150), mean_shift.figure(200)]
    small += [regression.figure(500, 12), hopfield.figure(3), chunks.figure(3, 64, 8, 8), documents.figure(256, 1, 8)]
    small += [functions.figure()]
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


def test_regression_finds_the_field():
    x, y = regression.samples(4000, 0.3, np.random.default_rng(0))
    places = regression.grid(12)[50:90]
    found = regression.NadarayaWatson(bandwidth=0.1).fit(x, y).predict(places)
    assert np.abs(found - regression.field(places)).mean() < 0.15


def test_memories_are_found():
    stored = hopfield.memories()
    states = hopfield.retrieve(hopfield.hidden(stored), stored)
    assert (hopfield.found(states[-1], stored) == np.arange(len(stored))).mean() > 0.5


def test_chunks_merge_to_the_whole():
    q = np.random.default_rng(0).standard_normal((4, 8), np.float32)
    *_, last = chunks.arriving(q, 3, 50)
    k, v = np.concatenate([chunks.chunk(number, 50, 8) for number in range(3)], axis=1)
    np.testing.assert_allclose(last.o, cuattn.attention(q, k, v), atol=1e-6)


def test_functions_show_what_they_say():
    seen = functions.weights(mask=functions.neighbours)[functions.PIXEL] > 0
    assert seen.sum() == 81
    assert (functions.weights(mask=functions.dilated)[functions.PIXEL] > 0).sum() == 25
