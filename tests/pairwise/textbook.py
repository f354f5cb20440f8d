"""Sums over pairs of points as anybody would write them: every distance a sum of squared differences."""

from __future__ import annotations

import numpy as np

KERNELS = {
    "gaussian": lambda r: np.exp(-r * r / 2),
    "laplacian": lambda r: np.exp(-r),
    "cauchy": lambda r: 1 / (1 + r * r),
    "matern32": lambda r: (1 + np.sqrt(3) * r) * np.exp(-np.sqrt(3) * r),
    "matern52": lambda r: (1 + np.sqrt(5) * r + 5 * r * r / 3) * np.exp(-np.sqrt(5) * r),
}

SLOPES = {  # -k'(r) / r
    "gaussian": lambda r: np.exp(-r * r / 2),
    "laplacian": lambda r: np.exp(-r) / np.where(r > 0, r, np.inf),
    "cauchy": lambda r: 2 / (1 + r * r) ** 2,
    "matern32": lambda r: 3 * np.exp(-np.sqrt(3) * r),
    "matern52": lambda r: 5 / 3 * (1 + np.sqrt(5) * r) * np.exp(-np.sqrt(5) * r),
}


class Problem:
    """Points in a box, half of the keys near rows, and what is summed over them.

    Computations are in `dtype`, of the points as they are in `given`.
    """

    def __init__(self, d=3, p=2, m=150, n=700, spread=1.0, given=np.float32, batch=(), seed=0):
        rng = np.random.default_rng(seed)
        self.x = (rng.random((*batch, m, d)) * spread).astype(given)
        self.y = (rng.random((*batch, n, d)) * spread).astype(given)
        near = min(m, n) // 2
        self.y[..., :near, :] = self.x[..., :near, :] + 0.5 * rng.standard_normal((*batch, near, d)).astype(given)
        self.b, self.da = (rng.standard_normal((*batch, k, p)).astype(given) for k in (n, m))
        self.h, self.df = (rng.standard_normal((*batch, k)).astype(given) for k in (n, m))

    def distances(self, dtype):
        """Return differences and distances, (..., M, N, d) and (..., M, N)."""
        difference = self.x.astype(dtype)[..., :, None, :] - self.y.astype(dtype)[..., None, :, :]
        return difference, np.sqrt((difference * difference).sum(-1))

    def matvec(self, dtype, kernel="gaussian", bandwidth=1.0, visible=True):
        """Return sums of kernel values times b."""
        _, r = self.distances(dtype)
        return (KERNELS[kernel](r / dtype(bandwidth)) * visible).astype(dtype) @ self.b.astype(dtype)

    def matvec_backward(self, dtype, kernel="gaussian", bandwidth=1.0, visible=True):
        """Return the gradients of those by x, y, b and the bandwidth."""
        difference, r = self.distances(dtype)
        r, da = r / dtype(bandwidth), self.da.astype(dtype)
        g = (da @ self.b.astype(dtype).swapaxes(-1, -2)) * SLOPES[kernel](r) * visible
        pulls = (g / dtype(bandwidth) ** 2)[..., None] * difference
        k = KERNELS[kernel](r) * visible
        dbandwidth = (g * r * r).sum() / dtype(bandwidth)
        return -pulls.sum(-2), pulls.sum(-3), k.astype(dtype).swapaxes(-1, -2) @ da, dbandwidth

    def weights(self, dtype, eps, visible=True):
        """Return the soft minimum and its weights."""
        _, r = self.distances(dtype)
        s = np.where(visible, (self.h.astype(dtype)[..., None, :] - r * r / 2) / dtype(eps), -np.inf).astype(dtype)
        m = s.max(-1, keepdims=True)
        e = np.exp(s - np.where(np.isfinite(m), m, 0))
        total = e.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            f = -dtype(eps) * (m + np.log(total))[..., 0]
        return f, e / np.where(total > 0, total, 1)

    def softmin_backward(self, dtype, eps):
        """Return the gradients of the soft minimum by x, y and h."""
        difference, _ = self.distances(dtype)
        g = self.df.astype(dtype)[..., None] * self.weights(dtype, eps)[1]
        pulls = g[..., None] * difference
        return pulls.sum(-2), -pulls.sum(-3), -g.sum(-2)
