"""Every derivative that PyTorch knows how to ask for, by differences and beside the textbook's, in float64."""

import functools

import pytest

torch = pytest.importorskip("torch")

from torch import func  # noqa: E402
from torch.autograd import forward_ad, gradcheck, gradgradcheck  # noqa: E402

import cuattn  # noqa: E402
from cuattn.torch import attention  # noqa: E402
from tests.torch.helpers import double, operands, textbook  # noqa: E402


def moved(s, b, h, i, j, table, numbers, factor):
    return s * (1 + factor * table[h, numbers[j]]) + table[h, i]


def replayed(*args, **options):
    torch.manual_seed(3)
    return attention(*args, **options)


def cases():
    torch.manual_seed(1)
    bias, table, numbers = double(4, 1, 6), double(4, 6), torch.arange(6)
    seen = torch.rand(2, 1, 5, 6) > 0.3
    yield "plain", {}, (), ()
    yield "lse", {"return_lse": True, "is_causal": "top_left", "window": (2, None)}, (), ()
    yield "bias", {"mask": seen, "softcap": 2.0, "return_lse": True}, ("bias",), (bias,)
    yield "column mask", {"mask": cuattn.masks.causal(5, 6), "scale": 0.7}, (), ()
    yield "score", {"return_lse": True}, ("score_args",), (table, numbers, 0.3)
    yield "dropout", {"dropout_p": 0.4}, (), ()


CASES = pytest.mark.parametrize(("options", "names", "args"), [c[1:] for c in cases()], ids=[c[0] for c in cases()])


@CASES
def test_derivatives_are_those_by_differences(options, names, args):
    def function(q, k, v, *given):
        if "bias" in names:
            extra = {"bias": given[0]}
        elif "score_args" in names:
            extra = {"score": moved, "score_args": given}
        else:
            extra = {}
        return replayed(q, k, v, enable_gqa=True, **options, **extra)

    inputs = (*operands(), *args)
    assert gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(function, inputs, check_fwd_over_rev=True, fast_mode=True)


def same(transformed, *args):
    """Assert that a transform of functions gives the same of attention as of the textbook."""
    found, known = (torch.utils._pytree.tree_leaves(transformed(f)(*args)) for f in (gqa, textbook))
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


gqa = functools.partial(attention, enable_gqa=True)


def number(f):
    return lambda *args: (f(*args) ** 2).sin().sum()


def by(*args):
    return [x.detach() * 0.3 + 0.1 for x in args]


