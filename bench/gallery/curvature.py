"""Curvature of a loss: its Hessian's eigenvalues from a few products with vectors, and all of them to compare."""

import numpy as np
import torch
from torch import func

from bench.style import OURS, QUIET, WORSE, panels
from cuattn.torch import attention


def loss_of(weights, x, target, heads=2):
    """Return the loss of a layer of attention with weights (3, width, width)."""
    q, k, v = torch.einsum("bnw,swu->sbnu", x, weights).unflatten(-1, (heads, -1)).transpose(2, 3)
    o = attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
    return (torch.tanh(o) - target).square().mean()


def product(function, at):
    """Return the function of a vector that multiplies it by a function's Hessian: forward mode over reverse."""
    return lambda vector: func.jvp(func.grad(function), (at,), (vector.reshape(at.shape),))[1].flatten()


def lanczos(multiply, size, steps, seed=0):
    """Return the tridiagonal matrix that a symmetric one is to a random vector: its diagonal, and what is beside."""
    rng = torch.Generator().manual_seed(seed)
    basis = [torch.nn.functional.normalize(torch.randn(size, generator=rng, dtype=torch.float64), dim=0)]
    diagonal, beside = [], []
    for _ in range(steps):
        moved = multiply(basis[-1])
        diagonal.append(float(moved @ basis[-1]))
        known = torch.stack(basis)
        for _ in range(2):  # what rounding leaves of them, too
            moved = moved - known.T @ (known @ moved)
        beside.append(float(moved.norm()))
        basis.append(moved / beside[-1])
    return np.array(diagonal), np.array(beside)


def ritz(diagonal, beside, steps):
    """Return what is known of the eigenvalues after some steps, and their shares."""
    beside = beside[: steps - 1]
    values, vectors = np.linalg.eigh(np.diag(diagonal[:steps]) + np.diag(beside, 1) + np.diag(beside, -1))
    return values, vectors[0] ** 2


def problem(width=12, count=8, length=24):
    """Return a loss, and weights after some steps of learning."""
    torch.manual_seed(0)
    x = torch.randn(count, length, width, dtype=torch.float64)
    target = torch.tanh(x.roll(1, 1))  # what stood before
    weights = torch.randn(3, width, width, dtype=torch.float64) / width**0.5

    def function(w):
        return loss_of(w, x, target)

    for _ in range(60):
        weights = weights - 2.0 * func.grad(function)(weights)
    return function, weights


def figure(width=12, steps=40):
    """Draw the eigenvalues, and what products with one vector know of them."""
    function, weights = problem(width)
    size = weights.numel()
    exact = np.linalg.eigvalsh(func.hessian(function)(weights).reshape(size, size).numpy())
    known = lanczos(product(function, weights), size, steps)
    values, shares = ritz(*known, steps)
    drawn, (left, right) = panels(2, 4.6, 4.4)
    left.step(exact, np.arange(size) / size, color=QUIET, linewidth=2.5, label=f"all {size}")
    left.step(values, np.cumsum(shares), color=OURS, linewidth=1, label=f"of {steps} products with one vector")
    left.set_title("share of the Hessian's eigenvalues up to each", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    some = range(2, min(steps, 25), 2)
    error = [abs(ritz(*known, n)[0][-1] / exact[-1] - 1) for n in some]
    right.semilogy(some, error, "o-", color=WORSE, markersize=3)
    right.set_xlabel("products")
    right.set_title("relative error of the largest", fontsize=10)
    return drawn
