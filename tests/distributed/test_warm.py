"""Calls like earlier ones: little is done for them, and nothing is told of them that is no longer true."""

import contextlib
import weakref

import numpy as np
import pytest

import cuattn
from cuattn import dispatch, distributed, masks
from cuattn.distributed import DistributedError, Layout, comm, request, spawn, tape
from cuattn.errors import DtypeError

N = 48
LAYOUT = Layout.zigzag(N, 2, unit=4)
RNG = np.random.default_rng(0)
Q, K, V, DO = RNG.standard_normal((4, 2, N, 8), np.float32)
BIAS = RNG.standard_normal((2, N, N), np.float32)
SIX = {
    "causal": {"is_causal": True},
    "window": {"window": (9, 4)},
    "documents": {"mask": masks.document([20, 28])},
    "scale": {"scale": 0.5},
    "function": {"score": lambda s, b, h, i, j: s + h * (i - j)},
    "mask function": {"mask": lambda b, h, i, j: (i + j) % 3 != h},
}


def whole(options, arrays=(Q, K, V, DO)):
    """Return o, dq, dk, dv of one device."""
    fwd = cuattn.forward(*arrays[:3], **options)
    replayed = {name: x for name, x in options.items() if name != "rng"}
    return [fwd.o, *cuattn.backward(arrays[3], *arrays[:3], fwd, **replayed)[:3]]


def over_ranks(each, options, layout=LAYOUT):
    """Return o, dq, dk, dv of the whole problem, computed over ranks."""
    q, k, v, do = (layout.shard(x, each.rank) for x in (Q, K, V, DO))
    placing = dict(comm=each, layout=layout)
    fwd = distributed.forward(q, k, v, **placing, **options)
    options = {name: x for name, x in options.items() if name != "rng"}
    grads = distributed.backward(do, q, k, v, fwd, **placing, **options)
    return [layout.unshard(x, each) for x in (fwd.o, *grads[:3])]


def assert_close(found, right):
    for one, other in zip(found, right, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5, rtol=1e-4)


def test_different_calls_that_take_turns():
    right = {name: whole(options) for name, options in SIX.items()}

    def work(each):
        for _ in range(3):
            for name, options in SIX.items():
                assert_close(over_ranks(each, options), right[name])

    spawn(work, ranks=2)


def test_numbers_are_read_anew_and_results_are_the_callers():
    """Whatever arrays are reused, results of one call are not touched by the next."""
    other = RNG.standard_normal((4, 2, N, 8), np.float32)

    def work(each):
        q, k, v, do = (LAYOUT.shard(x, each.rank) for x in (Q, K, V, DO))
        found = []
        for _ in range(2):
            for numbers in ((Q, K, V, DO), other):
                for mine, x in zip((q, k, v, do), numbers, strict=True):
                    mine[...] = LAYOUT.shard(x, each.rank)
                placing = dict(comm=each, layout=LAYOUT, is_causal=True)
                fwd = distributed.forward(q, k, v, **placing)
                found.append((fwd.o, *distributed.backward(do, q, k, v, fwd, **placing)[:3]))
        return [[LAYOUT.unshard(x, each) for x in one] for one in found]

    right = [whole({"is_causal": True}), whole({"is_causal": True}, other)] * 2
    for found in spawn(work, ranks=2):
        for one, other in zip(found, right, strict=True):
            assert_close(one, other)


def test_arrays_of_other_strides():
    """A message of what is contiguous is not one of what is not."""
    swapped = [np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1) for x in (Q, K, V, DO)]
    reverse = [x[:, ::-1] for x in (Q, K, V, DO)]

    def work(each):
        for _ in range(2):
            for arrays in ((Q, K, V, DO), swapped, reverse):
                q, k, v = (
                    x if x.strides[0] > x.strides[1] else np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
                    for x in (LAYOUT.shard(x, each.rank) for x in arrays[:3])
                )
                o = distributed.attention(q, k, v, comm=each, layout=LAYOUT, is_causal=True)
                assert_close([LAYOUT.unshard(o, each)], [cuattn.attention(*arrays[:3], is_causal=True)])

    spawn(work, ranks=2)


def test_what_a_function_captures_and_what_an_array_hides_may_change():
    factor, seen = [1.0], RNG.random((N, N)) < 0.5
    scale = 1.0

    def changed(s, b, h, i, j):
        return s * scale

    def listed(s, b, h, i, j):
        return s * factor[0]

    for scale in (1.0, 0.25, 1.0):
        factor[0] = scale
        seen[:] = RNG.random((N, N)) < 0.5
        seen[:, 0] = True
        for options in ({"score": changed}, {"score": listed}, {"mask": seen}):
            right = whole(options)
            for found in spawn(over_ranks, options, ranks=2):
                assert_close(found, right)


