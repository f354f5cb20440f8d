"""Derivatives along tangents against the textbook; every body runs on NumPy and, on a GPU, on CuPy arrays."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuattn
from cuattn.errors import ArgumentError, DtypeError, ShapeError
from tests import oracle
from tests.derivatives import GRADIENTS, JVP, TANGENTS, Known, results_of, tangents_of
from tests.strategies import BFLOAT16, cases, normal
from tests.test_api import PADDED, USED, dtypes, padded, poisons, random
from tests.tolerances import assert_close, assert_same

FLOAT64 = np.dtype(np.float64)
OPERANDS = st.sets(st.sampled_from(("q", "k", "v", "bias", "do")))


def unrounded(dtype):
    return np.float64 if dtype == np.float64 else np.float32


def run(xp, arrays, options, seed=None):
    """Return the jvp and, of a backward_jvp, the gradients and their tangents, as NumPy arrays."""
    put = {name: None if x is None else xp.put(x) for name, x in arrays.items()}
    do, q, k, v = (put.pop(name) for name in ("do", "q", "k", "v"))
    options = {name: xp.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    tdo = put.pop("tdo")
    jvp = cuattn.jvp(q, k, v, **put, **options, rng=seed, out_dtype=unrounded(q.dtype))
    pair = cuattn.backward_jvp(do, q, k, v, jvp, tdo=tdo, **put, **options)
    return jvp, results_of(jvp, xp.get), *([x if x is None else xp.get(x) for x in part] for part in pair)


def arrays_of(case, names):
    arrays = {"q": case.q, "k": case.k, "v": case.v, "do": case.do, "bias": case.bias}
    return arrays | tangents_of(arrays, names)


@settings(max_examples=10)  # on a GPU each is compiled for its features; tests/cpu has more
@given(case=cases(), names=OPERANDS)
def test_results_match_the_textbook(xp, case, names):
    arrays = arrays_of(case, names)
    options = {name: x for name, x in case.options.items() if name != "rng"}
    known = Known(arrays, case.reference())
    jvp, found, gradients, tangents = run(xp, arrays, options, case.options.get("rng"))
    assert jvp.rng_state == case.options.get("rng")
    known.check(JVP, found)
    known.check_pair(gradients, tangents)
    for some in (gradients, tangents):
        for x, like in zip(some, (case.q, case.k, case.v, case.bias), strict=True):
            assert x is None or (x.shape, x.dtype) == (like.shape, like.dtype)


@settings(max_examples=5)
@given(case=cases(), names=OPERANDS)
def test_a_double_backward_is_the_gradient_along_tangents(xp, case, names):
    arrays = arrays_of(case, names - {"do"})
    options = {name: x for name, x in case.options.items() if name != "rng"}
    known = Known(arrays, case.reference())
    put = {name: None if x is None else xp.put(x) for name, x in arrays.items()}
    options = {name: xp.put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()} | {
        "bias": put["bias"]
    }
    args, given_ = [put[name] for name in ("do", "q", "k", "v")], [put[f"t{name}"] for name in "qkv"]
    fwd = cuattn.forward(*args[1:], **options, rng=case.options.get("rng"))
    double = cuattn.double_backward(*given_, *args, fwd, gdbias=put["tbias"], **options)
    found = [x if x is None else xp.get(x) for x in double]
    assert found[0].dtype == case.do.dtype
    known.check(("to", *TANGENTS), found)


@dtypes
@pytest.mark.parametrize("is_causal", [False, True])
def test_accuracy(xp, dtype, is_causal):
    """The plain rule, on a problem so large that no textbook is right by luck; float64's sums are in tiles' order."""
    q, k, v, do, tq, tk, tv, tdo = random(12, 8, 2, 520, 64, dtype=dtype)
    arrays = {"q": q, "k": k, "v": v, "do": do, "tq": tq, "tk": tk, "tv": tv, "tdo": tdo}
    visible = oracle.visible_band(520, 520, None, 0, 0) if is_causal else None
    known = Known(arrays, {"visible": visible}, samples=int(dtype == FLOAT64))
    _, found, _, tangents = run(xp, arrays, {"is_causal": is_causal})
    known.check(("o", "to", "tlse", *TANGENTS), [found[0], *found[3:], *tangents])


@dtypes
@pytest.mark.parametrize("kind", ["sharp rows", "constant along rows", "of q itself"])
def test_tangents_that_cancel_keep_the_rule(xp, dtype, kind):
    q, k, v, do, tq, tk, tv, tdo = random(13, 8, 1, 200, 32, dtype=dtype)
    if kind == "sharp rows":
        q = (q * 6).astype(dtype)
    elif kind == "constant along rows":  # q.k has a part that is the same for all keys, and moves most
        k[..., 0], tq[..., 0], tk[...] = 1, 100, 0
    else:
        tq, tk = q, k
    arrays = {"q": q, "k": k, "v": v, "do": do, "tq": tq, "tk": tk, "tv": tv, "tdo": tdo}
    known = Known(arrays, {})
    _, found, *pair = run(xp, arrays, {})
    known.check(("o", "to", "tlse"), [found[0], *found[3:]])
    known.check_pair(*pair)


@pytest.mark.parametrize("n", [256, 453, 1000])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), FLOAT64])
def test_equal_numbers_are_known_to_the_roundings_of_two_sums(n, dtype):
    """The floor is of that size, sums of equal terms in a row are within it, and what is wrong is not."""
    q, k, v, do = (np.full((1, rows, 16), x, dtype) for rows, x in ((5, 0.3), (n, 0.7), (n, -1.1), (5, 0.9)))
    known = Known({"q": q, "k": k, "v": v, "do": do}, {}, samples=6)
    size, two = known.moved["o"] / (known.sums * 1.1), 4 * n**0.5
    assert two <= size <= two + 48  # and a few roundings of each number on the way
    for weight in np.random.default_rng(0).uniform(0.5, 2, 20).astype(dtype):
        o = np.cumsum(np.full(n, weight * v[0, 0, 0]))[-1] / dtype.type(n * weight)
        known.check(["o"], [np.full(do.shape, o, dtype)])
    jvp = cuattn.jvp(q, k, v, tq=q)
    known.check(("o", *GRADIENTS), [jvp.o, *cuattn.backward_jvp(do, q, k, v, jvp, tq=q)[0]])
    for wrong in (1 + 3 * size * known.sums, 1 - 1 / n):  # as if a key were missing
        o = jvp.o * dtype.type(wrong)
        gradients, _ = cuattn.backward_jvp(do, q, k, v, jvp._replace(o=o), tq=q)
        for name, x in (("o", o), ("dq", gradients.dq), ("dk", gradients.dk)):
            with pytest.raises(AssertionError, match=f"{name}: error"):
                known.check([name], [x])


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), FLOAT64])
def test_scores_of_equal_numbers_are_known_to_the_roundings_of_their_sum(dtype):
    d = 256
    for a, b in np.random.default_rng(0).uniform(0.5, 2, (20, 2)).astype(dtype):
        q, k, v = np.full((1, 3, d), a), np.full((1, 5, d), b), np.ones((1, 5, 8), dtype)
        known = Known({"q": q, "k": k, "v": v, "do": None}, {"scale": 1.0}, samples=4)
        size, m = known.moved["m"] / (known.sums * d * float(a) * float(b)), np.cumsum(np.full(d, a * b))[-1]
        assert 32 <= size <= 2 * 32 + 16  # of q and of k, and a few of the product itself
        known.check(["m"], [np.full((1, 3), m, dtype)])
        with pytest.raises(AssertionError, match="m: error"):
            known.check(["m"], [np.full((1, 3), m * dtype.type(1 + 3 * size * known.sums), dtype)])


@settings(max_examples=10)
@given(case=cases(plain=True, mask_kinds=("none",)), cut=st.floats(0, 1), seed=st.none() | st.integers(0, 9))
def test_merged_jvps_of_shards_are_the_whole(xp, case, cut, seed):
    """And the gradients of shards, with the merged jvp, add up; dropout is replayed from each part's place."""
    n, m = case.k.shape[-2], int(case.k.shape[-2] * cut) // 16 * 16
    arrays = arrays_of(case, ["q", "k", "v", "do"])
    options = {"dropout_p": 0.0 if seed is None else 0.3}
    shape = (*case.do.shape[:-1], n)
    known = Known(arrays, oracle.dropped(seed, options["dropout_p"], shape))
    wide, total, found, parts = unrounded(case.q.dtype), {}, [], []
    for part in (slice(0, m), slice(m, n)):
        put = {name: None if x is None else xp.put(x) for name, x in arrays.items() if "bias" not in name}
        put |= {name: xp.put(np.ascontiguousarray(arrays[name][..., part, :])) for name in ("k", "v", "tk", "tv")}
        do, tdo, args = put.pop("do"), put.pop("tdo"), [put.pop(name) for name in "qkv"]
        options |= {"origin": cuattn.Origin(key=part.start), "out_dtype": wide}
        parts.append((do, tdo, args, put, dict(options)))
        found.append(cuattn.jvp(*args, **put, **options, rng=seed))
    merged, other = cuattn.merge(*found), cuattn.merge(*found[::-1])
    for a, b in zip(merged[4:], other[4:], strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))
    known.check(JVP, results_of(merged, xp.get), dtype=case.q.dtype)
    for (do, tdo, args, put, given_), part in zip(parts, (slice(0, m), slice(m, n)), strict=True):
        pair = cuattn.backward_jvp(do, *args, merged, tdo=tdo, **put, **given_)
        for names, some in zip((GRADIENTS, TANGENTS), pair, strict=True):
            for name, x in zip(names[:3], some, strict=False):
                full = total.setdefault(name, np.zeros(getattr(known.exact, name).shape, wide))
                full[(..., slice(None) if name.endswith("q") else part, slice(None))] += xp.get(x)
    known.check(total, total.values(), dtype=case.q.dtype)


