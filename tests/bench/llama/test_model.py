"""The decoder's gradients, its optimiser, its text, and the three ways to compute attention."""

import itertools

import numpy as np
import pytest

from bench import training
from bench.llama.adamw import AdamW
from bench.llama.heads import WAYS, Attention
from bench.llama.model import Config, Decoder
from bench.llama.text import documents, pack
from cuattn import masks

CONFIG = Config(n=192, layers=2, heads=2, head_dim=16, inner=48, longest=80)


@pytest.fixture(scope="module")
def sequence():
    return next(pack(documents(), CONFIG.n, CONFIG.longest))


def test_sequences_are_full_and_predict_the_next_byte():
    for sequence in itertools.islice(pack(documents(), 512, 200), 20):
        assert len(sequence.tokens) == sum(sequence.lengths) == 512
        assert 0 < min(sequence.lengths) <= max(sequence.lengths) <= 200
        ends = np.cumsum(sequence.lengths) - 1
        assert (sequence.weights[ends] == 0).all()
        assert sequence.weights.sum() == pytest.approx(1)
        inside = np.flatnonzero(sequence.weights)
        assert (sequence.targets[inside] == sequence.tokens[inside + 1]).all()


def test_gradients_are_those_of_the_loss(sequence):
    model, attention = Decoder(np, CONFIG), Attention(np, "column")
    _, gradients = model.step(sequence, attention)
    assert set(gradients) == set(model.parameters)
    for name, p in model.parameters.items():
        norm = np.linalg.norm(gradients[name])
        direction, start, size = gradients[name] / norm, p.copy(), 0.005
        p[...] = start + size * direction
        up, _ = model.step(sequence, attention)
        p[...] = start - size * direction
        down, _ = model.step(sequence, attention)
        p[...] = start
        assert (up - down) / (2 * size) == pytest.approx(norm, rel=0.02), name


def test_the_loss_scale_leaves_gradients_alone(sequence):
    attention = Attention(np, "column")
    plain = Decoder(np, CONFIG).step(sequence, attention)[1]
    scaled = Decoder(np, CONFIG, scale=1024.0).step(sequence, attention)[1]
    for name, gradient in plain.items():
        np.testing.assert_allclose(scaled[name], gradient, rtol=1e-4, atol=1e-7)


def test_all_ways_see_the_same(sequence):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, CONFIG.n, 16), np.float32)
    results = []
    for way in WAYS:
        attention = Attention(np, way)
        attention.prepare(sequence.lengths)
        o, saved = attention.forward(q, k, v)
        results.append((o, *attention.backward(do, q, k, v, saved)))
    for column, dense, loop in zip(*results, strict=True):
        assert (column == dense).all()
        np.testing.assert_allclose(loop, column, rtol=1e-4, atol=1e-5)


def test_the_dense_mask_is_the_column_masks_twin(sequence):
    ((_, options),) = WAYS["dense"](np, sequence.lengths)
    assert (options["mask"] == masks.causal_document(list(sequence.lengths)).dense()).all()


def test_adamw_walks_to_the_minimum():
    p = {"w": np.full((2, 2), 3.0, np.float32)}
    optimiser = AdamW(np, p, rate=0.1, decay=0.0)
    for _ in range(200):
        optimiser.update({"w": 2 * (p["w"] - 1)})
    np.testing.assert_allclose(p["w"], 1, atol=0.05)


def test_training_learns_and_the_mask_changes_no_bit():
    found = {variant: training.train(variant, training.TINY, "cpu", 10) for variant in training.VARIANTS}
    losses = found["cuattn-column"]["losses"]
    assert losses == found["cuattn-dense"]["losses"]
    np.testing.assert_allclose(found["cuattn-documents"]["losses"], losses, rtol=1e-4)
    assert np.mean(losses[-3:]) < losses[0]
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 for row in found.values())
