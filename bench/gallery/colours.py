"""Colours of one photograph carried to another by optimal transport: Sinkhorn on samples, attention on all pixels."""

import numpy as np
from sklearn.datasets import load_sample_image

import cuattn
from bench.style import panels
from cuattn import pairwise

EPS = 0.005  # of half squared distances between colours in [0, 1]^3


def photographs(step=1):
    """Return two photographs, which ship with scikit-learn, as colours in [0, 1]."""
    return [load_sample_image(name)[::step, ::step].astype(np.float32) / 255 for name in ("china.jpg", "flower.jpg")]


def carry(source, target, samples=2000, seed=0):
    """Return an image whose colours are those of `target`, moved as little as possible.

    The plan between samples takes a colour x to the mean of y_j with weights exp((g_j - |x - y_j|^2 / 2) / eps), which
    is attention for any x: so are all pixels taken, sampled or not.
    """
    rng = np.random.default_rng(seed)
    x, y = (rng.choice(image.reshape(-1, 3), samples) for image in (source, target))
    found = pairwise.sinkhorn(x, y, eps=EPS, tol=1e-2, n_iters=200)
    bias = (found.g - np.square(y).sum(-1) / 2) / EPS
    moved = cuattn.attention(source.reshape(-1, 3), y, y, scale=1 / EPS, bias=bias[None, :])
    return moved.reshape(source.shape).clip(0, 1), found


def figure(step=2, samples=2000):
    """Draw both photographs and each in the colours of the other."""
    first, second = photographs(step)
    drawn, axes = panels(4, 3.4, 2.6)
    images = {
        "one photograph": first,
        "in the other's colours": carry(first, second, samples)[0],
        "the other": second,
        "in the first one's colours": carry(second, first, samples)[0],
    }
    for axis, (title, image) in zip(axes, images.items(), strict=True):
        axis.imshow(image)
        axis.set_title(title, fontsize=10)
        axis.set_axis_off()
    return drawn
