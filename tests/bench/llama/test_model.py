"""The decoder's gradients, its text, and the three ways to compute attention."""

import itertools

import numpy as np
import pytest

from bench.llama.text import NONE, documents, pack
from cuattn import masks

torch = pytest.importorskip("torch")


from bench import training  # noqa: E402
from bench.llama.model import WAYS, Attention, Config, Decoder  # noqa: E402

CONFIG = Config(n=192, layers=2, heads=2, head_dim=16, inner=48, longest=80)


@pytest.fixture(scope="module")
def sequence():
    return next(pack(documents(), CONFIG.n, CONFIG.longest))


def test_sequences_are_full_and_predict_the_next_byte():
    for sequence in itertools.islice(pack(documents(), 512, 200), 20):
        assert len(sequence.tokens) == sum(sequence.lengths) == 512
        assert 0 < min(sequence.lengths) <= max(sequence.lengths) <= 200
        ends = np.cumsum(sequence.lengths) - 1
        assert (sequence.targets[ends] == NONE).all()
        inside = np.setdiff1d(np.arange(512), ends)
        assert (sequence.targets[inside] == sequence.tokens[inside + 1]).all()


def test_gradients_are_those_of_the_loss(sequence):
    model, attention = Decoder(CONFIG), Attention("column")
    model(sequence, attention).backward()
    for name, p in model.named_parameters():
        norm = p.grad.norm()
        direction, start, size = p.grad / norm, p.detach().clone(), 0.005
        with torch.no_grad():
            p.copy_(start + size * direction)
            up = model(sequence, attention)
            p.copy_(start - size * direction)
            down = model(sequence, attention)
            p.copy_(start)
        assert float((up - down) / (2 * size)) == pytest.approx(float(norm), rel=0.02), name


def test_all_ways_see_the_same(sequence):
    q, k, v, do = torch.from_numpy(np.random.default_rng(0).standard_normal((4, 2, CONFIG.n, 16), np.float32))
    results = []
    for way in WAYS:
        attention = Attention(way)
        attention.prepare(sequence.lengths, "cpu")
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attention(*leaves)
        results.append([o.detach(), *torch.autograd.grad(o, leaves, do)])
    for column, dense, loop in zip(*results, strict=True):
        assert torch.equal(column, dense)
        torch.testing.assert_close(loop, column, rtol=1e-4, atol=1e-5)


def test_the_dense_mask_is_the_column_masks_twin(sequence):
    ((_, options),) = WAYS["dense"](sequence.lengths, "cpu")
    assert (options["mask"].numpy() == masks.causal_document(list(sequence.lengths)).dense()).all()


def test_training_learns_and_the_mask_changes_no_bit():
    found = {variant: training.train(variant, training.TINY, "cpu", 10) for variant in training.VARIANTS}
    losses = found["cuattn-column"]["losses"]
    assert losses == found["cuattn-dense"]["losses"]
    np.testing.assert_allclose(found["cuattn-documents"]["losses"], losses, rtol=1e-4)
    assert np.mean(losses[-3:]) < losses[0]
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 for row in found.values())