def test_dropout_is_drawn_anew():
    layout, seeds = Layout.contiguous(N, 2), (1, 1, 2, 1)

    def work(each):
        found = [over_ranks(each, {"dropout_p": 0.5, "rng": seed}, layout) for seed in seeds]
        x, states = layout.shard(Q, each.rank), []
        for _ in range(3):
            states.append(distributed.forward(x, x, x, comm=each, layout=layout, dropout_p=0.5).rng_state)
        with pytest.raises(DistributedError, match="rng differs"):
            over_ranks(each, {"dropout_p": 0.5, "rng": each.rank}, layout)
        with pytest.raises(DtypeError, match="rng has type str"):
            over_ranks(each, {"dropout_p": 0.5, "rng": "x"}, layout)
        return found, states

    (found, states), (_, others) = spawn(work, ranks=2)
    assert states == others and len({*states}) == 3  # rank 0 draws
    for one, seed in zip(found, seeds, strict=True):
        assert_close(one, whole({"dropout_p": 0.5, "rng": seed}))


@contextlib.contextmanager
def counted(monkeypatch):
    """Count the calls that are checked and the tapes that are made."""
    found = {"checked": 0, "taped": 0}
    plain, made = dispatch.check_call, tape.Tape.__init__

    def check_call(call):
        found["checked"] += 1
        return plain(call)

    def init(self, arrays):
        found["taped"] += 1
        made(self, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "check_call", check_call)
        patch.setattr(tape.Tape, "__init__", init)
        request._memo.cache_clear()
        yield found


@pytest.mark.parametrize("name", [*SIX, "dropout", "bias", "bias without rows", "out", "numbers"])
def test_a_known_call_is_neither_checked_nor_taken_down_again(name, monkeypatch):
    def score(s, b, h, i, j, factor):
        return s * factor

    options = {
        **SIX,
        "dropout": {"dropout_p": 0.5, "rng": 3},
        "numbers": {"score": score, "score_args": (0.5,)},
        "bias": {},
        "bias without rows": {},
        "out": {},
    }[name]

    def work(each, again):
        layout = Layout.contiguous(N, 2)
        q, k, v = (layout.shard(x, each.rank) for x in (Q, K, V))
        own = {"out": np.empty_like(q)} if name == "out" else {}
        if name == "bias":
            own["bias"] = layout.shard(BIAS, each.rank)
        if name == "bias without rows":
            own["bias"] = BIAS[:, :1]
        for _ in range(again):
            o = distributed.attention(q, k, v, comm=each, layout=layout, **options, **own)
        return layout.unshard(o, each)

    biases = {"bias": {"bias": BIAS}, "bias without rows": {"bias": BIAS[:, :1]}}
    right = cuattn.attention(Q, K, V, **options, **biases.get(name, {}))
    with counted(monkeypatch) as found:
        spawn(work, 2, ranks=2)  # a function has to be traced before it is known
        before = dict(found)
        assert before["taped"] >= 2
        for o in spawn(work, 3, ranks=2):
            assert_close([o], [right])
        assert found == before


def test_what_one_rank_refuses_of_a_known_call_all_do():
    def work(each):
        x = LAYOUT.shard(Q, each.rank)
        call = lambda **more: distributed.attention(x, x, x, comm=each, layout=LAYOUT, **more)  # noqa: E731
        right, out = call(), np.empty_like(x)
        for _ in range(2):
            assert call(out=out) is out
        with pytest.raises(DistributedError, match="on 1 of 2 ranks") as error:
            call(out=x if each.rank else out)  # which it would overwrite
        assert list(error.value.ranks) == [1] and "overlaps" in error.value.ranks[1]
        with pytest.raises(DistributedError, match="mask differs"):
            call(mask=masks.causal(N) if each.rank else masks.full(N))
        with pytest.raises(DistributedError, match="score differs"):
            call(score=(lambda s, b, h, i, j: 2 * s) if each.rank else (lambda s, b, h, i, j: 3 * s))
        np.testing.assert_array_equal(call(), right)

    spawn(work, ranks=2)


def test_a_run_lets_go_of_what_no_later_step_needs(monkeypatch):
    alive, there, plain = [], [], dispatch.add

    def add(out, *terms):
        plain(out, *terms)
        alive.append(weakref.ref(out if out.base is None else out.base))
        there.append([n for n, array in enumerate(alive) if array() is not None])

    monkeypatch.setattr(dispatch, "add", add)
    made, float64 = tape.Tape({"x": np.zeros((4, 4))}), np.dtype(np.float64)
    first, second, third = (made.empty((4, 4), float64) for _ in range(3))
    made.add(first, made.arrays["x"])
    made.add(second, first)
    made.add(third[1:], second[1:])
    made.add(third[:1], made.arrays["x"][:1])
    made.end({"result": third})
    x = np.arange(16.0).reshape(4, 4)
    np.testing.assert_array_equal(made.run({"x": x}, None, None)["result"], x)
    assert there == [[0], [0, 1], [1, 2], [2, 3]]  # the third and the fourth are one


def test_a_wait_does_not_sleep_at_first(monkeypatch):
    monkeypatch.setattr(comm.time, "sleep", lambda seconds: pytest.fail("it slept"))
    monkeypatch.setattr(comm, "AWAKE", 60.0)
    asked = iter([False, False, True])
    comm.Deadline(5.0).wait(lambda: next(asked), dict)
