"""Functions are recognised by what they capture, traced in its absence, and refused with advice at the user's line."""

import dataclasses
import enum
import functools
import gc
import threading
import types
import weakref

import numpy as np
import pytest

from cuattn.errors import ArgumentError
from cuattn.tracing import functions as module
from cuattn.tracing.functions import MASK, SCORE, trace
from cuattn.tracing.graph import constant, order, variable

SLOPES = np.array([0.5, 0.25, 0.125])
TABLE = np.arange(12.0).reshape(3, 4)
WINDOW = 5


def line(function):
    return f"{__file__}:{function.__code__.co_firstlineno}"


def loads(traced):
    return [str(node) for node in order(traced.root) if node.op == "load"]


class Model:
    def __init__(self):
        self.slopes, self.layers, self.sizes = SLOPES.copy(), [TABLE], {"window": 3}

    def score(self, s, b, h, i, j):
        return s + self.slopes[h] + self.layers[0][h, i % 4] + self.sizes["window"]

    def __call__(self, s, b, h, i, j):
        return self.score(s, b, h, i, j) + TABLE[h, 0]


def makers():
    """Return functions that make a score anew from a slope array and a window, each in another way."""

    def closure(slopes, window):
        return lambda s, b, h, i, j: s + slopes[h] * (i - j + window)

    def default(slopes, window):
        return lambda s, b, h, i, j, x=slopes, n=window: s + x[h] * (i - j + n)

    def keyword(slopes, window):
        def score(s, b, h, i, j, *, x=slopes, n=window):
            return s + x[h] * (i - j + n)

        return score

    def partial(slopes, window):
        return functools.partial(lambda x, s, b, h, i, j, n: s + x[h] * (i - j + n), slopes, n=window)

    def helper(slopes, window):
        def slope(h):
            return slopes[h]

        return lambda s, b, h, i, j: s + slope(h) * (i - j + window)

    code = compile("def score(s, b, h, i, j): return s + slopes[h] * (i - j + window)", "scope.py", "exec")

    def scope(slopes, window):
        names = {"slopes": slopes, "window": window}
        exec(code, names)
        return names["score"]

    def pair(slopes, window):
        both = (slopes, window)
        return lambda s, b, h, i, j: s + both[0][h] * (i - j + both[1])

    return [closure, default, keyword, partial, helper, scope, pair]


@pytest.mark.parametrize("make", makers(), ids=lambda make: make.__name__)
def test_a_function_is_known_by_what_it_captures(make):
    first = make(SLOPES, WINDOW)
    traced = trace(first)
    assert trace(first) is traced
    assert trace(make(SLOPES, WINDOW)) is traced  # the same code, and the same objects
    other = trace(make(SLOPES.copy(), WINDOW))
    assert other is not traced and other.root is traced.root  # another array: traced anew, to the same graph
    assert trace(make(SLOPES, WINDOW + 1)).root is not traced.root  # integers are part of the graph
    assert str(traced.root) == "add(s, multiply(array0(h), to_float(add(subtract(i, j), 5))))"
    np.testing.assert_array_equal(traced.bind().arrays[0], SLOPES)


def test_rebinding_is_seen():
    slopes, cap = SLOPES, 2.0

    def score(s, b, h, i, j):
        return s * cap + slopes[h]

    first = trace(score)
    assert trace(score) is first and first.numbers == (2.0,)
    cap = 3.0
    second = trace(score)
    assert second.root is first.root and second.numbers == (3.0,)  # a parameter, not part of the graph
    slopes = slopes + 1
    assert (trace(score).arrays[0] == slopes).all()
    score.__defaults__ = ()
    score.__code__ = (lambda s, b, h, i, j: s - cap + 0 * len(slopes)).__code__
    assert str(trace(score).root).startswith("subtract")


def test_captured_arrays_are_copied_and_arguments_are_not():
    slopes, other = SLOPES.copy(), SLOPES.copy()
    traced = trace(lambda s, b, h, i, j, x: s + slopes[h] * x[h], SCORE, (other,))
    slopes[0] = other[0] = 77
    captured, argument = traced.bind((other,)).arrays
    assert captured[0] == 0.5 and argument is other
    assert not captured.flags.writeable


def test_numpy_computes_what_is_captured_alone():
    traced = trace(lambda s, b, h, i, j: s + np.stack([SLOPES, 2.0**SLOPES])[h % 2, i % 3] + (TABLE[1] ** 2)[j % 4])
    both, squares = traced.arrays
    np.testing.assert_array_equal(both, [SLOPES, 2.0**SLOPES])
    np.testing.assert_array_equal(squares, TABLE[1] ** 2)


