"""Sums over all pairs of points, of functions of their distance, in memory that grows with the points alone.

Products of kernel matrices with vectors (kernel machines, Gaussian processes, mean shift), logarithms of sums (kernel
densities) and optimal transport (Sinkhorn), for NumPy, CuPy and any other DLPack arrays, with their gradients.

Examples
--------
>>> import numpy as np
>>> from cuattn import pairwise
>>> x = np.random.default_rng(0).standard_normal((1000, 3), np.float32)
>>> pairwise.matvec(x, x, np.ones(1000, np.float32), bandwidth=0.5).shape
(1000,)
"""

from cuattn.pairwise.logsums import SoftminGradients, log_density, softmin, softmin_backward
from cuattn.pairwise.operator import linear_operator
from cuattn.pairwise.products import MatvecGradients, matvec, matvec_backward
from cuattn.pairwise.transport import ConvergenceWarning, Sinkhorn, sinkhorn

__all__ = [
    "ConvergenceWarning",
    "MatvecGradients",
    "Sinkhorn",
    "SoftminGradients",
    "linear_operator",
    "log_density",
    "matvec",
    "matvec_backward",
    "sinkhorn",
    "softmin",
    "softmin_backward",
]
