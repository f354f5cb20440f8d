"""The examples of the gallery that need derivatives of higher order."""

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL")

from bench.gallery import consistency, curvature, forces, tiny_gpt  # noqa: E402


def test_every_example_draws():
    for figure in (forces.figure(2), curvature.figure(4, 6), consistency.figure(2, 8), tiny_gpt.figure(2, 2)):
        figure.savefig(io.BytesIO(), dpi=20)


def test_forces_are_learnt():
    model, x = forces.fitted(80, atoms=4, count=32)
    true = forces.forces(forces.energy, x)
    assert forces.explained(true, forces.forces(model, x)) > 0.5


def test_products_with_vectors_know_the_curvature():
    function, weights = curvature.problem(6)
    exact = np.linalg.eigvalsh(torch.func.hessian(function)(weights).reshape(108, 108).numpy())
    known = curvature.lanczos(curvature.product(function, weights), 108, 30)
    assert abs(curvature.ritz(*known, 30)[0][-1] / exact[-1] - 1) < 1e-8


def test_a_step_towards_consistency():
    model, x = consistency.Model(8), consistency.shapes(4, 8)
    consistency.loss_of(model, x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert consistency.generated(model, torch.randn(3, 8, 2)).shape == (3, 8, 2)


def test_a_language_model_learns():
    _, letters, losses = tiny_gpt.trained(8, 16, 2, 16, 2)
    assert losses[-1] < losses[0] < 1.3 * np.log(len(letters))
