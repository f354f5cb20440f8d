"""Algorithms 2, 4 and 5 along tangents, and the textbook's derivatives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import io_model, reference
from cuattn.reference import textbook
from cuattn.reference.derivatives import differentiate
from tests.reference.cases import DROPOUTS, FLOAT32, MASKS, cases, dense, draw_blocks
from tests.tolerances import assert_close, eps


@given(
    case=cases(), mask=MASKS, dropout=DROPOUTS, scale=st.sampled_from([None, 0.3]), in_hbm=st.booleans(),
    share=st.sampled_from([None, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_both_passes_match_the_textbook_and_the_model(case, mask, dropout, scale, in_hbm, share, seed):
    n, d = case.q.shape
    tq, tk, tv, tdo = np.random.default_rng(seed).standard_normal((4, n, d)).astype(FLOAT32)
    visible, blocks = dense(mask, n), None
    if share is not None:
        mask = in_hbm = None
        visible, blocks = None, np.ones_like(draw_blocks(n, d, io_model.sizes.halved(d, case.M), share, seed))
    options = {"scale": scale, "mask": visible if in_hbm else mask, "dropout_p": dropout.p, "b": dropout.b}
    options["blocks"] = blocks
    jvp = reference.flash_jvp(*case.qkv, tq, tk, tv, case.M, rng=dropout.state, **options)
    grads = reference.flash_backward_jvp(case.do, *case.qkv, jvp, tdo, tq, tk, tv, case.M, **options)
    sizes = (n, d, case.M, dropout.p > 0, bool(in_hbm and visible is not None), blocks)
    assert jvp.counts[:2] == io_model.flash_jvp(*sizes)
    assert grads.counts[:2] == io_model.flash_backward_jvp(*sizes)
    known = {"tq": tq, "tk": tk, "tv": tv, "tdo": tdo, "visible": visible, "scale": scale, **dropout.replay(n)}
    exact, rough = (differentiate(*case.qkv, case.do, **known, low=low) for low in (None, FLOAT32))
    for names, found in ((("o", "l", "to", "tlse"), jvp), (("dq", "dk", "dv", "tdq", "tdk", "tdv"), grads)):
        size = max(float(np.abs(getattr(exact, name)).max()) for name in names)
        for name in names:
            e, r = getattr(exact, name), getattr(rough, name)
            assert_close(getattr(found, name), e, r, dtype=FLOAT32, magnitude=size, name=name)


@pytest.mark.parametrize("n", [64, 96])
def test_counts_are_the_closed_forms(n):
    d, m = 8, 512
    t_c = 8 * n * d // m
    assert io_model.flash_jvp(n, d, m).total == t_c * (6 * n * d + 6 * n) + 6 * n * d + 3 * n
    assert io_model.flash_backward_jvp(n, d, m).total == t_c * (10 * n * d + 3 * n) + 14 * n * d


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropped", [False, True])
def test_the_textbook_is_the_complex_step_of_attention(softcap, biased, masked, dropped):
    """The imaginary part of a step of 1e-30 i is the derivative to the last digits, without any formula for it."""
    generator, step = np.random.default_rng(3), 1e-30
    shapes = {"q": (2, 7, 5), "k": (2, 9, 5), "v": (2, 9, 4), "do": (2, 7, 4), "bias": (2, 7, 9)}
    arrays = {name: generator.standard_normal(shape) for name, shape in shapes.items() if biased or name != "bias"}
    tangents = {f"t{name}": generator.standard_normal(x.shape) for name, x in arrays.items()}
    visible = generator.random((2, 7, 9)) < 0.7 if masked else np.ones((2, 7, 9), bool)
    visible[:, 2] = not masked
    z = (generator.random((2, 7, 9)) < 0.6) / 0.6 if dropped else np.ones((2, 7, 9))

    def attention(q, k, v, do, bias=0.0):
        x = 0.7 * q @ k.swapaxes(1, 2)
        tanh = np.tanh(x / softcap) if softcap else x
        e = np.where(visible, np.exp((softcap or 1) * tanh + bias), 0)
        l = e.sum(-1, keepdims=True) + ~visible.any(-1, keepdims=True)
        p = e / l
        o, dp = (p * z) @ v, (do @ v.swapaxes(1, 2)) * z
        ds = p * (dp - (do * o).sum(-1, keepdims=True))
        dx = ds * (1 - tanh**2) if softcap else ds
        return o, np.log(l)[..., 0], 0.7 * dx @ k, 0.7 * dx.swapaxes(1, 2) @ q, (p * z).swapaxes(1, 2) @ do, ds

    moved = attention(**{name: x + 1j * step * tangents[f"t{name}"] for name, x in arrays.items()})
    keep = {"keep": z > 0, "keep_scale": 1 / 0.6} if dropped else {}
    do = arrays.pop("do")
    q, k, v = (arrays.pop(name) for name in "qkv")
    tangents = tangents | keep | arrays
    found = differentiate(q, k, v, do, **tangents, visible=visible, scale=0.7, softcap=softcap)
    plain = textbook.solve(q, k, v, do, visible=visible, scale=0.7, softcap=softcap, **keep, **arrays)
    names = ("o", "lse", "dq", "dk", "dv", "dbias")
    for name, known in zip(names, moved, strict=True):
        pairs = [(f"t{name}", known.imag / step)] + ([] if name == "lse" else [(name, known.real)])
        for label, wanted in pairs if biased or name != "dbias" else ():
            size = 64 * eps(np.float64) * max(float(np.abs(wanted).max()), 1)
            assert np.abs(getattr(found, label).astype(np.float64) - wanted).max() <= size, label
        if name in plain._fields and getattr(plain, name) is not None:
            np.testing.assert_allclose(
                getattr(found, name).astype(float), getattr(plain, name).astype(float), atol=1e-14
            )
