"""On a GPU: a training step beside PyTorch's own, second derivatives, checkpoints, CUDA graphs."""

import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cuattn  # noqa: E402
from cuattn.torch import attention, scaled_dot_product_attention  # noqa: E402
from tests.torch.helpers import inductor, textbook  # noqa: E402

pytestmark = pytest.mark.gpu


def tensors(*shape, n=3, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(n)]


def error(found, exact):
    return float((found.detach().double() - exact.detach()).abs().max())


@pytest.mark.parametrize("form", ["causal", "bool", "float"])
def test_a_training_step_in_16_bits_is_as_exact_as_that_of_sdpa(form):
    x, w = tensors(2, 300, 256, n=2, dtype=torch.bfloat16)
    bias = tensors(2, 4, 300, 300, n=1, dtype=torch.bfloat16)[0]
    options = {"causal": {"is_causal": True}, "bool": {"attn_mask": bias > 0}, "float": {"attn_mask": bias}}[form]
    given = [x, w, *[bias] * (form == "float")]
    results = []
    for function, dtype in ((scaled_dot_product_attention, None), (sdpa, None), (sdpa, torch.float64)):
        inputs = [t.detach().to(dtype or t.dtype).requires_grad_() for t in given]
        attn = inputs[2] if form == "float" else options.get("attn_mask")
        own = {"attn_mask": attn} if attn is not None else options
        q, k, v = ((inputs[0] * (n + 1) * 0.5).view(2, 300, 4, 64).transpose(1, 2) for n in range(3))
        o = function(q, k, v, **own).transpose(1, 2).reshape(2, 300, 256) * inputs[1]
        results.append((o, *torch.autograd.grad(o.float().sum(), inputs)))
    for ours, theirs, exact in zip(*results, strict=True):
        assert error(ours, exact) <= 2 * error(theirs, exact) + 2**-8 * float(exact.abs().max())


def test_second_derivatives():
    q, k, v = tensors(2, 3, 100, 32, dtype=torch.float64)

    def number(f):
        return lambda *x: (f(*x, is_causal=True) ** 2).sin().sum()

    t = [x.detach() * 0.1 for x in (q, k, v)]
    for transform in (
        lambda f: func.jvp(func.grad(number(f), (0, 1, 2)), (q, k, v), tuple(t)),
        lambda f: func.grad(lambda *x: sum((g * g).sum() for g in func.grad(number(f), (0, 1, 2))(*x)), (0, 1, 2))(
            q, k, v
        ),
        lambda f: func.vmap(func.grad(number(f), (0, 1, 2)))(q, k, v),
    ):
        found, known = (torch.utils._pytree.tree_leaves(transform(f)) for f in (attention, textbook))
        for a, b in zip(found, known, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_double_backward_in_16_bits():
    q, k, v = tensors(2, 4, 200, 64, dtype=torch.bfloat16)
    results = []
    for function, dtype in ((attention, torch.bfloat16), (textbook, torch.bfloat16), (textbook, torch.float64)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        o = function(*inputs, is_causal=True)
        gradients = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(g.float().square().sum() for g in gradients), inputs))
    for ours, theirs, exact in zip(*results, strict=True):
        assert error(ours, exact) <= 2 * error(theirs, exact) + 2**-7 * float(exact.abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_checkpoints_replay_dropout(dtype):
    results = []
    for around in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        given = tensors(2, 4, 130, 64, dtype=dtype)
        torch.manual_seed(5)
        o = around(lambda *x: attention(*x, dropout_p=0.5, deterministic=True), *given)
        results.append((o, *torch.autograd.grad(o.float().sin().sum(), given)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_each_replay_of_a_graph_drops_others():
    q, k, v = (x.detach() for x in tensors(2, 64, 32, dtype=torch.bfloat16))
    attention(q, k, v, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, dropout_p=0.5)
    outcomes = []
    for _ in range(2):
        graph.replay()
        outcomes.append(o.clone())
    assert not torch.equal(*outcomes)


def test_masks_of_the_library():
    q, k, v = tensors(2, 4, 200, 64, dtype=torch.float32)
    mask = cuattn.masks.causal_document([80, 120])
    for given in (mask, mask.to_device(), torch.from_numpy(mask.dense()).cuda()):
        o = attention(q, k, v, mask=given)
        known = textbook(*(x.double() for x in (q, k, v)), visible=torch.from_numpy(mask.dense()).cuda())
        torch.testing.assert_close(o.double(), known, rtol=1e-5, atol=1e-5)
        torch.autograd.grad(o.sum(), (q, k, v))


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_a_compiled_training_step(backend):
    mask = cuattn.masks.causal_document([80, 120])

    def step(q, k, v):
        return attention(q * 1.5, k, v, mask=mask, window=(50, 0), return_lse=True)

    given = tensors(2, 4, 200, 64, dtype=torch.bfloat16)
    results = []
    for function in (step, torch.compile(step, backend=backend, fullgraph=True)):
        for _ in range(2):
            o, lse = function(*given)
        results.append((o, lse, *torch.autograd.grad(o.float().sin().sum() + lse.sum(), given)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)


def test_compiled_checkpoints_replay_dropout():
    q, k, v = tensors(2, 4, 130, 64)

    def function(v):
        return checkpoint(lambda v: attention(q.detach(), k.detach(), v * 1, dropout_p=0.5), v, use_reentrant=False)

    o = torch.compile(function, backend="aot_eager", fullgraph=True)(v)
    (dv,) = torch.autograd.grad(o.sum(), v)  # o is linear in v
    torch.testing.assert_close((dv * v).sum(), o.sum(), rtol=1e-4, atol=1e-2)
