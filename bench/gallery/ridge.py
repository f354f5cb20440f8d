"""Kernel ridge regression on handwritten digits, which ship with scikit-learn: ten targets, conjugate gradients."""

import numpy as np
from sklearn.datasets import load_digits

from bench.style import INK, OURS, QUIET, WORSE, panels
from cuattn.sklearn import KernelRidge


def split(count=None, seed=0):
    """Return images and labels for training and for testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(images))[:count]
    images, labels, half = images[order].astype(np.float32) / 16, labels[order], len(order) * 2 // 3
    return images[:half], labels[:half], images[half:], labels[half:]


def accuracy(train, labels, test, expected, bandwidth, alpha=0.1):
    """Return the share of digits that are read right, and what is read."""
    model = KernelRidge(alpha, bandwidth=bandwidth, tol=1e-3).fit(train, np.eye(10, dtype=np.float32)[labels])
    read = model.predict(test).argmax(1)
    return (read == expected).mean(), read


def figure(count=None, bandwidths=(0.3, 0.6, 1.0, 1.6, 2.5, 4.0)):
    """Draw the accuracy against the bandwidth, and digits that are read wrong at the best of them."""
    train, labels, test, expected = split(count)
    found = [accuracy(train, labels, test, expected, bandwidth) for bandwidth in bandwidths]
    shares = [share for share, _ in found]
    read = found[int(np.argmax(shares))][1]
    drawn, axes = panels(5, 2.4, 2.4)
    axes[0].plot(bandwidths, shares, "o-", color=OURS)
    axes[0].set(xlabel="bandwidth", title=f"read right: {max(shares):.1%}")
    wrong = np.flatnonzero(read != expected)[:4]
    for axis in axes[1:]:
        axis.set_axis_off()
    for axis, index in zip(axes[1:], wrong, strict=False):
        axis.imshow(test[index].reshape(8, 8), cmap="gray_r")
        axis.set_title(f"{expected[index]}, read {read[index]}", color=WORSE, fontsize=10)
    axes[0].title.set_color(INK)
    axes[0].xaxis.label.set_color(QUIET)
    return drawn
