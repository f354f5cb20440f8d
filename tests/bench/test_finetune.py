"""bench.finetune: all attention of Transformers trains one model alike, and a failing one leaves the others' rows."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from bench import finetune


@pytest.mark.parametrize("documents", finetune.CASES.values())
def test_losses_agree(documents):
    rows = finetune.compare(documents, finetune.TINY, "cpu", 0.01)
    assert {name: row["status"] for name, row in rows.items() if "status" in row} == {"flex": "failed"}
    assert "does not support backward on CPU" in rows["flex"]["reason"]
    assert rows["cuattn"]["loss"] == pytest.approx(rows["sdpa"]["loss"], abs=2e-3)
    for name in ("cuattn", "sdpa"):
        assert min(rows[name][value] for value in ("median_us", "first_s", "peak_bytes")) > 0


def test_steps_learn():
    model, given = finetune.model_of(finetune.TINY, "cpu"), finetune.batch_of(finetune.TINY, 4, "cpu")
    step = finetune.stepper(model, given)
    losses = [float(step()) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert (given["position_ids"] == 0).sum() == 4  # the documents' first tokens
