"""Memories of a modern Hopfield network: an update of its state is an attention over what it has stored.

H. Ramsauer et al., "Hopfield networks is all you need", ICLR 2021: from a part of a pattern, state = softmax(beta state
memories^T) memories finds the whole.
"""

import numpy as np

import cuattn
from bench.style import QUIET, panels


def memories():
    """Return handwritten digits, which ship with scikit-learn, about their mean and of length 1; and that mean."""
    from sklearn.datasets import load_digits

    images = load_digits().data.astype(np.float32)
    centred = images - images.mean(0)
    return centred / np.linalg.norm(centred, axis=1, keepdims=True)


def hidden(patterns):
    """Return patterns whose lower half is hidden."""
    return np.where(np.arange(64) < 32, patterns, 0).astype(np.float32)


def retrieve(state, stored, beta=100.0, steps=3):
    """Return the states of some updates, the given one first."""
    states = [state]
    for _ in range(steps):
        states.append(cuattn.attention(states[-1], stored, stored, scale=beta))
    return states


def found(states, stored):
    """Return the number of the memory that each state is nearest to."""
    return (states @ stored.T).argmax(1)


def figure(shown=8):
    """Draw what is asked, the states after each update, and what was stored; how many memories are found."""
    stored = memories()
    states = retrieve(hidden(stored), stored)
    right = (found(states[-1], stored) == np.arange(len(stored))).mean()
    rows = {"asked": states[0], "1 update": states[1], "3 updates": states[-1], "stored": stored}
    some = np.random.default_rng(3).choice(len(stored), shown, replace=False)
    drawn, axes = panels(4 * shown, 1.1, 1.15, rows=4)
    for axis, (name, index) in zip(axes, [(name, index) for name in rows for index in some], strict=True):
        axis.imshow(rows[name][index].reshape(8, 8), cmap="gray_r")
        axis.set(xticks=(), yticks=(), ylabel=name if index == some[0] else "")
        axis.spines[:].set_visible(False)
    drawn.suptitle(f"{right:.0%} of {len(stored):,} digits are found from their upper half", color=QUIET, fontsize=10)
    return drawn
