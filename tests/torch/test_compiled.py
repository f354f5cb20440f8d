"""What PyTorch records: graphs of torch.compile and torch.export, modes that watch operators."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cuattn  # noqa: E402
from cuattn import masks  # noqa: E402
from cuattn.torch import attention, operators  # noqa: E402
from tests.torch.helpers import double, inductor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def operands(n=6):
    torch.manual_seed(0)
    return double(2, 4, n, 8), double(2, 2, n, 8), double(2, 2, n, 8)


def sloped(s, b, h, i, j, weights, factor):
    return s + weights[h] * factor * (i - j)


def near(b, h, i, j):
    return i - j < 3


def capturing(number):
    return lambda s, b, h, i, j: s * number


def same(compiled, plain, *inputs):
    """Assert that results and gradients agree."""
    results = []
    for function in (compiled, plain):
        torch.manual_seed(1)
        o = function(*inputs)
        outputs = o if isinstance(o, tuple) else (o,)
        wanted = [x for x in inputs if isinstance(x, torch.Tensor)]
        results.append((*outputs, *torch.autograd.grad(sum(x.sin().sum() for x in outputs), wanted)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


WHOLE = {
    "plain": {},
    "scalars": {"is_causal": True, "window": (2, None), "scale": 0.3, "softcap": 2.0, "return_lse": True},
    "bool": {"mask": torch.ones(6, 6).tril().bool()},
    "column mask": {"mask": masks.causal_document([2, 4])},
    "block mask": {"mask": masks.BlockMask(np.tri(3) > 0, 2, 2)},
    "function": {"mask": near},
    "dropout": {"dropout_p": 0.5, "deterministic": True},
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_graph_takes_it_whole(name):
    def function(q, k, v):
        return attention(q * 1.5, k, v, enable_gqa=True, **WHOLE[name])

    same(torch.compile(function, backend="aot_eager", fullgraph=True), function, *operands())


def test_a_graph_takes_biases_and_score_functions():
    def function(q, k, v, bias, weights):
        return attention(q, k, v, enable_gqa=True, bias=bias, score=sloped, score_args=(weights, 2.0))

    same(
        torch.compile(function, backend="aot_eager", fullgraph=True), function, *operands(), double(4, 6, 6), double(4)
    )


@pytest.mark.parametrize("backend", [inductor])
def test_inductor(backend):
    def function(q, k, v):
        return attention(q.relu(), k, v, enable_gqa=True, is_causal=True, return_lse=True)

    same(torch.compile(function, backend=backend, fullgraph=True), function, *operands())


@pytest.mark.parametrize("score", [capturing(2.0), lambda s, b, h, i, j, w=2.0: s * w])
def test_functions_that_capture_break_a_graph(score):
    def function(q, k, v):
        return attention(q * 1.5, k, v, enable_gqa=True, score=score).sin()

    same(torch.compile(function, backend="aot_eager"), function, *operands())
    torch._dynamo.reset()
    with pytest.raises(Exception, match="capture only globals"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(*operands())


def test_another_function_of_the_same_code_is_told_apart():
    compiled = torch.compile(lambda q, k, v, f: attention(q, k, v, enable_gqa=True, score=f), backend="aot_eager")
    for function in map(capturing, (1.0, 2.0, 3.0)):
        found = compiled(*operands(), function)
        assert torch.equal(found, attention(*operands(), enable_gqa=True, score=function))


@pytest.mark.parametrize(
    "options",
    [
        lambda n: {"is_causal": True},
        lambda n: {"window": (n // 2, 0)},
        lambda n: {"mask": masks.causal_document([2, n - 2])},
    ],
)
def test_shapes_windows_and_masks_are_dynamic(options):
    def function(q, k, v, options):
        return attention(q, k, v, enable_gqa=True, **options)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for n in (6, 7, 9, 17):
        given = options(n)
        same(lambda *x, of=given: compiled(*x, of), lambda *x, of=given: function(*x, of), *operands(n))
    assert counter.frame_count <= 3


def test_a_new_mask_of_the_same_shape_needs_no_new_graph():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, mask: attention(q, k, v, mask=mask), backend=counter, fullgraph=True)
    q = double(2, 6, 8)
    for lengths in ([2, 4], [1, 5], [3, 3], [6]):
        mask = masks.causal_document(lengths)
        assert torch.equal(compiled(q, q, q, mask), attention(q, q, q, mask=mask))
    assert counter.frame_count == 1


def test_a_mask_that_was_written_to_is_another():
    vectors = torch.tensor([[6] * 6, [6] * 6, [0] * 6, list(range(6))], dtype=torch.int32)
    q, tail = double(2, 6, 8), ([], -1, -1, "", None, None, "", None, None, 0.0, False, None)

    def run():
        return torch.ops.cuattn.forward(q, q, q, None, None, vectors, None, [], [6], *tail)[0]

    assert torch.equal(run(), attention(q, q, q, is_causal=True))
    vectors[3] = 0
    assert torch.equal(run(), attention(q, q, q))


@pytest.mark.parametrize("backend", ["aot_eager", inductor])
def test_checkpoints_replay_dropout(backend):
    q, k, v = (x.detach() for x in operands())

    def function(v):
        return checkpoint(lambda v: attention(q, k, v * 1, enable_gqa=True, dropout_p=0.5), v, use_reentrant=False)

    v.requires_grad_()
    o = torch.compile(function, backend=backend, fullgraph=True)(v)
    (dv,) = torch.autograd.grad(o.sum(), v)  # o is linear in v
    torch.testing.assert_close((dv * v).sum(), o.sum())


def test_autocast_and_export():
    q, k, v = (x.float().detach() for x in operands())

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, enable_gqa=True, is_causal=True)

    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.compile(model, backend="aot_eager", fullgraph=True)(q, k, v).dtype == torch.bfloat16
    assert torch.equal(torch.export.export(model, (q, k, v)).module()(q, k, v), model(q, k, v))


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_transforms_run_as_they_are(name):
    q, k, v = (x.detach() for x in operands())

    def function(q):
        return attention(q, k, v, enable_gqa=True)

    transformed = {
        "grad": lambda q: func.grad(lambda q: function(q).sin().sum())(q),
        "jvp": lambda q: func.jvp(function, (q,), (q,))[1],
        "vmap": lambda q: func.vmap(function, randomness="different")(q[:, None]),
    }[name]
    torch.testing.assert_close(torch.compile(transformed, backend="aot_eager")(q), transformed(q))


@pytest.mark.parametrize("make", [lambda: masks.causal(6), lambda: masks.causal_document([2, 4]) & masks.full(6)])
def test_masks_made_where_the_compiler_looks(make):
    def function(q):
        return attention(q * 2, q, q, mask=make()).sin()

    def core(q):
        return cuattn.attention(q * 2, q, q, mask=make()).sin()

    q = double(2, 6, 8)
    same(torch.compile(function, backend="aot_eager"), function, q)
    q = q.detach()
    torch._dynamo.reset()
    assert torch.equal(torch.compile(core, backend="aot_eager")(q), core(q))


def test_fake_tensors_have_the_shapes():
    with FakeTensorMode():
        for q, k, v in (
            ((5, 3), (4, 3), (4, 2)),
            ((2, 4, 5, 3), (1, 2, 6, 3), (2, 2, 6, 7)),
            ((5, 3), (2, 3, 4, 3), (4, 2)),
        ):
            real = [torch.ones(shape) for shape in (q, k, v)]
            o, lse = attention(*real, enable_gqa=True, return_lse=True)
            known = cuattn.forward(*(np.ones(shape) for shape in (q, k, v)), enable_gqa=True)
            assert o.shape == known.o.shape and lse.shape == known.l.shape


NOTHING = ([], -1, -1, "", None, None, "", None, None, 0.0, True, None)
CALLS = {
    "plain": lambda: (None, None, None, None, [], [], *NOTHING),
    "bias and dropout": lambda: (
        double(4, 6, 6), torch.rand(6, 6) > 0.3, None, torch.tensor(3), [], [], [], -1, -1, "True", 2, None, "", 0.3,
        2.0, 0.5, True, True,
    ),
    "functions": lambda: (
        None, None, torch.tensor(masks.causal(6)._array), None, [double(4)], [6], [2.0],
        operators.number_of(sloped, (True, False)), *NOTHING[2:],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_operators_pass_pytorchs_checks(name):
    args = (*operands(), *CALLS[name]())
    opcheck(torch.ops.cuattn.forward.default, args)
    o, l, m = (x.detach() for x in torch.ops.cuattn.forward(*args))
    do, dlse = torch.randn_like(o).requires_grad_(), torch.randn_like(l).requires_grad_()
    opcheck(torch.ops.cuattn.backward.default, (do, dlse, o, l, m, *args))


def test_operators_have_second_derivatives():
    q, k, v = operands()

    def function(q, k, v):
        return torch.ops.cuattn.forward(q, k, v, None, None, None, None, [], [], *NOTHING)[0]

    assert torch.autograd.gradgradcheck(function, (q, k, v), fast_mode=True)
