"""What users of PyTorch expect of a function: gradients of what requires them, seeds, autocast, checkpoints."""

import functools
import inspect

import pytest

torch = pytest.importorskip("torch")

from torch.nn.attention.bias import causal_lower_right  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts  # noqa: E402

import cuattn  # noqa: E402
from cuattn.errors import ArgumentError, DtypeError, ShapeError  # noqa: E402
from cuattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from tests import test_docs  # noqa: E402
from tests.test_layers import printed  # noqa: E402
from tests.torch.helpers import double, operands, textbook  # noqa: E402

SIGNATURES = {
    attention: "(q, k, v, *, mask=None, bias=None, is_causal=False, window=None, scale=None, softcap=None, "
    "dropout_p=0.0, enable_gqa=False, score=None, score_args=(), deterministic=None, return_lse=False)",
    scaled_dot_product_attention: "(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, "
    "enable_gqa=False)",
}


@pytest.mark.parametrize("function", SIGNATURES)
def test_signatures_and_docstrings(function):
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    assert str(inspect.Signature(bare)) == SIGNATURES[function]
    test_docs.test_docstrings_are_complete(f"cuattn.torch.{function.__name__}")


def test_it_is_there_when_it_is_asked_for():
    code = "import cuattn, sys; assert 'torch' not in sys.modules; print(cuattn.torch.attention.__name__)"
    assert printed(code + "; assert 'torch._dynamo' not in sys.modules") == "attention"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_those_of_the_core(dtype):
    q, k, v = (x.detach().to(dtype) for x in operands())
    fwd = cuattn.forward(q, k, v, enable_gqa=True, is_causal="bottom_right")
    gradients = cuattn.backward(fwd.o, q, k, v, fwd, enable_gqa=True, is_causal="bottom_right")
    options = {"enable_gqa": True, "is_causal": "bottom_right", "return_lse": True}
    plain, lse = attention(q, k, v, **options)
    given = [x.requires_grad_() for x in (q, k, v)]
    o, with_grad = attention(*given, **options)
    assert torch.equal(o, fwd.o) and torch.equal(plain, fwd.o)
    assert torch.equal(lse, fwd.lse) and torch.equal(with_grad, fwd.lse)
    for a, b in zip(torch.autograd.grad(o, given, fwd.o), gradients[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_what_requires_them(wanted):
    args = [x.detach().requires_grad_(bool(wanted >> n & 1)) for n, x in enumerate(operands())]
    attention(*args, enable_gqa=True).sin().sum().backward()
    found, args = [x.grad for x in args], [x.detach().requires_grad_() for x in args]
    textbook(*args).sin().sum().backward()
    for n, (a, b) in enumerate(zip(found, args, strict=True)):
        assert (a is not None) == bool(wanted >> n & 1)
        if a is not None:
            torch.testing.assert_close(a, b.grad)


def test_strides_of_every_kind():
    q, k, v = double(2, 5, 4, 3), double(2, 3, 2, 6), double(6, 2)
    arranged = q.transpose(1, 2), k.permute(0, 2, 3, 1), v.expand(2, 2, 6, 2)
    o = attention(*arranged, enable_gqa=True)
    torch.testing.assert_close(o, textbook(*arranged))
    found = torch.autograd.grad(o.sum(), (q, k, v))  # do has strides of 0
    for a, b in zip(found, torch.autograd.grad(textbook(*arranged).sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("n_queries", "n_keys", "heads"), [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_empty_sizes(n_queries, n_keys, heads):
    q, k, v = double(heads, n_queries, 3), double(heads, n_keys, 3), double(heads, n_keys, 2)
    o, lse = attention(q, k, v, return_lse=True)
    assert o.shape == (heads, n_queries, 2) and lse.shape == (heads, n_queries)
    (o.sum() + lse.exp().sum()).backward()
    assert not q.grad.any() and not k.grad.any() and not v.grad.any()


def test_rows_without_keys():
    q, k, v = operands()
    o, lse = attention(q, k, v, enable_gqa=True, window=(0, 0, "top_left"), mask=torch.arange(6) > 2, return_lse=True)
    assert not o[..., :3, :].any() and (lse[..., :3] == -torch.inf).all()
    gradients = torch.autograd.grad(o.sum() + lse.exp().sum(), (q, k, v), create_graph=True)
    assert all(x.isfinite().all() for x in gradients)
    sum(x.square().sum() for x in gradients).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_replay_dropout(reentrant):
    results = []
    for around in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=reentrant)):
        q, k, v = operands()
        torch.manual_seed(5)
        o = around(lambda *x: attention(*x, enable_gqa=True, dropout_p=0.5), q, k, v)
        o.sin().sum().backward()
        results.append((o, q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    torch.manual_seed(6)
    assert not torch.equal(results[0][0], attention(q, k, v, enable_gqa=True, dropout_p=0.5))


def test_the_seed_does_not_follow_the_default_device():
    q, k, v = operands()
    with torch.device("meta"):
        assert attention(q, k, v, enable_gqa=True, dropout_p=0.5).device.type == "cpu"


@pytest.mark.parametrize("recorded", [False, True])
def test_autocast_is_that_of_sdpa(recorded):
    for dtype in (torch.float32, torch.float16, torch.float64):
        q, k, v = (x.detach().to(dtype).requires_grad_(recorded) for x in operands())
        with torch.autocast("cpu", torch.bfloat16):
            o = attention(q, k, v, enable_gqa=True)
            assert o.dtype == sdpa(q, k, v, enable_gqa=True).dtype
        if recorded:
            o.sum().backward()
            assert q.grad.dtype == dtype


def test_determinism_follows_pytorch(monkeypatch):
    seen, core = [], cuattn.backward
    monkeypatch.setattr(cuattn, "backward", lambda *x, **o: seen.append(o["deterministic"]) or core(*x, **o))
    q, k, v = operands()
    for always in (False, True):
        torch.use_deterministic_algorithms(always)
        try:
            for own in (None, False, True):
                attention(q, k, v, enable_gqa=True, deterministic=own).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen == [False, False, True, True, False, True]


@pytest.mark.parametrize("form", ["none", "bool", "float", "causal", "key padding", "lower right"])
def test_sdpa_is_dropped_in(form):
    q, k, v, bias = *operands(), double(2, 1, 5, 6)
    options = {
        "none": {},
        "bool": {"attn_mask": torch.rand(5, 6) > 0.3},
        "float": {"attn_mask": bias},
        "causal": {"is_causal": True, "scale": 0.3},
        "lower right": {"attn_mask": causal_lower_right(5, 6)},
        "key padding": {"attn_mask": (torch.arange(6) < 4)[None, None, None]},
    }[form]
    inputs = [q, k, v, *[bias] * (form == "float")]
    results = []
    for function in (scaled_dot_product_attention, sdpa):
        o = function(q, k, v, enable_gqa=True, **options)
        results.append((o, *torch.autograd.grad(o.sin().sum(), inputs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_modes_that_watch_operators_see_it():
    q, k, v = operands()
    saved, calls = torch.ops.cuattn.forward.default, []
    policy = functools.partial(
        create_selective_checkpoint_contexts,
        lambda context, op, *_, **__: CheckpointPolicy.MUST_SAVE if op == saved else CheckpointPolicy.PREFER_RECOMPUTE,
    )
    kept, cuattn.forward = cuattn.forward, lambda *x, **o: calls.append(1) or kept(*x, **o)
    try:
        o = checkpoint(lambda q: attention(q * 2, k, v, enable_gqa=True), q, use_reentrant=False, context_fn=policy)
        o.sum().backward()
    finally:
        cuattn.forward = kept
    assert len(calls) == 1


CAPTURED = torch.ones(6, dtype=torch.float64, requires_grad=True)
ERRORS = [
    (lambda q, k, v: attention(q.detach().numpy(), k, v), DtypeError, "q is .*ndarray; expected a torch.Tensor"),
    (lambda q, k, v: attention(q, k.detach().numpy(), v), DtypeError, r"k is .*ndarray"),
    (lambda q, k, v: attention(q, k.float(), v, enable_gqa=True), DtypeError, "k has dtype float32"),
    (lambda q, k, v: attention(q, k, v), ShapeError, "enable_gqa=True"),
    (lambda q, k, v: attention(q, k, v, dropout_p=1.0, enable_gqa=True), ArgumentError, "dropout_p = 1.0"),
    (lambda q, k, v: attention(q, k, v, mask=q, enable_gqa=True), DtypeError, "mask has dtype float64"),
    (lambda q, k, v: attention(q, k, v, score_args=(q,)), ArgumentError, "score_args has 1 items but score is None"),
    (lambda q, k, v: attention(q, k, v, score_args=3), DtypeError, "score_args is .*int"),
    (
        lambda q, k, v: attention(q, k, v, enable_gqa=True, score=lambda s, b, h, i, j: s + CAPTURED[j]),
        ArgumentError,
        "captures a tensor that requires grad",
    ),
    (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, torch.ones(5, 6), is_causal=True),
        ArgumentError,
        "attn_mask is given and is_causal is True",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), ERRORS, ids=[message for *_, message in ERRORS])
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call(*operands())