def test_parts_of_several_pieces_are_the_whole(xp):
    """Zigzag parts of a causal problem with dropout, a softcap and a score function."""
    names = "q", "k", "v", "do", "tq", "tk", "tv", "tdo"
    arrays = dict(zip(names, random(14, 8, 2, 128, 16, dtype=FLOAT64), strict=True))
    weights, moved = (x[0] for x in random(15, 2, 1, 128, dtype=FLOAT64))
    given_ = {"score_args": (xp.put(weights),), "tscore_args": (xp.put(moved),)}
    options = {"dropout_p": 0.25, "is_causal": True, "softcap": 5.0, **given_}
    options["score"] = lambda s, b, h, i, j, w: s * (1 + 0.1 * np.tanh(w[i] - w[j]))
    pieces = ((0, 0), (32, 96)), 32
    places = [np.r_[0:32, 96:128], np.r_[32:96]]

    def operands(rows, keys):
        taken = {name: xp.put(x[:, keys if name[-1] in "kv" else rows].copy()) for name, x in arrays.items()}
        return [taken.pop(name) for name in ("do", "q", "k", "v", "tdo")], taken

    def gradients(rows, keys, jvp, **origin):
        (do, q, k, v, tdo), tangents = operands(rows, keys)
        pair = cuattn.backward_jvp(do, q, k, v, jvp, tdo=tdo, **tangents, **options, **origin)
        return [xp.get(x) for part in pair for x in (*part[:3], *part.dscore)]

    def jvp_of(rows, keys, **origin):
        (_, q, k, v, _), tangents = operands(rows, keys)
        return cuattn.jvp(q, k, v, **tangents, **options, rng=7, **origin)

    everything = np.arange(128)
    whole = jvp_of(everything, everything)
    wanted = gradients(everything, everything, whole)
    total = [np.zeros_like(x) for x in wanted]
    for row, rows in zip(pieces, places, strict=True):
        origins = [cuattn.Origin(row=row, key=key) for key in pieces]
        merged = cuattn.merge(*(jvp_of(rows, keys, origin=at) for at, keys in zip(origins, places, strict=True)))
        for a, b in zip(merged[4:], whole[4:], strict=True):
            np.testing.assert_allclose(xp.get(a), xp.get(b)[:, rows], atol=1e-13)
        for at, keys in zip(origins, places, strict=True):
            for n, x in enumerate(gradients(rows, keys, merged, origin=at)):
                taken = [(slice(None), rows), (slice(None), keys), (slice(None), keys), ...][n % 4]
                total[n][taken] += x
    for x, y in zip(total, wanted, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-12)


