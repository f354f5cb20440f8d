"""Kernel matrices for SciPy's solvers."""

import numpy as np
import pytest
from scipy.sparse.linalg import cg, eigsh

from cuattn import errors, pairwise
from tests.pairwise.textbook import Problem


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products(dtype):
    problem = Problem(3, 2, given=dtype)
    visible = np.random.default_rng(0).random((150, 700)) < 0.5
    dense = pairwise.matvec(problem.x, problem.y, np.eye(700, dtype=dtype), bandwidth=1.0, mask=visible)
    operator = pairwise.linear_operator(problem.x, problem.y, bandwidth=1.0, mask=visible)
    assert operator.shape == (150, 700) and operator.dtype == dtype
    tolerance = dict(rtol=1e-5, atol=2e-5) if dtype == np.float32 else dict(rtol=1e-12, atol=1e-12)
    for vectors in (problem.b, problem.b[:, 0].astype(np.float64)):
        np.testing.assert_allclose(operator @ vectors, dense @ vectors, **tolerance)
    np.testing.assert_allclose(operator.H @ problem.da, dense.T @ problem.da, **tolerance)


def test_solvers():
    problem = Problem(2, 1, m=200, n=200, given=np.float64)
    operator = pairwise.linear_operator(problem.x, problem.x, bandwidth=0.2, ridge=0.1)
    dense = operator @ np.eye(200)
    solution, status = cg(operator, problem.df, rtol=1e-10)
    assert status == 0
    np.testing.assert_allclose(solution, np.linalg.solve(dense, problem.df), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(eigsh(operator, 1)[0], np.linalg.eigvalsh(dense)[-1:], rtol=1e-10)


def test_errors():
    x = np.ones((5, 2))
    with pytest.raises(errors.ShapeError, match=r"ridge is 1\.0"):
        pairwise.linear_operator(x, x[:3], bandwidth=1.0, ridge=1.0)
    with pytest.raises(errors.ShapeError, match="expected two axes"):
        pairwise.linear_operator(x[None], x, bandwidth=1.0)