EVERYTHING = (0, 1, 2)
TRANSFORMS = {
    "grad": lambda f: func.grad(number(f), EVERYTHING),
    "jvp": lambda f: lambda *x: func.jvp(f, x, tuple(by(*x))),
    "vjp": lambda f: lambda *x: func.vjp(f, *x)[1](f(*x)),
    "forward over reverse": lambda f: lambda *x: func.jvp(func.grad(number(f), EVERYTHING), x, tuple(by(*x))),
    "reverse over forward": lambda f: func.grad(lambda *x: number(lambda *y: func.jvp(f, y, tuple(by(*x)))[1])(*x)),
    "reverse over reverse": lambda f: func.grad(
        lambda *x: sum((g * g).sum() for g in func.grad(number(f), EVERYTHING)(*x)), EVERYTHING
    ),
    "hessian": lambda f: lambda q, k, v: func.hessian(lambda q: number(f)(q, k, v))(q[:1, :2]),
    "jacrev": lambda f: func.jacrev(f, EVERYTHING),
    "jacfwd": lambda f: func.jacfwd(f, EVERYTHING),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    same(TRANSFORMS[name], *[x.detach() for x in operands()])


@pytest.mark.parametrize("dims", [(0, 0, 0), (1, None, 0), (None, None, 3)])
def test_vmap(dims):
    args = [
        x if dim is None else torch.stack((x, 2 * x, -x), dim) for x, dim in zip(by(*operands()), dims, strict=True)
    ]
    for transform in (
        lambda f: func.vmap(f, dims),
        lambda f: func.vmap(func.grad(number(f), EVERYTHING), dims),
        lambda f: func.grad(number(func.vmap(f, dims)), EVERYTHING),
        lambda f: lambda *x: func.jvp(func.vmap(f, dims), x, tuple(by(*x))),
    ):
        same(transform, *args)


def test_vmap_of_matrices():
    q, k, v = (x.detach()[:, 0] for x in operands())
    for dims in ((0, 0, 0), (0, None, None), (None, 0, None)):
        args = [x[0] if dim is None else x for x, dim in zip((q, k, v), dims, strict=True)]
        same(lambda f, dims=dims: func.vmap(f, dims), *args)
        same(lambda f, dims=dims: func.vmap(func.hessian(number(f)), dims), *args)


def test_vmap_of_functions_masks_and_biases():
    q, k, v = (x.detach() for x in operands())
    table, bias, seen = torch.rand(3, 4, 6), torch.rand(3, 5, 6), torch.rand(3, 5, 6) > 0.3
    table, bias = table.double(), bias.double()

    def scored(table):
        return attention(q, k, v, enable_gqa=True, score=moved, score_args=(table, torch.arange(6), 2.0))

    def biased(bias, seen):
        return attention(q, k, v, enable_gqa=True, bias=bias, mask=seen, return_lse=True)

    for function, args in ((scored, (table,)), (biased, (bias, seen))):
        found = func.vmap(function)(*args)
        known = [function(*x) for x in zip(*args, strict=True)]
        if function is biased:
            torch.testing.assert_close(found[1], torch.stack([lse for _, lse in known]))
            found, known = found[0], [o for o, _ in known]
        torch.testing.assert_close(found, torch.stack(known))
    slopes = func.vmap(func.grad(lambda bias: biased(bias, seen[0])[0].sin().sum()))(bias)
    one = func.grad(lambda bias: biased(bias, seen[0])[0].sin().sum())(bias[2])
    torch.testing.assert_close(slopes[2], one)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_with_dropout(randomness):
    q, k, v = (x.detach() for x in operands())

    def function(q):
        return attention(q, k, v, enable_gqa=True, dropout_p=0.5)

    found = func.vmap(function, randomness=randomness)(q.expand(2, *q.shape))
    assert torch.equal(found[0], found[1]) == (randomness == "same")
    with pytest.raises(RuntimeError, match="random"):
        func.vmap(function)(q.expand(2, *q.shape))


def test_forward_mode_of_tensors_with_and_without_grad():
    q, k, v = operands()

    def derivatives(f):
        with forward_ad.dual_level():
            o = f(forward_ad.make_dual(q, k.sum() * q.detach()), k.detach(), v)
            gradients = torch.autograd.grad(o.sin().sum(), (q, v))
            return [x for pair in map(forward_ad.unpack_dual, (o, *gradients)) for x in pair]

    same(lambda f: lambda: derivatives(f))


def test_forward_mode_is_one_pass(monkeypatch):
    q, k, v = (x.detach() for x in operands())
    calls = []
    for name in ("forward", "jvp"):
        core = getattr(cuattn, name)
        monkeypatch.setattr(cuattn, name, lambda *x, name=name, core=core, **o: calls.append(name) or core(*x, **o))
    func.jvp(gqa, (q, k, v), (q, k, v))
    func.jacfwd(gqa)(q, k, v)
    with forward_ad.dual_level():
        assert forward_ad.unpack_dual(gqa(forward_ad.make_dual(q, q), k, v)).tangent is not None
    assert calls == ["jvp"] * 3


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["o", "lse"])
def test_the_gradient_of_gradients_is_one_pass(options, monkeypatch):
    q, k, v = operands()
    calls = []
    for name in ("forward", "backward", "double_backward"):
        core = getattr(cuattn, name)
        monkeypatch.setattr(cuattn, name, lambda *x, name=name, core=core, **o: calls.append(name) or core(*x, **o))
    found = gqa(q, k, v, **options)
    found = found if options else (found,)
    do = [torch.ones_like(x).requires_grad_() for x in found]
    gradients = torch.autograd.grad(found, (q, k, v), do, create_graph=True)
    torch.autograd.grad(gradients, (q, k, v, *do), [torch.ones_like(x) for x in gradients])
    assert calls == ["forward", "backward", "double_backward"]


def test_the_older_vmap_of_gradients_is_refused_with_advice():
    q, k, v = operands()
    o = gqa(q, k, v)
    with pytest.raises(cuattn.UnsupportedError, match=r"take torch\.func's jacrev or vmap for is_grads_batched"):
        torch.autograd.grad(o, q, torch.stack([o, o]).detach(), is_grads_batched=True)


def test_a_third_derivative_is_refused():
    q, k, v = (x.detach() for x in operands())
    third = func.grad(lambda x: func.hessian(number(lambda q: gqa(q, k, v)))(x).sum())
    with pytest.raises(cuattn.UnsupportedError, match="third derivative"):
        third(q)
