"""What differs, what is wrong and who fails: on threads."""

import sys
import threading
import time

import numpy as np
import pytest

import cuattn
from cuattn import distributed, masks
from cuattn.distributed import DistributedError, Layout, connect, spawn
from cuattn.errors import ArgumentError, DtypeError, ShapeError

X = np.random.default_rng(0).standard_normal((2, 32, 8), np.float32)


def each(comm, call):
    """Return the error that a call raises on this rank."""
    try:
        call()
    except Exception as error:
        return error
    return None


def errors(arguments, ranks=2, function="attention"):
    """Return the errors of a call whose arguments depend on the rank."""

    def work(comm):
        connect(timeout=10)
        args, options = arguments(comm.rank)
        return each(comm, lambda: getattr(distributed, function)(*args, comm=comm, **options))

    return spawn(work, ranks=ranks)


def tripled(**options):
    """Return three operands, and options of which those that are tuples have an item for each rank."""
    return lambda rank: (
        (X, X, X),
        {name: value[rank] if isinstance(value, tuple) else value for name, value in options.items()},
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("scale", (0.5, 0.25)),
        ("is_causal", (True, False)),
        ("algorithm", ("ring", "gather")),
        ("mask", (masks.causal(64), masks.full(64))),
        ("mask", (np.ones((64, 64), bool), np.tri(64, dtype=bool))),
        ("layout", (Layout.contiguous(64, 2), Layout.zigzag(64, 2))),
        ("rng", (1, 2)),
        ("dropout_p", (0.0, 0.5)),
    ],
)
def test_what_differs_is_told_on_every_rank(name, values):
    found = errors(tripled(**{name: values}))
    for error in found:
        assert type(error) is DistributedError and str(error).startswith(f"{name} differs")
        assert sorted(error.ranks) == [0, 1] and error.ranks == found[0].ranks and len(set(error.ranks.values())) == 2


def test_functions_differ_by_what_they_are_and_capture():
    for factors in ((1, 2), (2, 1)):
        functions = tuple((lambda s, b, h, i, j, factor=factor: s * factor) for factor in factors)
        assert all("score differs" in str(error) for error in errors(tripled(score=functions)))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"is_causal": "left"}, ArgumentError, "is_causal is 'left'"),
        ({"mask": masks.causal(32)}, ShapeError, "expected one of the whole problem: 64 queries and 64 keys"),
        ({"layout": Layout.contiguous(60, 2)}, ShapeError, "layout has lengths"),
        ({"layout": 3}, ArgumentError, "layout is 3"),
        ({"bias": np.zeros((32, 32), np.float32)}, ShapeError, "by all 64 keys"),
        ({"bias": np.zeros((40, 64), np.float32)}, ShapeError, "bias has shape (40, 64); expected 32 rows"),
        ({"window": ((-1, 0), (-1, 0))}, ArgumentError, "window's left is -1"),
        ({"algorithm": "star"}, ArgumentError, "algorithm is 'star'"),
        ({"rng": "x"}, DtypeError, "rng has type str"),
        ({"sale": 3}, TypeError, "unexpected keyword argument 'sale'"),
        ({"origin": cuattn.Origin(row=16)}, ArgumentError, "layout has the rest"),
        ({"layout": Layout.contiguous(64, 2, unit=1), "dropout_p": 0.5, "rng": 0, "is_causal": 7}, ArgumentError, ""),
    ],
)
def test_what_all_refuse_is_their_own_error(options, kind, text):
    for error in errors(tripled(**options)):
        assert type(error) is kind and text in str(error)


def test_what_one_refuses_all_do():
    found = errors(lambda rank: ((X[..., :4] if rank else X, X, X), {}), ranks=3)
    assert all(type(error) is DistributedError for error in found)
    found = errors(lambda rank: (("x" if rank == 1 else X, X, X), {}), ranks=3)
    for error in found:
        assert type(error) is DistributedError and list(error.ranks) == [1] and "DtypeError" in error.ranks[1]
    assert isinstance(found[1].__cause__, DtypeError)
    whole = np.ones((2, 32, 8), int)
    assert [type(error) for error in errors(lambda rank: ((whole,) * 3, {}))] == [DtypeError] * 2
    bias = np.zeros((32, 96), np.float32)
    found = errors(lambda rank: ((X, X, X), {"bias": bias[rank:]}), ranks=3)
    assert all(type(error) is DistributedError and list(error.ranks) == [1, 2] for error in found)


def test_dropout_cuts_no_blocks():
    layout = Layout.from_runs([[(0, 24), (56, 64)], [(24, 56)]])
    for error in errors(tripled(layout=layout, dropout_p=0.5, rng=0)):
        assert type(error) is ArgumentError and "has a run at 56; expected multiples of 16" in str(error)