@dtypes
@poisons
@pytest.mark.parametrize("form", ["column", "dense", "bias"])
def test_invisible_keys_and_empty_rows_never_leak(xp, dtype, poison, form):
    options, used = padded(form, dtype), USED
    names = ["q", "k", "v", "do", "tq", "tk", "tv", "tdo"]
    arrays = dict(zip(names, random(6, 8, 2, PADDED, 32, dtype=dtype), strict=True))
    outcomes = []
    for value in (0, poison):
        for x in arrays.values():
            x[:, used:] = value
        put = {name: x.copy() for name, x in arrays.items()}
        _, found, *pair = run(xp, put, options)
        outcomes.append([*found, *(x for part in pair for x in part[:3])])
    assert_same(*outcomes)
    for x in outcomes[0][3:]:
        assert np.isfinite(x.astype(np.float32)).all() and not x[:, used:].any()


def test_an_empty_problem_and_empty_rows_give_0(xp):
    for nq, nk, dv in ((0, 5, 8), (5, 0, 8), (5, 4, 0)):
        q, k, v, do = (xp.put(np.ones((2, *shape), np.float32)) for shape in ((nq, 4), (nk, 4), (nk, dv), (nq, dv)))
        jvp = cuattn.jvp(q, k, v, tq=q, tk=k, tv=v)
        pair = cuattn.backward_jvp(do, q, k, v, jvp, tq=q, tk=k, tv=v, tdo=do)
        double = cuattn.double_backward(q, k, v, do, q, k, v, jvp)
        if nk == 0:
            assert not xp.get(jvp.to).any() and not xp.get(jvp.tlse).any()
        assert [x.shape for x in (*pair[0][:3], *pair[1][:3], *double[1:4])] == 3 * [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("deterministic", [False, True])
@dtypes
def test_values_without_columns_leave_the_gradient_of_lse(xp, dtype, deterministic):
    q, k, tq, tk = random(9, 4, 2, 40, 16, dtype=dtype)
    v = do = np.ones((2, 40, 0), dtype)
    dlse = np.random.default_rng(2).standard_normal((2, 40)).astype(unrounded(dtype))
    arrays = {"q": q, "k": k, "v": v, "do": do, "tq": tq, "tk": tk, "tv": v, "tdo": do}
    known = Known(arrays, {"dlse": dlse})
    args, options = [xp.put(arrays[name]) for name in ("do", "q", "k", "v")], {"dlse": xp.put(dlse)}
    found = cuattn.backward(*args, cuattn.forward(*args[1:]), deterministic=deterministic, **options)
    known.check(GRADIENTS[:3], [xp.get(x) for x in found[:3]])
    jvp = cuattn.jvp(*args[1:], tq=xp.put(tq), tk=xp.put(tk), tv=xp.put(v), out_dtype=unrounded(dtype))
    more = {name: xp.put(arrays[name]) for name in ("tq", "tk", "tv", "tdo")}
    pair = cuattn.backward_jvp(*args, jvp, **more, **options)
    known.check_pair(*([x if x is None else xp.get(x) for x in part] for part in pair))


@dtypes
def test_same_seed_same_bits(xp, dtype):
    q, k, v, do, tq, tk, tv = map(xp.put, random(4, 7, 2, 130, 32, dtype=dtype))
    runs = []
    for _ in range(2):
        jvp = cuattn.jvp(q, k, v, tq=tq, tk=tk, tv=tv, dropout_p=0.2, rng=cuattn.RNGState(7, 1))
        options = {"dropout_p": 0.2, "deterministic": True}
        pair = cuattn.backward_jvp(do, q, k, v, jvp, tq=tq, tk=tk, tv=tv, **options)
        double = cuattn.double_backward(tq, tk, tv, do, q, k, v, jvp, **options)
        runs.append([*jvp[:3], *jvp[4:], *pair[0][:3], *pair[1][:3], *double[:4]])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(xp.get(a), xp.get(b))


def test_a_jvp_serves_as_a_forward(xp):
    q, k, v, do = map(xp.put, random(5, 4, 2, 40, 16))
    jvp, fwd = cuattn.jvp(q, k, v, tv=v), cuattn.forward(q, k, v)
    for a, b in zip(cuattn.backward(do, q, k, v, jvp)[:3], cuattn.backward(do, q, k, v, fwd)[:3], strict=True):
        np.testing.assert_allclose(xp.get(a), xp.get(b), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(xp.get(jvp.lse), xp.get(fwd.lse), rtol=1e-6)
    with pytest.raises(DtypeError, match="a Jvp and a Forward"):
        cuattn.merge(jvp, fwd)


def test_dlse_is_a_constant_of_the_backward(xp):
    q, k, v, do, tq = random(6, 5, 2, 40, 16, dtype=np.dtype(np.float64))
    dlse = random(7, 1, 2, 40, dtype=np.dtype(np.float64))[0]
    arrays = {"q": q, "k": k, "v": v, "do": do, "tq": tq}
    known = Known(arrays, {"dlse": dlse})
    *args, t = (xp.put(x) for x in (do, q, k, v, tq))
    jvp = cuattn.jvp(*args[1:], tq=t)
    for names, some in zip(
        (GRADIENTS, TANGENTS), cuattn.backward_jvp(*args, jvp, tq=t, dlse=xp.put(dlse)), strict=True
    ):
        known.check(names[:3], [xp.get(x) for x in some[:3]])
    double = cuattn.double_backward(t, None, None, *args, jvp, dlse=xp.put(dlse))
    np.testing.assert_array_equal(xp.get(double.ddlse), xp.get(jvp.tlse))
    known.check(("to", *TANGENTS[:3]), [xp.get(x) for x in double[:4]])


def test_out_is_filled(xp):
    q, k, v, do = map(xp.put, random(8, 4, 2, 40, 16))
    out = tuple(x * 0 for x in (do, do[..., 0], do[..., 0], do, do[..., 0]))
    jvp = cuattn.jvp(q, k, v, tq=q, out=out)
    assert all(a is b for a, b in zip((*jvp[:3], *jvp[4:]), out, strict=True))
    wanted = cuattn.backward_jvp(do, q, k, v, jvp, tq=q, deterministic=True)
    tangents = tuple(x * 0 for x in (q, k, v))
    _, found = cuattn.backward_jvp(do, q, k, v, jvp, tq=q, deterministic=True, out=(None, tangents))
    assert found.dk is tangents[1]
    np.testing.assert_array_equal(xp.get(found.dq), xp.get(wanted[1].dq))
    ddo = do * 0
    assert cuattn.double_backward(q, None, None, do, q, k, v, jvp, out=(ddo, None, None, None)).ddo is ddo
    np.testing.assert_allclose(xp.get(ddo), xp.get(jvp.to), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("bends", [False, True])
def test_score_functions(xp, dtype, bends):
    """Against the CPU in float64, which tests/cpu compares with differences."""
    n, heads = 150, 2
    arrays = dict(zip(("q", "k", "v", "do", "tq", "tk", "tv", "tdo"), random(9, 8, heads, n, 16), strict=True))
    args = [x.reshape(shape) for x, shape in zip(random(10, 4, heads, n), ((heads, n),) * 4, strict=True)]

    def score(s, b, h, i, j, rows, table):
        t = table[h, np.clip(i - j, -40, 40) + 40]
        return s * (1 + 0.5 * np.tanh(rows[h, i])) + t * t if bends else s + rows[h, i] * 0.5 + t

    def results(put, dtype):
        a = {name: put(x.astype(dtype)) for name, x in arrays.items()}
        do, q, k, v, tdo = (a.pop(name) for name in ("do", "q", "k", "v", "tdo"))
        given_, tangents = [tuple(put(x.astype(dtype)) for x in pair) for pair in (args[:2], args[2:])]
        options = {"score": score, "score_args": given_, "softcap": 6.0 if bends else None}
        jvp = cuattn.jvp(q, k, v, **a, tscore_args=tangents, **options, out_dtype=unrounded(q.dtype))
        pair = cuattn.backward_jvp(do, q, k, v, jvp, tdo=tdo, **a, tscore_args=tangents, **options)
        return [jvp.o, jvp.to, jvp.tlse, *(x for part in pair for x in (*part[:3], *part.dscore))]

    moved = np.random.default_rng(11)
    exact, near = (results(lambda x, u=u: x * (1 + u * moved.choice((-1, 1), x.shape)), np.float64) for u in (0, 1e-9))
    rough = results(lambda x: x, dtype)
    for e, n, r, x in zip(exact, near, rough, map(xp.get, results(xp.put, dtype)), strict=True):
        # Terms of sums are of about 1 also where they cancel, and operands no better known than to some roundings.
        size = 64 * max(float(np.abs(e).max()), 1) + 8 * float(np.abs(e - n).max()) / 1e-9
        assert_close(x, e, r, dtype=x.dtype, magnitude=size)


ERRORS = [
    (lambda x, j: cuattn.jvp(x, x, x, tq=x[:3]), ShapeError, r"tq has shape \(3, 4\)"),
    (lambda x, j: cuattn.jvp(x, x, x, tk=x.astype(np.float64)), DtypeError, "tk has dtype float64"),
    (lambda x, j: cuattn.jvp(x, x, x, tbias=x), ArgumentError, "tbias is given but bias is None"),
    (lambda x, j: cuattn.jvp(x, x, x, tscore_args=(x,)), ArgumentError, "tscore_args is given but score is None"),
    (lambda x, j: cuattn.backward_jvp(x, x, x, x, j[:4]), DtypeError, "jvp is tuple; expected a Jvp"),
    (lambda x, j: cuattn.backward_jvp(x, x, x, x, j._replace(to=x[:3])), ShapeError, r"jvp\.to has shape"),
    (lambda x, j: cuattn.backward_jvp(x, x, x, x, j, tdo=x[:2]), ShapeError, r"tdo has shape \(2, 4\)"),
    (lambda x, j: cuattn.backward_jvp(x, x, x, x, j, dropout_p=0.5), ArgumentError, r"jvp\.rng_state is None"),
    (lambda x, j: cuattn.double_backward(x[:1], None, None, x, x, x, x, j), ShapeError, r"gdq has shape \(1, 4\)"),
    (lambda x, j: cuattn.double_backward(x, x, x, x, x, x, x, j, gdbias=x), ArgumentError, "gdbias is given"),
    (lambda x, j: cuattn.double_backward(x, x, x, x, x, x, x, j, dropout_p=0.5), ArgumentError, "fwd.rng_state is"),
    (lambda x, j: cuattn.double_backward(x, x, x, x, x, x, x, x), DtypeError, "fwd is ndarray; expected a Forward"),
    (lambda x, j: cuattn.backward_jvp(x, x, x, x, j, out=(x, x)), ArgumentError, "out is .*; expected two tuples"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors_name_the_argument(call, error, message):
    x = np.ones((8, 4), np.float32)
    with pytest.raises(error, match=message):
        call(x, cuattn.jvp(x, x, x, tq=x))


SCORED = [
    ({"tscore_args": (1, 2)}, "tscore_args has 2 items; expected a tuple of 3"),
    ({"tscore_args": (None, np.ones(8), None)}, r"tscore_args\[1\] is given but score_args\[1\] is no array of floats"),
    ({"tscore_args": (np.ones(3), None, None)}, r"tscore_args\[0\] has shape \(3,\)"),
]


@pytest.mark.parametrize(("options", "message"), SCORED, ids=[message for _, message in SCORED])
def test_tangents_of_score_arguments_are_checked(options, message):
    x = np.ones((8, 4))
    args = np.ones(8), np.arange(8), 2.0
    with pytest.raises((ArgumentError, ShapeError), match=message):
        cuattn.jvp(x, x, x, score=lambda s, b, h, i, j, a, n, c: s + a[i] * n[j] * c, score_args=args, **options)


@pytest.mark.parametrize("direction", ["jvp", "backward_jvp", "double_backward"])
def test_plans(xp, direction):
    q = xp.put(normal(np.random.default_rng(0), (2, 40, 16), BFLOAT16))
    found = cuattn.plan(q, q, q, direction=direction)
    assert found.direction == direction and direction in str(found)


def test_memory_is_linear(xp):
    """The workspace of 16 times as many scores is at most about four times as large."""
    x = [xp.put(np.ones((1, n, 64), np.float32)) for n in (4096, 16384)]
    for direction in ("jvp", "backward_jvp", "double_backward"):
        small, large = (cuattn.plan(q, q, q, direction=direction).workspace_bytes for q in x)
        assert large <= 5 * small + 2**20, direction


@pytest.mark.parametrize("n_keys", [0, 40])
def test_what_a_broadcast_bias_is_known_to_is_a_small_part_of_its_gradient(n_keys):
    """Also where scores are capped, whose roundings move them one by one."""
    rng = np.random.default_rng(0)
    q, do, k, v = (rng.standard_normal((2, n, 16)).astype(np.float16) for n in (30, 30, n_keys, n_keys))
    arrays = {"q": q, "k": k, "v": v, "do": do, "bias": rng.standard_normal((30, 1)).astype(np.float16)}
    known = Known({**arrays, **tangents_of(arrays, arrays)}, {"softcap": 2.0}, samples=2)
    assert known.moved["tdbias"] <= 0.05 * np.abs(known.exact.tdv).max(initial=0)
