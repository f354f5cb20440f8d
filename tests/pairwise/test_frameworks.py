"""Arrays of other libraries come back as they came."""

import numpy as np
import pytest

from cuattn import errors, pairwise


def test_torch():
    torch = pytest.importorskip("torch")
    x, b = torch.arange(12.0).reshape(4, 3), torch.ones(4)
    a = pairwise.matvec(x, x, b, bandwidth=torch.tensor(2.0))
    assert isinstance(a, torch.Tensor) and a.dtype == torch.float32 and a.shape == (4,)
    found = pairwise.sinkhorn(x, x + 1, eps=0.5, tol=0, n_iters=20)
    assert all(isinstance(array, torch.Tensor) for array in (found.cost, found.f, *found.gradient()))
    gradients = pairwise.matvec_backward(torch.ones(4), x, x, b, bandwidth=2.0)
    assert isinstance(gradients.dbandwidth, torch.Tensor) and gradients.dbandwidth.shape == ()
    assert pairwise.softmin(x.bfloat16(), x.bfloat16(), b.bfloat16(), eps=1.0).dtype == torch.bfloat16
    with pytest.raises(errors.UnsupportedError, match="requires grad"):
        pairwise.matvec(x.requires_grad_(), x, b, bandwidth=2.0)


def test_kinds_do_not_mix():
    torch = pytest.importorskip("torch")
    x = np.ones((4, 3), np.float32)
    with pytest.raises(errors.DtypeError, match="y is"):
        pairwise.matvec(x, torch.ones(4, 3), np.ones(4, np.float32), bandwidth=1.0)


def test_jax():
    jax = pytest.importorskip("jax")
    x = jax.numpy.ones((4, 3))
    assert isinstance(pairwise.log_density(x, x, bandwidth=1.0), jax.Array)