def test_a_rank_that_raises_ends_all():
    seen = []

    def work(comm):
        if comm.rank == 1:
            raise KeyError("first")
        seen.append(each(comm, comm.barrier))
        raise seen[-1]

    with pytest.raises(KeyError, match="first"):
        spawn(work, ranks=3)
    assert [type(error) for error in seen] == [DistributedError] * 2
    assert all(error.ranks == {1: "KeyError: 'first'"} for error in seen)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cuattn-rank")]


def test_a_rank_that_is_late_breaks_the_comm():
    over = threading.Event()

    def work(comm):
        connect(timeout=0.2)
        if comm.rank == 1:
            assert over.wait(20)
        first = each(comm, lambda: distributed.attention(X, X, X, comm=comm))
        over.set()
        return first, each(comm, comm.barrier)

    for error in [error for pair in spawn(work, ranks=2) for error in pair]:
        assert type(error) is DistributedError and error.ranks == {1: "did not answer rank 0 within 0.2 s"}


def test_a_call_that_fails_inside_ends_all(monkeypatch):
    from cuattn.distributed import tape

    plain = tape.dispatch.compute

    def fails(call):
        if threading.current_thread().name.endswith("1"):
            raise MemoryError("no room")
        return plain(call)

    monkeypatch.setattr(tape.dispatch, "compute", fails)
    with pytest.raises(MemoryError, match="no room"):
        spawn(lambda comm: distributed.attention(X, X, X, comm=comm), ranks=3)


def test_a_rank_that_has_ended_is_not_waited_for():
    """Neither in a collective nor for a message, nor for one to be taken."""
    x, begin = np.zeros(4), time.monotonic()
    for wait in (
        lambda comm: comm.barrier(),
        lambda comm: comm.exchange([], [(1, x)]),
        lambda comm: comm.exchange([(1, x)], []),
        lambda comm: distributed.attention(X, X, X, comm=comm),
    ):
        found = spawn(lambda comm, wait=wait: None if comm.rank else each(comm, lambda: wait(comm)), ranks=2)[0]
        assert type(found) is DistributedError and found.ranks == {1: "ended before it answered rank 0"}
    assert time.monotonic() - begin < 20
    # What it has sent before arrives.
    assert spawn(lambda comm: comm.allgather(comm.rank) if comm.rank else time.sleep(0.1) or comm.allgather(0), ranks=2)


def test_a_message_of_another_size_ends_all():
    """Also the sender, who waits for it to be taken."""

    def work(comm):
        x = np.zeros(4 + 4 * comm.rank)
        messages = ([], [(1, x)]) if comm.rank == 0 else ([(0, x)], [])
        return each(comm, lambda: comm.exchange(*messages))

    begin = time.monotonic()
    assert [type(error) for error in spawn(work, ranks=2)] == [DistributedError] * 2
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("where", ["check_call", "compute"])
def test_a_cancelled_call_is_an_error_on_the_others(monkeypatch, where):
    """Also where arguments are checked, and there the comm is as good as before."""
    from cuattn import dispatch
    from cuattn.distributed import request

    request._memo.cache_clear()  # calls that were in order are not checked again
    plain, cancelled = getattr(dispatch, where), []

    def cancels(call):
        if threading.current_thread().name.endswith("1") and not cancelled:
            cancelled.append(call)
            raise KeyboardInterrupt
        return plain(call)

    monkeypatch.setattr(dispatch, where, cancels)
    kept = where == "check_call"

    def work(comm):
        connect(timeout=20)
        try:
            distributed.attention(X, X, X, comm=comm, algorithm="ring")
        except BaseException as error:
            return error, each(comm, lambda: distributed.attention(X, X, X, comm=comm, algorithm="ring"))

    begin = time.monotonic()
    first, again = zip(*spawn(work, ranks=3), strict=True)
    assert [type(error) for error in first] == [DistributedError, KeyboardInterrupt, DistributedError]
    assert [type(error) for error in again] == [type(None) if kept else DistributedError] * 3
    assert time.monotonic() - begin < 15


def test_spawn_can_be_interrupted():
    """Ranks that wait end at once, and the caller gets its KeyboardInterrupt."""
    import signal

    def work(comm):
        if comm.rank:
            comm.barrier()  # for which rank 0 is late
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        comm.exchange([], [(1, np.zeros(1))])

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind itself ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            spawn(work, ranks=3)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cuattn-rank")]
    assert spawn(lambda comm: comm.allgather(comm.rank), ranks=2) == [[0, 1]] * 2


