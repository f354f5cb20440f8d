"""What is remembered of a kind of call on a GPU, and what is looked at anew in each, without a GPU."""

import contextlib
import gc
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import cuattn
from cuattn import dispatch, interop, masks
from cuattn.errors import DtypeError
from tests.cuda.recording import BASE, Stream
from tests.cuda.recording import driver as driver
from tests.interop.helpers import Producer


def gpu_array(shape, dtype=np.float16, address=1 << 30, strides=None, owner=None):
    """Return a CuPy array over memory that is not there."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, owner, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


@pytest.fixture
def calls(driver, monkeypatch):
    """Count how often a call is prepared; nothing is computed, results are named by their place."""
    pytest.importorskip("cupy")
    from cuattn import cuda
    from cuattn.cuda import tables

    prepared, prepare = [], cuda.launch_sequence

    def launch_sequence(*arguments):
        prepared.append(arguments)
        return prepare(*arguments)

    def find(self, *_):
        return SimpleNamespace(addresses=[0] * len(self.slots), home=None, use=lambda stream: None)

    @contextlib.contextmanager
    def scope(self):
        yield

    def allocator(self, wanted):
        return lambda scratch_bytes, together, held: (list(wanted), [BASE] * (len(wanted) + 1), None)

    monkeypatch.setattr(cuda, "launch_sequence", launch_sequence)
    monkeypatch.setattr(tables.MaskTables, "find", find)
    monkeypatch.setattr(interop.ArrayOrigin, "scope", scope)
    monkeypatch.setattr(interop.ArrayOrigin, "is_current", True)
    monkeypatch.setattr(interop.ArrayOrigin, "stream", lambda self: Stream())
    monkeypatch.setattr(interop.ArrayOrigin, "allocator", allocator)
    monkeypatch.setattr(interop, "_kinds", {})
    dispatch.forget()
    yield prepared
    dispatch.forget()


def test_a_warm_call_is_not_checked_again(calls, driver):
    q, k = gpu_array((2, 100, 64)), gpu_array((2, 80, 64))
    first = cuattn.forward(q, k, k)
    moved = gpu_array((2, 100, 64), address=1 << 31)
    assert cuattn.forward(moved, k, k) == first == (((2, 100, 64), q.dtype), *2 * [((2, 100), np.float32)], None)
    assert len(calls) == 1
    assert driver.done[-1].argument["q.data"] == 1 << 31


@pytest.mark.parametrize(
    ("arrays", "options"),
    [
        ({"q": (2, 101, 64)}, {}),
        ({"q": (2, 100, 64), "strides": (64, 1280, 2)}, {}),
        ({"q": (2, 100, 64), "address": (1 << 30) + 8}, {}),
        ({"q": (2, 100, 64)}, {"is_causal": "top_left"}),
        ({"q": (2, 100, 64)}, {"scale": 1}),
        ({"q": (2, 100, 64)}, {"mask": masks.full(100, 80)}),
        ({"q": (2, 100, 64)}, {"kernel": "sm80"}),
    ],
)
def test_what_looks_different_is_checked(calls, arrays, options):
    k = gpu_array((2, 80, 64))
    for _ in range(3):
        cuattn.forward(gpu_array((2, 100, 64)), k, k, scale=1.0)
    before = len(calls)
    shape = arrays.pop("q")
    for _ in range(3):
        cuattn.forward(gpu_array(shape, **arrays), k, k, **{"scale": 1.0, **options})
    assert len(calls) == before + 1


def test_masks_of_one_layout_are_one_kind(calls):
    q = gpu_array((2, 100, 64))
    for mask in (masks.document([40, 60]), masks.causal_document([7, 93]), masks.share_question([(30, [30, 40])])):
        cuattn.forward(q, q, q, mask=mask)
    assert len(calls) == 1


def test_each_band_is_a_kind_of_its_own(calls):
    q = gpu_array((2, 100, 64))
    for mask in (masks.full(100), masks.causal(100), masks.sliding_window(100, 3), masks.document([40, 60])):
        before = len(calls)
        for _ in range(3):
            cuattn.forward(q, q, q, mask=mask)
        assert len(calls) == before + 1


def test_the_random_state_is_checked_in_every_call(calls):
    q = gpu_array((2, 100, 64))
    for _ in range(3):
        cuattn.forward(q, q, q, rng=1)
        assert cuattn.forward(q, q, q, dropout_p=0.5, rng=7).rng_state == (7, 0)
    for dropped in (0.0, 0.5):
        with pytest.raises(DtypeError, match="rng"):
            cuattn.forward(q, q, q, dropout_p=dropped, rng="seed")
    fwd = cuattn.forward(q, q, q, dropout_p=0.5)
    back = fwd._replace(**{name: gpu_array(*given) for name, given in zip("olm", fwd[:3], strict=True)})
    for _ in range(3):
        cuattn.backward(back.o, q, q, q, back, dropout_p=0.5)
    with pytest.raises(cuattn.errors.ArgumentError, match=r"fwd\.rng_state is None"):
        cuattn.backward(back.o, q, q, q, back._replace(rng_state=None), dropout_p=0.5)


def test_copied_arguments_are_looked_at_in_every_call(calls, driver, monkeypatch):
    k, places = gpu_array((2, 100, 64)), [1 << 31, 1 << 32, 1 << 33]
    copies = {address: gpu_array((2, 100, 64), address=address) for address in places}
    for address in places:
        monkeypatch.setattr(
            sys.modules["cuattn.problem.validate"], "_contiguous_last", lambda array, at=address: copies[at]
        )
        cuattn.forward(k, k, k)
        assert driver.done[-1].argument["q.data"] == address
    assert len(calls) == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_calls_of_one_layout_share_neither_streams_nor_outputs(calls, monkeypatch, wanted):
    asked, owner = [], type("Owner", (), {})()
    monkeypatch.setattr(pytest.importorskip("cupy"), "from_dlpack", lambda value: value.array)
    monkeypatch.setattr(interop.ArrayOrigin, "stream", lambda self: asked.append(self.kind) or Stream())
    q, out = gpu_array((2, 100, 64)), gpu_array((2, 100, 64), address=1 << 31, owner=owner)
    for dress in 2 * (lambda array: Producer(array, (2, 0)), lambda array: array):
        x = dress(q)
        cuattn.attention(x, x, x, out=dress(out) if wanted else None)
    assert asked == ["tests", "cupy"] * 2 and len(calls) == 1
    alive = weakref.ref(owner)
    del out, owner
    gc.collect()
    assert alive() is None


def test_look_leaves_to_enter_what_needs_more_than_a_look():
    torch = pytest.importorskip("torch")
    x = torch.zeros(4, 6)

    def look(*values):
        return interop.signature(dict(zip("qkvo", values, strict=False)))

    layouts, addresses = look(x, x)
    assert addresses == [x.data_ptr()] * 2
    assert layouts == look(torch.ones(4, 6), torch.ones(4, 6))[0]
    unlike = look(x, x.T), look(x, x.double()), look(x, x[:3]), look(x, x, x), look(x.view(-1)[1:5].view(2, 2), x)
    assert len({layouts, *(found for found, _ in unlike)}) == 6
    subclass = type("Subclass", (torch.Tensor,), {})
    negative = torch.zeros(4, dtype=torch.complex64).conj().imag
    hidden = [
        torch.zeros(4, requires_grad=True),
        negative,
        x.to_sparse(),
        x.as_subclass(subclass),
    ]
    for value in hidden:
        assert look(x, value) is None
    with torch.no_grad():
        assert look(x, hidden[0]) is not None
    assert torch.func.vmap(lambda row: (look(row, row) is None) * row)(x + 1).any()
    with torch.autograd.forward_ad.dual_level():
        assert look(x, x) is None


def test_warm_calls_of_score_functions(calls, monkeypatch):
    """Tables and numbers are read in every call, and what is captured is copied to the GPU once."""
    from cuattn import scoring
    from cuattn.cuda.sequence import LaunchSequence

    runs, copies, run = [], [], LaunchSequence.run
    constants = np.ones(4, np.float32)

    def recorded(self, allocate, stream, addresses, *more):
        runs.append((addresses[3:], more[-2]))
        return run(self, allocate, stream, addresses, *more)

    def upload(array, device):
        copies.append(array)
        return gpu_array(array.shape, array.dtype, 7 << 30)

    def score(s, b, h, i, j, slope, factor, unread):
        return s + constants[h] * slope[h] * factor

    monkeypatch.setattr(LaunchSequence, "run", recorded)
    monkeypatch.setattr(scoring, "upload", upload)
    q, unread = gpu_array((2, 4, 100, 64)), gpu_array((3,), np.int32, 5 << 30)
    for address, factor in ((1 << 31, 2.0), (1 << 32, 3.0), (1 << 33, 3.0)):
        slope = gpu_array((4,), np.float32, address)
        cuattn.attention(q, q, q, score=score, score_args=(slope, factor, unread))
        assert runs[-1] == ([7 << 30, address, 5 << 30], (factor,))
    assert len(calls) == len(copies) == 1
    for other in (gpu_array((5,), np.float32), gpu_array((4,), np.float16)):
        cuattn.attention(q, q, q, score=score, score_args=(other, 2.0, unread))
    cuattn.attention(q, q, q, score=lambda *given: score(*given) + 1, score_args=(slope, 2.0, unread))
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("score", "wanted"),
    [
        (lambda s, b, h, i, j, x, y: s + x[h] + y[h], [(5,), (4,)]),
        (lambda s, b, h, i, j, x, y: s + y[h] + x[h], [(5,), (4,)]),
        (lambda s, b, h, i, j, x, y: s + y[h], [(5,), (4,)]),
        (lambda s, b, h, i, j, x, y, n: s + n * y[h] + x[h], [(5,), (4,), None]),
        (lambda s, b, h, i, j, n, x, t, y: s + n * y[h] + x[t[h]], [None, (5,), None, (4,)]),
        (lambda s, b, h, i, j, t: s + t[h], [None]),
        (lambda s, b, h, i, j, n: s * n, [None]),
        (lambda s, b, h, i, j, t: s, [None]),
        (lambda s, b, h, i, j: s + h, []),
    ],
)
def test_warm_gradients_belong_to_the_arguments(calls, driver, score, wanted):
    """In whatever order the function reads them; arrays and numbers are those of the call."""
    q, stat = gpu_array((2, 4, 100, 64)), gpu_array((2, 4, 100), np.float32)
    made = {"x": lambda at: gpu_array((5,), np.float32, at), "y": lambda at: gpu_array((4,), np.float32, at)}
    made |= {"t": lambda at: gpu_array((4,), np.int32, at), "n": lambda at: at / (1 << 30)}
    names = score.__code__.co_varnames[5:]
    for first in (1 << 31, 1 << 32, 1 << 33):
        args = tuple(made[name](first + (index << 20)) for index, name in enumerate(names))
        driver.done.clear()
        found = cuattn.backward(q, q, q, q, (q, stat, stat, None), score=score, score_args=args)
        assert [x and x[0] for x in found.dscore or ()] == wanted and [x[0] for x in found[:3]] == 3 * [q.shape]
        told = [each.argument for each in driver.done if hasattr(each, "argument")]
        read = {
            float(x[name]) for x in told for name in x.dtype.names if name.startswith(("traced.array", "traced.num"))
        }
        assert read <= {x if isinstance(x, float) else float(x.data.ptr) for x in args}
    assert len(calls) == 1


def test_more_arguments_than_have_names_are_refused(calls):
    q = gpu_array((2, 4, 100, 64))
    with pytest.raises(cuattn.errors.ArgumentError, match="score_args has 1001 items; expected at most 1000"):
        cuattn.attention(q, q, q, score=lambda s, b, h, i, j, *x: s, score_args=(1.0,) * 1001)


def test_a_function_that_changes_nothing_is_dropped(calls):
    q, x = gpu_array((2, 4, 100, 64)), gpu_array((4,), np.float32)
    for _ in range(2):
        cuattn.attention(q, q, q, score=lambda s, b, h, i, j, x: s * 1, score_args=(x,))
        assert calls[-1][0].score is None
    assert "score" in str(cuattn.plan(q, q, q, score=lambda s, b, h, i, j, x: s + x[h], score_args=(x,)))


def test_what_a_score_hides_joins_the_mask(calls):
    """Within one function, where there is another that no column mask says."""
    q = gpu_array((2, 4, 100, 64))
    window, odd = (lambda s, b, h, i, j: np.where(j <= i, s, -np.inf)), (lambda b, h, i, j: (i + j) % 3 > 0)

    def score(s, b, h, i, j):
        return np.where((i * j) % 5 > 0, s, -np.inf)

    for given, kinds in (
        ({"score": window, "mask": odd}, ("function", "column")),
        ({"score": score}, ("function",)),
        ({"score": score, "mask": odd}, ("function",)),
    ):
        for _ in range(2):
            cuattn.attention(q, q, q, **given)
            assert calls[-1][0].masks == kinds and calls[-1][0].score is None
    assert len(calls) == 3


def test_each_mask_has_tables_of_its_own(calls, driver, monkeypatch):
    """Also one that lies where another lay, and where another stream reads them."""
    from cuattn.cuda import tables

    streams, waiting, made = [Stream(), Stream()], [], iter(range(1 << 20))

    def find(self, given, shift, stream, capturing):
        first, kept = (1 << 36) + 4096 * next(made), given[0]._cache.setdefault("found", {})
        mine = SimpleNamespace(addresses=[first] * len(self.slots), home=stream, use=waiting.append)
        return kept.setdefault((self._number, shift), mine)

    def read(mask, stream=streams[0]):
        monkeypatch.setattr(interop.ArrayOrigin, "stream", lambda self: stream)
        cuattn.forward(q, q, q, mask=mask)
        return int(driver.done[-1].argument["table.cols"])

    monkeypatch.setattr(tables.MaskTables, "find", find)
    q, seen, gone = gpu_array((2, 100, 64)), set(), []
    read(masks.document([30, 70]))  # prepares what the others launch
    gc.disable()
    try:
        for _ in range(8):
            mask = masks.document([40, 60])
            places = {read(mask) for _ in range(3)}
            assert len(places) == 1 and not places & seen and not waiting
            assert {read(mask, streams[1]) for _ in range(2)} == places and waiting.pop() and waiting.pop()
            seen |= places
            gone.append(weakref.ref(mask))
            del mask
            assert gone[-1]() is None  # nothing that is remembered of its calls holds it
    finally:
        gc.enable()
    assert len(calls) == 1
    first, second = masks.document([40, 60]), masks.document([50, 50])
    assert len({read(mask) for mask in 2 * (first, second)}) == 2


def test_what_a_function_captures_is_looked_at_in_every_call(calls, driver, monkeypatch):
    from cuattn.cuda.sequence import LaunchSequence

    q, rate, window = gpu_array((2, 4, 100, 64)), 2.0, 7

    def score(s, b, h, i, j):
        return s + rate * (j - i)

    def visible(b, h, i, j):
        return (i - j < window) & (i * j % 5 > 0)

    given, run = [], LaunchSequence.run
    monkeypatch.setattr(LaunchSequence, "run", lambda self, *most: given.append(most[3]) or run(self, *most))

    def numbers():
        return [float(driver.done[-1].argument[x]) for x in driver.done[-1].argument.dtype.names if "number" in x]

    for _ in range(3):
        for rate in (2.0, 3.0):
            cuattn.forward(q, q, q, score=score)
            assert numbers() == [rate]
    assert len(calls) == 1
    for _ in range(3):
        for window in (7, 9):
            cuattn.forward(q, q, q, mask=visible)
            assert f"{window})" in repr(given[-1])
    assert len(calls) == 3
    score.__code__ = (lambda s, b, h, i, j: s - rate * i).__code__
    cuattn.forward(q, q, q, score=score)
    assert len(calls) == 4


def test_functions_of_parts_are_of_their_places(calls, monkeypatch):
    from cuattn.cuda.sequence import LaunchSequence

    given, run = [], LaunchSequence.run
    monkeypatch.setattr(LaunchSequence, "run", lambda self, *most: given.append(most[3]) or run(self, *most))
    q, odd = gpu_array((2, 4, 100, 64)), lambda b, h, i, j: (i * j) % 5 > 0
    column = masks.document([40, 60])

    def hiding(s, b, h, i, j):
        return np.where((i + j) % 3 > 0, s, -np.inf)

    for _ in range(2):
        for row in (0, 32, 64):
            cuattn.forward(q, q, q, mask=odd, origin=cuattn.Origin(row=row))
            (mask,) = given[-1]
            assert mask._i[0] == row
            cuattn.forward(q, q, q, mask=column, score=hiding, origin=cuattn.Origin(row=row))
            first, mask = given[-1]
            assert first is column and mask._i[0] == row


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_warm_calls_on_the_host_compute_what_the_first_did(kind):
    """With masks, functions, numbers and arrays that are others in each call."""
    x = np.random.default_rng(0).standard_normal((2, 2, 40, 16), np.float32)
    torch = pytest.importorskip("torch") if kind == "torch" else None

    rate = 1.0

    def score(s, b, h, i, j, slope, factor):
        return s + slope[h] * factor * (j - i)

    def own(s, b, h, i, j, slope):
        return s + slope[h] * (j - i) * rate

    def computed(x, slope, factor, mask):
        q, args = (torch.from_numpy(x), (torch.from_numpy(slope), factor)) if torch else (x, (slope, factor))
        return np.asarray(cuattn.attention(q, q, q, score=score, score_args=args, mask=mask)), np.asarray(
            cuattn.attention(q, q, q, score=own, score_args=args[:1], mask=mask)
        )

    def formula(x, slope, factor, mask):
        i, j = np.mgrid[:40, :40]
        s = x @ x.swapaxes(-1, -2) / 4 + slope[:, None, None] * factor * (j - i)
        s = np.where(mask(0, 0, i, j) if callable(mask) else mask.dense(), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        return p / p.sum(-1, keepdims=True) @ x

    slopes, given = (np.array([0.5, 0.25]), np.array([1.0, -0.5])), []
    for mask in (masks.causal_document([10, 30]), masks.causal_document([25, 15]), lambda b, h, i, j: (i * j) % 7 != 1):
        given += [
            (y, slope.astype(np.float32), factor, mask)
            for y in (x, x[:1])
            for slope in slopes
            for factor in (1.0, 2.0, 3)
        ]
    for _ in range(2):
        for one in given:
            rate = one[2]
            for found in computed(*one):
                np.testing.assert_allclose(found, formula(*one), atol=2e-5)


def test_calls_can_be_forgotten(calls):
    """Also those that masks and functions remember."""
    q, mask = gpu_array((2, 100, 64)), masks.document([40, 60])
    given = {}, {"mask": mask}, {"score": lambda s, b, h, i, j: s * i}, {"mask": lambda b, h, i, j: i * j % 5 > 0}
    for turn in (1, 2):
        for _ in range(3):
            for options in given:
                cuattn.forward(q, q, q, **options)
        assert len(calls) == turn * len(given)
        dispatch.forget()
