"""Non-local means by attention equals non-local means by hand, and removes noise."""

from argparse import Namespace

import numpy as np
import pytest

from bench import denoise


def picture(height=20, width=24):
    y, x = np.mgrid[:height, :width].astype(np.float32)
    stripes = (x // 4 % 2)[..., None] * np.array([0.8, 0.4, 0.1], np.float32)
    return np.clip(stripes + (y / height / 5)[..., None], 0, 1).astype(np.float32)


def by_hand(image, rows):
    height, width, _ = image.shape
    p = denoise.patches(np, image.astype(np.float64))
    h2 = denoise.STRENGTH**2 * denoise.SIGMA**2 * 2 * p.shape[1]
    weights = np.exp(-((p[:, None] - p) ** 2).sum(axis=2) / h2)
    np.fill_diagonal(weights, 0)
    if rows is not None:
        i = np.arange(height * width)
        weights[np.abs(i[:, None] - i) > rows * width] = 0
    return (weights @ image.reshape(-1, 3) / weights.sum(axis=1, keepdims=True)).reshape(image.shape)


@pytest.mark.parametrize("rows", [3, None])
def test_attention_is_the_weighted_mean(rows):
    image = denoise.noisy(picture())
    np.testing.assert_allclose(denoise.denoise(np, image, rows), by_hand(image, rows), atol=2e-5)


def test_noise_goes_and_the_picture_stays():
    truth = picture(40, 40)
    image = denoise.noisy(truth)
    assert denoise.psnr(denoise.denoise(np, image), truth) > denoise.psnr(image, truth) + 4


def test_the_photograph_is_measured_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    (point, whole) = denoise.points(Namespace(device="cpu", tiny=True, seconds=0.0, photo=None))
    row = point.measure()["cuattn-numpy"]
    assert row["psnr_after"] > row["psnr_before"] + 4
    assert whole.measure()["cuattn-numpy"]["pairs"] > row["pairs"]
    denoise.picture(denoise.photograph()[100:140, 200:240], tmp_path / "x.png")
    np.save(tmp_path / "x.npy", picture())
    assert denoise.photograph(tmp_path / "x.npy").shape == (20, 24, 3)
