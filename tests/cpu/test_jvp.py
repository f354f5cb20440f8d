"""Derivatives along tangents on the CPU, by tiles of any sizes and by whole heads."""

import numpy as np
import pytest
from hypothesis import given, settings

import cuattn
from tests.conftest import Host
from tests.cpu.sizes import block_sizes, tiled, ways, whole_heads
from tests.derivatives import JVP, Known
from tests.strategies import cases
from tests.test_derivatives import OPERANDS, arrays_of, run
from tests.tolerances import assert_same

FUNCTIONS = {
    "adds": lambda s, b, h, i, j, slope, table, rows: (
        s + slope[h] * np.abs(i - j) / 50 + table[h, np.clip(i - j, -9, 9) + 9]
    ),
    "bends": lambda s, b, h, i, j, slope, table, rows: (
        s * (1 + 0.5 * np.tanh(slope[h] * rows[i])) + table[h, np.clip(i - j, -9, 9) + 9] ** 2
    ),
    "hides": lambda s, b, h, i, j, slope, table, rows: (
        np.where((i + j) % 3 > 0, 3 * np.tanh(s / 3 * slope[h]), -np.inf) + np.sin(rows[i] * s)
    ),
}
WAYS = {"tiles": lambda: tiled(16, 32, 2, 2, 3), "whole heads": whole_heads, "head by head": lambda: whole_heads(1)}


def results_of(case, names):
    options = {name: x for name, x in case.options.items() if name != "rng"}
    arrays = arrays_of(case, names)
    return arrays, run(Host, arrays, options, case.options.get("rng"))[1:]


@settings(max_examples=30)
@given(case=cases(max_length=100), names=OPERANDS, sizes=block_sizes)
def test_every_way_matches_the_textbook(case, names, sizes):
    known = None
    for way in ways(sizes):
        with way():
            arrays, found = results_of(case, names)
        known = known or Known(arrays, case.reference())
        known.check(JVP, found[0])
        known.check_pair(*found[1:])


@settings(max_examples=15)
@given(case=cases(max_length=100), sizes=block_sizes)
def test_the_number_of_threads_changes_no_bit(case, sizes):
    for way in range(2):
        outcomes = []
        for workers in (1, 3):
            with ways(sizes, workers)[way]():
                outcomes.append([x for some in results_of(case, {"q", "k", "v", "bias", "do"})[1] for x in some])
        assert_same(*outcomes)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_score_functions_are_differentiated_once_more(name, softcap, way):
    """Against central differences of the forward and of the backward, every operand and argument moving at once."""
    rng = np.random.default_rng(5)
    n, m = 40, 50
    shapes = {"q": (2, 2, n, 6), "k": (2, 2, m, 6), "v": (2, 2, m, 5), "do": (2, 2, n, 5), "bias": (2, n, m)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    tangents = {f"t{name}": rng.standard_normal(x.shape) for name, x in arrays.items()}
    args = [rng.standard_normal(shape) for shape in ((2,), (2, 19), (n,))]
    targs = [rng.standard_normal(x.shape) for x in args]

    def at(step):
        return [x + step * t for x, t in zip(args, targs, strict=True)]

    def forward(step):
        q, k, v, bias = (arrays[name] + step * tangents[f"t{name}"] for name in ("q", "k", "v", "bias"))
        options = {"bias": bias, "softcap": softcap, "score": FUNCTIONS[name], "score_args": tuple(at(step))}
        fwd = cuattn.forward(q, k, v, **options)
        grads = cuattn.backward(arrays["do"] + step * tangents["tdo"], q, k, v, fwd, **options)
        return [fwd.o, fwd.lse, *grads, *grads.dscore]

    options = {"bias": arrays["bias"], "softcap": softcap, "score": FUNCTIONS[name], "score_args": tuple(args)}
    moved = {name: tangents[name] for name in ("tq", "tk", "tv", "tbias")} | {"tscore_args": tuple(targs)}
    q, k, v, do = (arrays[name] for name in ("q", "k", "v", "do"))
    with way():
        jvp = cuattn.jvp(q, k, v, **moved, **options)
        grads, slopes = cuattn.backward_jvp(do, q, k, v, jvp, tdo=tangents["tdo"], **moved, **options)
        still = cuattn.backward_jvp(do, q, k, v, jvp, **moved, **options)[1]
        moved["gdscore"], moved["gdbias"] = moved.pop("tscore_args"), moved.pop("tbias")
        gdq, gdk, gdv = (moved.pop(f"t{name}") for name in "qkv")
        double = cuattn.double_backward(gdq, gdk, gdv, do, q, k, v, jvp, **moved, **options)
    step = 1e-6
    ahead, here, behind = (forward(h) for h in (step, 0, -step))
    found = [jvp.to, jvp.tlse, *slopes, *slopes.dscore]
    for x, a, b in zip(found, ahead, behind, strict=True):
        wanted = (a - b) / (2 * step)
        assert np.abs(x - wanted).max() <= 1e-7 * max(1, np.abs(wanted).max())
    for x, wanted in zip([jvp.o, jvp.lse, *grads, *grads.dscore], here, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-9)
    for x, wanted in zip([*double, *double.dscore], [jvp.to, *still, *still.dscore], strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_key_that_no_row_sees_has_no_tangent_of_its_bias(way):
    q, k, v, do = np.random.default_rng(6).standard_normal((4, 2, 40, 8))
    bias, mask = np.zeros((1, 40)), np.broadcast_to(np.arange(40) < 30, (40, 40))
    found = []
    for hidden in (0, np.nan):
        options = {"bias": bias, "mask": mask, "tbias": np.where(mask[:1], 1.0, hidden)}
        with way():
            jvp = cuattn.jvp(q, k, v, **options)
            pair = cuattn.backward_jvp(do, q, k, v, jvp, **options)
        found.append([jvp.to, jvp.tlse, *pair[0], *pair[1]])
    assert_same(*found)


@pytest.mark.parametrize("way", [lambda: tiled(16, 16), whole_heads], ids=["tiles", "whole heads"])
@pytest.mark.parametrize("names", ["", "v", "do", "bias"])
def test_none_costs_no_product(names, way, monkeypatch):
    """Without a tangent of q or k no product is made for the scores' tangents."""
    from cuattn.cpu import direct, walk

    made = []
    for owner, name in ((walk.Walk, "by_keys"), (direct.Direct, "products")):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, plain=plain: made.append(a[1:]) or plain(*a))
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 40, 8))
    bias = rng.standard_normal((2, 40, 40))
    given_ = {f"t{name}": x for name, x in (("v", v), ("bias", bias)) if name == names}
    with way():
        jvp = cuattn.jvp(q, k, v, bias=bias, **given_)
        of_jvp = len(made)
        cuattn.backward_jvp(do, q, k, v, jvp, bias=bias, tdo=do if names == "do" else None, **given_)
    items = of_jvp
    assert len(made) - of_jvp == (2 + (names in ("v", "do"))) * items


def test_memory_does_not_grow_with_the_scores():
    x = [np.ones((1, n, 32), np.float32) for n in (2048, 8192)]
    for direction in ("jvp", "double_backward"):
        small, large = (cuattn.plan(q, q, q, direction=direction).workspace_bytes for q in x)
        assert large < 2 * small + 2**20