@pytest.mark.parametrize("algorithm", [None, "ring", "combine", "heads", "gather"])
def test_a_bias_without_rows_at_a_rank_without_queries(algorithm):
    rng = np.random.default_rng(0)
    bias = rng.standard_normal((2, 1, 24), np.float32)
    keys = Layout.contiguous(24, 2, unit=1)
    for n in (1, 5):
        layout = Layout.from_runs([[(0, n)], []])
        q, do = rng.standard_normal((2, 2, n, 8), np.float32)
        k, v = rng.standard_normal((2, 2, 24, 8), np.float32)

        def work(comm, arrays=(q, do, k, v), layout=layout):
            connect(timeout=20)
            q, do, k, v = (one.shard(x, comm.rank) for one, x in zip((layout, layout, keys, keys), arrays, strict=True))
            options = dict(comm=comm, layout=layout, key_layout=keys, algorithm=algorithm, bias=bias)
            fwd = distributed.forward(q, k, v, **options)
            grads = distributed.backward(do, q, k, v, fwd, **options)
            return layout.unshard(grads.dq, comm), grads.dbias

        fwd = cuattn.forward(q, k, v, bias=bias)
        grads = cuattn.backward(do, q, k, v, fwd, bias=bias)
        for dq, dbias in spawn(work, ranks=2):
            np.testing.assert_allclose(dq, grads.dq, atol=1e-5)
            np.testing.assert_allclose(dbias, grads.dbias, atol=1e-5)


def test_a_bias_with_rows_on_some_ranks_alone_is_refused():
    """Whatever the algorithm: what travels has to have the shape that others expect."""
    whole, one = np.zeros((2, 9, 24), np.float32), np.zeros((2, 1, 24), np.float32)
    layout = Layout.from_runs([[(0, 5)], [(5, 9)]])
    q, k = np.zeros((2, 9, 8), np.float32), np.zeros((2, 12, 8), np.float32)
    for algorithm in (None, "combine", "heads"):

        def arguments(rank, algorithm=algorithm):
            bias = one if rank else layout.shard(whole, 0)
            return (layout.shard(q, rank), k, k), {"bias": bias, "layout": layout, "algorithm": algorithm}

        for error in errors(arguments):
            assert type(error) is DistributedError and list(error.ranks) == [1]
            assert "bias has shape (2, 1, 24); expected 4 rows, this rank's, or 1 on every rank" in error.ranks[1]


def test_spawn_checks_its_arguments():
    for options in ({"ranks": 0}, {"ranks": "2"}, {"ranks": 2, "devices": [0]}):
        with pytest.raises(ArgumentError, match="ranks is"):
            spawn(print, **options)


def test_errors_pickle():
    import pickle

    error = DistributedError("scale differs", {0: "1", 1: "2"})
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.ranks) == (str(error), error.ranks) and "rank 1: 2" in str(error)


def test_letter_boxes_that_two_ranks_first_ask_for_at_once(monkeypatch):
    """The sender's letter is in the box that the receiver looks into, however long a box takes to make."""
    from collections import deque

    from cuattn.distributed import threads

    def slow():
        time.sleep(0.3 if threads.current().rank == 0 else 0.0)
        return deque()

    monkeypatch.setattr(threads, "deque", slow)

    def work(comm):
        connect(timeout=2)
        target = np.zeros(2)
        if comm.rank == 0:
            comm.exchange([], [(1, target)])
        else:
            time.sleep(0.1)
            comm.exchange([(0, np.ones(2))], [])
        return target

    np.testing.assert_array_equal(spawn(work, ranks=2)[0], 1)


def test_turns_of_threads_are_given_back():
    before = sys.getswitchinterval()

    def work(comm):
        inner = spawn(lambda comm: sys.getswitchinterval(), ranks=2)
        return [*inner, sys.getswitchinterval()]

    for found in spawn(work, ranks=2):
        assert max(found) <= before and len(set(found)) == 1
    assert sys.getswitchinterval() == before


def test_messages_match_in_order_however_exchanges_group_them():
    def work(comm):
        peer, found = 1 - comm.rank, np.zeros((4, 3))
        mine = np.arange(12.0).reshape(4, 3) + 100 * comm.rank
        groups = ((0, 1), (1, 4)) if comm.rank else ((0, 3), (3, 4))
        if comm.rank:
            comm.exchange([(peer, x) for x in mine], [])
            for first, last in groups:
                comm.exchange([], [(peer, x) for x in found[first:last]])
        else:
            for first, last in groups:
                comm.exchange([], [(peer, x) for x in found[first:last]])
            comm.exchange([(peer, x) for x in mine], [])
        return found

    for rank, found in enumerate(spawn(work, ranks=2)):
        np.testing.assert_array_equal(found, np.arange(12.0).reshape(4, 3) + 100 * (1 - rank))
