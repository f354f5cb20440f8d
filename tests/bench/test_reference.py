"""The reference on tensors agrees with the oracle on arrays, and its rule tells right from wrong."""

import numpy as np
import pytest

from tests import oracle

torch = pytest.importorskip("torch")

from bench import inputs, reference  # noqa: E402
from bench.cases import Case  # noqa: E402


def heads(case, gradients=True):
    found = inputs.make(case, "cpu")
    return found, inputs.reference(found, gradients, bool(case.dropout))


def case(mask=None, **options):
    return Case("t", "backward", 2, 2, 2, 80, 80, 16, dtype=options.pop("dtype", "float32"), mask=mask, **options)


@pytest.mark.parametrize("chunk", [560, 1 << 20])  # 7 rows of 80 keys, and all
@pytest.mark.parametrize(
    "problem", [case(), case(causal=True), case("share_question"), case("document"), case(dropout=0.3)], ids=str
)
def test_it_is_textbook_attention(problem, chunk, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", chunk)
    found, exact = heads(problem)
    for (b, h), results in exact.exact.items():
        visible = found.samples[b].column_mask().dense() if found.samples else None
        visible = np.tri(80, dtype=bool) if problem.causal else visible
        keep = {}
        if problem.dropout:
            from cuattn import rng

            state, threshold = rng.RNGState(*inputs.DROPOUT_STATE), rng.threshold(problem.dropout)
            keep["keep"] = rng.keep(state, threshold, b * 2 + h, (0, 80), (0, 80))
            keep["keep_scale"] = 65536 / (65536 - threshold)
        q, k, v, do = (x[b, h].double().numpy() for x in (found.q, found.k, found.v, found.do))
        o, _, _ = oracle.forward(q, k, v, visible=visible, **keep)
        gradients = oracle.backward(do, q, k, v, visible=visible, **keep)
        for name, value in zip(("o", "dq", "dk", "dv"), (o, *gradients), strict=False):
            np.testing.assert_allclose(results[name].numpy(), value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_rule_passes_pytorch_and_fails_a_percent_of_error(dtype):
    found, exact = heads(case(dtype=dtype, causal=True))
    leaves = [x.clone().requires_grad_() for x in (found.q, found.k, found.v)]
    o = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    results = {"o": o.detach()} | dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, found.do), strict=True))
    assert all(error["of_allowed"] <= 1 for error in exact.errors(results, peer=True).values())
    for name in results:
        wrong = {**results, name: results[name] * (1.05 if dtype == "bfloat16" else 1.001)}
        errors = exact.errors(wrong, peer=True)
        assert [key for key, error in errors.items() if error["of_allowed"] > 1] == [name]


@pytest.mark.parametrize("problem", [case(causal=True), case("document"), case(dropout=0.3)], ids=str)
def test_of_very_long_sequences_the_last_rows_are_checked(problem, monkeypatch):
    _, whole = heads(problem)
    monkeypatch.setattr(inputs, "ALL_ROWS_UP_TO", 64)
    monkeypatch.setattr(inputs, "LAST_ROWS", 24)
    _, last = heads(problem)
    for place, results in last.exact.items():
        assert set(results) == {"o", "dq"}
        for name, x in results.items():
            torch.testing.assert_close(x, whole.exact[place][name][-24:], rtol=0, atol=1e-12)
    o = torch.stack([whole.exact[b, b]["o"] for b in range(2)])[:, None].expand(2, 2, 80, 16)
    errors = last.errors({"o": o}, peer=False)
    assert errors["o"]["of_allowed"] < 0.5
    broken = o.clone()
    broken[:, :, -1] += 0.1
    assert last.errors({"o": broken}, peer=False)["o"]["of_allowed"] > 1
    assert last.spread(["o", "dq", "dk", "dv"]) > 0


def test_not_a_number_never_passes():
    found, exact = heads(case())
    o = torch.nn.functional.scaled_dot_product_attention(found.q, found.k, found.v)
    o[-1, -1, 3, 3] = torch.nan
    assert not exact.errors({"o": o}, peer=True)["o"]["of_allowed"] <= 1


def test_the_distance_is_relative():
    x = torch.ones(2, 3, 4, 5)
    assert reference.distance(x * 1.25, x) == pytest.approx(0.25)
    assert reference.distance(x, x) == 0


def test_the_spread_is_the_precisions():
    _, low = heads(case(dtype="bfloat16"))
    _, high = heads(case(dtype="float32"))
    assert 1e-3 < low.spread(["o", "dq"]) < 3e-2
    assert 1e-9 < high.spread(["o", "dq"]) < 1e-5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_noise_sees_a_wrong_probability(p):
    problem = Case("t", "forward", 1, 2, 2, 512, 512, 32, dtype="float32", dropout=p)
    found = inputs.make(problem, "cpu")
    plain = inputs.reference(found, False, False)
    torch.manual_seed(0)
    attend = torch.nn.functional.scaled_dot_product_attention
    assert inputs.dropout_noise(found, plain, attend(found.q, found.k, found.v, dropout_p=p)) == pytest.approx(
        1, abs=0.1
    )
    assert inputs.dropout_noise(found, plain, attend(found.q, found.k, found.v, dropout_p=p / 2)) < 0.7


def test_inputs_are_the_same_every_time():
    first, second = inputs.make(case("document"), "cpu"), inputs.make(case("document"), "cpu")
    assert torch.equal(first.q, second.q)
    assert first.samples == second.samples
    assert not torch.equal(first.q, first.do)