def test_what_may_change_unseen_is_traced_in_each_call():
    model = Model()
    first = trace(model.score)
    assert trace(model.score) is not first and trace(model.score).root is first.root
    model.sizes["window"], model.layers[0] = 4, TABLE + 1
    second = trace(model.score)
    assert second.root is not first.root and (second.arrays[1] == TABLE + 1).all()
    assert model.slopes[0] == 0.5 and isinstance(model.layers[0], np.ndarray)  # the object itself is left alone
    assert "array2" in str(trace(model).root)
    kind = type("Config", (), {"window": 3})
    score = lambda s, b, h, i, j: s + kind.window + score.window  # noqa: E731
    score.window = 1
    first = trace(score).root
    kind.window = 4
    second = trace(score).root
    score.window = 2
    assert len({first, second, trace(score).root}) == 3
    sizes = [3]
    score = lambda s, b, h, i, j: s + sizes[0]  # noqa: E731
    assert trace(score).root is not (sizes.append(0) or sizes.__setitem__(0, 4) or trace(score).root)


def test_arguments_are_known_by_kind_and_shape():
    def score(s, b, h, i, j, table, scale):
        return s + scale * table[h, i - j + table.shape[1] // 2]

    first = trace(score, SCORE, (TABLE, 2.0))
    assert trace(score, SCORE, (TABLE + 1, 3.0)) is first
    assert trace(score, SCORE, (TABLE.astype(np.float32), 2.0)).root is first.root
    assert trace(score, SCORE, (np.zeros((3, 8)), 2.0)).root is not first.root  # its length is part of the graph
    assert trace(score, SCORE, (TABLE, 2)).root is not first.root
    with pytest.raises(ArgumentError, match=r"^args\[0\] = 'x'"):
        trace(lambda b, h, i, j, x: i < x, MASK, ("x",))
    bound = first.bind((TABLE, 7.0))
    assert bound.arrays == (TABLE,) or bound.arrays[0] is TABLE
    assert bound.numbers == (7.0,)
    for wrong in ("x", None, 2**70, TABLE.astype(complex)):
        with pytest.raises(ArgumentError, match=r"score_args\[1\]"):
            trace(score, SCORE, (TABLE, wrong))


def test_memory_is_given_back():
    """Neither captured arrays nor functions are held when nobody else has them."""
    array = np.zeros(3)
    watched = weakref.ref(array)

    def make(x):
        return lambda s, b, h, i, j: s + x[h]

    function = make(array)
    trace(function), trace(function)
    size = len(module._known)
    del function, array
    gc.collect()
    assert watched() is None and len(module._known) < size


def test_floats_are_parameters_and_integers_are_not():
    assert trace(lambda s, b, h, i, j: s * 2.5).root is trace(lambda s, b, h, i, j: s * 3.5).root
    assert trace(lambda s, b, h, i, j: s * 2).root is not trace(lambda s, b, h, i, j: s * 3).root
    assert trace(lambda s, b, h, i, j: 1.0 * s + 0.0).root is variable("s")
    assert trace(lambda s, b, h, i, j: np.where(i < j, -np.inf, s)).numbers == ()
    assert trace(lambda s, b, h, i, j, x: s * x, SCORE, (1.0,)).root is not variable("s")  # arguments are never folded
    assert trace(lambda s, b, h, i, j: s * 2.5 + 2.5).numbers == (2.5,)
    assert trace(lambda s, b, h, i, j: np.float32(2.5) * s).numbers == (2.5,)
    assert trace(lambda b, h, i, j: True, MASK).root is constant(True)
    assert trace(lambda s, b, h, i, j: 3).root is constant(3.0)


def test_constant_arrays_may_be_computed_with():
    lengths = np.array([3, 2, 4])

    def visible(b, h, i, j):
        ends = np.cumsum(lengths)
        total = 0
        for length in lengths:
            total = total + length
        return (i < ends[b]) & (j < lengths.max()) & (i < lengths[0]) & (j < total) & (len(ends) > h)

    traced = trace(visible, MASK)
    assert any((x == [3, 5, 9]).all() for x in traced.arrays)


def in_place(s, b, h, i, j):
    before = s
    s += i
    s *= 2
    return s - before


def test_numpy_s_forms_are_the_same_graph():
    for one, other in (
        (lambda s, b, h, i, j: np.divide(s, 4), lambda s, b, h, i, j: s / 4),
        (lambda s, b, h, i, j: np.power(s, 2), lambda s, b, h, i, j: s**2),
        (lambda s, b, h, i, j: s.clip(0, 1), lambda s, b, h, i, j: np.minimum(np.maximum(s, 0), 1)),
        (lambda s, b, h, i, j: np.abs(s), lambda s, b, h, i, j: abs(s)),
        (lambda s, b, h, i, j: s + TABLE[h][i], lambda s, b, h, i, j: s + TABLE[h, i]),
        (lambda s, b, h, i, j: s + np.logical_and(i, j), lambda s, b, h, i, j: s + ((i != 0) & (j != 0))),
        (lambda s, b, h, i, j: 2.0**-h + s, lambda s, b, h, i, j: np.exp2(-h) + s),
        (lambda s, b, h, i, j: np.zeros_like(s) + s + 0 * i, lambda s, b, h, i, j: s),
        (
            lambda s, b, h, i, j: s + TABLE[h, ..., i] + TABLE[..., h, j],
            lambda s, b, h, i, j: s + TABLE[h, i] + TABLE[h, j],
        ),
        (lambda s, b, h, i, j: s + sum(divmod(i, 4)), lambda s, b, h, i, j: s + (i // 4 + i % 4)),
        (in_place, lambda s, b, h, i, j: (s + i) * 2 - s),
        (lambda s, b, h, i, j: s**0 + s, lambda s, b, h, i, j: 1 + s),
    ):
        assert trace(one).root is trace(other).root


def refused():
    local = [0, 1]
    return [
        (lambda s, b, h, i, j: s if i > j else 0, "np.where"),
        (lambda s, b, h, i, j: s if s > 0 and i > j else 0, "&"),
        (lambda s, b, h, i, j: np.where(0 <= i - j < 4, s, 0), r"\(a <= x\) & \(x < b\)"),
        (lambda s, b, h, i, j: max(s, 0), "np.maximum"),
        (lambda s, b, h, i, j: __import__("math").exp(s), r"np\.exp"),
        (lambda s, b, h, i, j: int(s), "astype"),
        (lambda s, b, h, i, j: s + local[i], "index arrays"),
        (lambda s, b, h, i, j: s + {0: 1}[h], "index an array"),
        (lambda s, b, h, i, j: s + np.arange(9)[i], "make arrays before"),
        (lambda s, b, h, i, j: sum(s), "single number"),
        (lambda s, b, h, i, j: s[0], "single numbers"),
        (lambda s, b, h, i, j: s + TABLE[s, i], "float index"),
        (lambda s, b, h, i, j: s + TABLE[h, i > j], "boolean index"),
        (lambda s, b, h, i, j: s + TABLE[h], r"array\[j\]"),
        (lambda s, b, h, i, j: s + TABLE[h, i, j], "at most 2"),
        (lambda s, b, h, i, j: s + TABLE[h, i:], "integer for each axis"),
        (lambda s, b, h, i, j: s + TABLE, "one element"),
        (lambda s, b, h, i, j: s + np.zeros(3), r"array of shape \(3,\)"),
        (lambda s, b, h, i, j: s + i // 0, "constant 0"),
        (lambda s, b, h, i, j: s + 2**70, "int64"),
        (lambda s, b, h, i, j: s + (i + 2) * 2**62, "int64"),
        (lambda s, b, h, i, j: s + (i + 1) * 2**62 * 4 - 2**62, "int64"),
        (lambda s, b, h, i, j: s + 3**i, "float base"),
        (lambda s, b, h, i, j: s + i**-2, "float base"),
        (lambda s, b, h, i, j: s & 1, "astype"),
        (lambda s, b, h, i, j: (i > j) - (h > 1) + s, "np.where"),
        (lambda s, b, h, i, j: np.sum(s), "np.sum cannot be traced"),
        (lambda s, b, h, i, j: np.gcd(i, j), "np.gcd cannot be traced"),
        (lambda s, b, h, i, j: np.add.reduce(s), "plain call"),
        (lambda s, b, h, i, j: np.where(i > j), "np.where"),
        (lambda s, b, h, i, j: np.add(s, 1, out=s), "plain call"),
        (lambda s, b, h, i, j: s + TABLE[..., j], "integer for each axis"),
        (lambda s, b, h, i, j: s + "x", "number or an array"),
        (lambda s, b, h, i, j: s.mean(), "AttributeError"),
        (lambda s, b, h, i, j: s.astype(complex), "boolean, integer or float"),
        (lambda s, b, h, i, j: None, "return is missing"),
        (lambda s, b, h, i, j: (s, s), "single number"),
        (lambda s, b, h, i, j: TABLE, "single number"),
        (lambda s, b, h, i, j: TABLE[h], r"traced array of shape \(4,\)"),
        (lambda s, b, h, i, j: (x for x in (s, i)), "single number"),
        (lambda s, b, h, i, j: 1j, "single number"),
        (lambda s, b, h, i, j: i > j, "is a mask"),
        (lambda s: s, "5 were given"),
        (lambda s, b, h, i, j: TABLE.astype(complex)[h, 0] + s, "dtype complex"),
    ]


@pytest.mark.parametrize(("function", "advice"), refused())
def test_what_cannot_be_traced_is_refused_at_its_line(function, advice):
    with pytest.raises(ArgumentError, match=advice) as caught:
        trace(function)
    assert line(function) in str(caught.value)


def test_more_refusals():
    with pytest.raises(ArgumentError, match="expected a function"):
        trace(3)
    with pytest.raises(ArgumentError, match="x != 0"):
        trace(lambda b, h, i, j: i - j, MASK)
    for text in ("i // n", "i % n", "i << n", "np.fmod(i, 2 * n)"):
        function = eval(f"lambda s, b, h, i, j, n: s + ({text})", {"np": np})
        with pytest.raises(ArgumentError, match="closure"):
            trace(function, SCORE, (3,))
    with pytest.raises(ArgumentError, match="read in every call"):
        trace(lambda s, b, h, i, j, x: s + x.max(), SCORE, (TABLE,))
    tensor = types.SimpleNamespace(shape=(3,), dtype=np.dtype(float), __dlpack__=None, requires_grad=True)
    with pytest.raises(ArgumentError, match="requires grad"):
        trace(lambda s, b, h, i, j: s + tensor[h])


def test_of_an_object_only_what_is_used_is_touched():
    torch = pytest.importorskip("torch")

    class Scores(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.learned = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("slopes", torch.tensor([1.0, 2.0, 3.0]))
            self.inner = torch.nn.ModuleList([torch.nn.Linear(3, 3)])

        def plain(self, s, b, h, i, j):
            return self.doubled(s + self.slopes[h])

        def doubled(self, x):
            return 2 * x

        def forward(self, s, b, h, i, j):
            return s + self.learned[h]

    scores = Scores()
    traced = trace(scores.plain)
    assert len(traced.arrays) == 1 and str(traced.root) == "multiply(2.0, add(s, array0(h)))"
    assert type(scores) is Scores and isinstance(scores.slopes, torch.Tensor)
    with pytest.raises(ArgumentError, match="requires grad"):
        trace(scores.forward)


@dataclasses.dataclass(frozen=True)
class Settings:
    table: np.ndarray
    window: int = 3


def test_arrays_are_found_in_all_kinds_of_objects():
    mode = enum.Enum("Mode", "ON OFF")
    settings, space = Settings(TABLE), types.SimpleNamespace(inner=types.SimpleNamespace(tables=[TABLE, {"x": SLOPES}]))
    traced = trace(lambda s, b, h, i, j: s + settings.table[h, settings.window], SCORE)
    assert traced.root is trace(lambda s, b, h, i, j: s + TABLE[h, 3]).root
    traced = trace(lambda s, b, h, i, j: s + space.inner.tables[0][h, i] + space.inner.tables[1]["x"][h])
    assert len(traced.arrays) == 2 and isinstance(space.inner.tables[0], np.ndarray)
    space.mode = mode.ON
    assert trace(lambda s, b, h, i, j: s if space.mode is mode.ON else -s).root is variable("s")
    assert type(mode.ON) is mode


def test_tensors_are_captured_on_the_host():
    torch = pytest.importorskip("torch")
    slopes = torch.tensor([1.0, 2.0])
    traced = trace(lambda s, b, h, i, j: s + slopes[h])
    assert (traced.arrays[0] == [1, 2]).all() and isinstance(traced.arrays[0], np.ndarray)
    slopes.requires_grad_()
    with pytest.raises(ArgumentError, match="requires grad"):
        trace(lambda s, b, h, i, j: s * slopes[h])


def test_nodes_are_equal_or_other_objects():
    assert repr(constant(-0.0)) != repr(constant(0.0)) and constant(1) is not constant(1.0) is not constant(True)
    with pytest.raises(AttributeError, match="cannot assign"):
        variable("s").op = "t"
    deep = trace(lambda s, b, h, i, j: functools.reduce(lambda x, _: np.tanh(x) + 1, range(3000), s)).root
    assert len(order(deep)) == 6002 and len(repr(deep)) < 1000


def test_threads_trace_apart():
    def score_of(n):
        values = np.full(3, float(n))
        return lambda s, b, h, i, j: s + values[h] * (n + 0.5) + sum((s * float(k + 2.5) for k in range(40)), 0)

    results = {}

    def work(n):
        results[n] = trace(score_of(n))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({traced.root for traced in results.values()}) <= 8
    for n, traced in results.items():
        assert traced.arrays[0][0] == n and traced.numbers[0] == n + 0.5
