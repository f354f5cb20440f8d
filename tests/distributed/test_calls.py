"""Any problem, dealt out in any way, is what one device computes."""

import contextlib
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import distributed, masks
from cuattn.distributed import DistributedError, Layout, api, arrays, connect, model, spawn, tape, threads, walk
from cuattn.errors import ArgumentError
from tests.distributed.layouts import layouts, run
from tests.strategies import cases, normal
from tests.test_api import check
from tests.tolerances import assert_same

ALGORITHMS = (None, "ring", "needed", "gather", "combine", "heads", "2d")
GRADIENTS = ("dq", "dk", "dv", "dbias")
PHASES = (Phase.explicit, Phase.generate)  # to shrink threads takes minutes


def dealt(data, case, size):
    """Draw layouts of a case's rows and keys."""
    unit = 16 if case.options.get("dropout_p") else 1
    return [data.draw(layouts(x.shape[-2], size, unit)) for x in (case.q, case.k)]


@settings(max_examples=60, phases=PHASES)
@given(data=st.data(), case=cases(), size=st.integers(2, 4), algorithm=st.sampled_from(ALGORITHMS))
def test_any_split_matches_the_oracle(data, case, size, algorithm):
    rows, keys = dealt(data, case, size)
    piece = mock.patch.object(arrays, "_PIECE", data.draw(st.sampled_from((1, 1 << 30))))
    in_rows = messages_in_rows() if data.draw(st.booleans()) else contextlib.nullcontext()
    with piece, in_rows, in_parts(data.draw(st.sampled_from((1, 2)))):
        matches_the_oracle(case, size, algorithm, rows, keys)


@contextlib.contextmanager
def messages_in_rows():
    """Let messages be rows at equal distances, as they may be where GPUs copy them."""

    def put_into(letter, targets, stream):
        count = min(len(letter.arrays), len(targets))
        for array, target in zip(letter.arrays[:count], targets[:count], strict=True):
            assert array.shape == target.shape and array.dtype == target.dtype
            for each in (array, target):
                assert each.flags.c_contiguous or (each[0].flags.c_contiguous and each.strides[0] > each[0].nbytes)
            target[...] = array
        del letter.arrays[:count], targets[:count]

    takes_rows = mock.patch.object(tape.Tape, "takes_rows", lambda *_: True)
    with takes_rows, mock.patch.object(threads._Letter, "put_into", put_into):
        yield


def in_parts(count):
    """Compute heads in so many parts, where they can be."""
    return mock.patch.object(
        api, "_parts", lambda request, rows, inner: 1 if request.slices % (count * inner) else count
    )


def matches_the_oracle(case, size, algorithm, rows, keys):
    assume(case.bias is None or case.bias.shape[-2] > 1 or set(rows.lengths) != {1})  # is it of one row, or of any?
    try:
        results = spawn(run, case, rows, keys, algorithm, ranks=size)
    except ArgumentError as error:  # ranks do not divide the heads
        assert "algorithm is" in str(error) and algorithm in ("heads", "2d")
        return
    for fwd, grads in results[1:]:
        assert_same((*fwd[:3], *grads), (*results[0][0][:3], *results[0][1]))
    fwd, grads = results[0]
    assert (
        fwd.o.dtype == case.q.dtype and fwd.rng_state == cuattn.forward(*case.arguments()[0], **case.arguments()[1])[3]
    )
    check(case, fwd[:3])
    check(case, grads, GRADIENTS)


N = 96
MASKS = {
    "none": {},
    "per head": {"mask": masks.ColumnMask.stack([masks.causal(N), masks.sliding_window(N, 40)] * 2)},
    "blocks": {"mask": masks.BlockMask(np.tri(3, dtype=bool), 32, 32) & masks.document([50, 46])},
    "function": {"mask": lambda b, h, i, j: (i - j) % (h + 2) != 1},
    "array": {"mask": np.random.default_rng(1).random((4, N, N)) < 0.3, "window": (70, 20)},
    "dropout": {"is_causal": True, "dropout_p": 0.3, "rng": 7},
    "score": {"score": lambda s, b, h, i, j, t: np.where(j <= i, s + t[h] * (i - j), -np.inf), "score_args": (0.1,)},
}


def problem(dtype=np.float32, kv_heads=2):
    """Return q, k, v, do of four heads, of which pairs share keys."""
    rng = np.random.default_rng(0)
    q, do = (rng.standard_normal((2, 4, N, 16)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((2, kv_heads, N, 16)).astype(dtype) for _ in range(2))
    return q, k, v, do


def together(comm, arrays, layout, options, **more):
    """Return the whole forward and gradients of a problem that ranks compute."""
    mine = [layout.shard(x, comm.rank) for x in arrays]
    placing = dict(comm=connect(timeout=20), layout=layout, enable_gqa=True)
    fwd = distributed.forward(*mine[:3], **placing, **options, **more)
    replayed = {name: x for name, x in {**options, **more}.items() if name != "rng"}
    grads = distributed.backward(mine[3], *mine[:3], fwd, **placing, **replayed)
    whole = [layout.unshard(fwd[at], comm, axis) for at, axis in enumerate((-2, -1, -1))]
    return whole, [layout.unshard(x, comm) for x in grads[:3]], grads.dscore


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("algorithm", [None, "needed", "combine", "heads", "gather"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_functions_and_dropout(name, algorithm, parts, monkeypatch):
    """Results are those of one device: the same elements are seen and kept, heads and indices are global."""
    monkeypatch.setattr(arrays, "_PIECE", 1 if parts == 2 else 1 << 30)
    options, given = dict(MASKS[name]), problem()
    learned = np.array([0.1, -0.1, 0.2, 0.0], np.float32)
    if name == "score":
        options["score_args"] = (learned,)
    fwd = cuattn.forward(*given[:3], enable_gqa=True, **options)
    replayed = {key: x for key, x in options.items() if key != "rng"}
    grads = cuattn.backward(given[3], *given[:3], fwd, enable_gqa=True, **replayed)
    layout = Layout.zigzag(N, 2)
    with in_parts(parts):
        found = spawn(lambda comm: together(comm, given, layout, options, algorithm=algorithm), ranks=2)
    for whole, made, dscore in found:
        for one, other in zip((*whole, *made, *dscore), (*fwd[:3], *grads[:3], *grads.dscore), strict=True):
            np.testing.assert_allclose(one, other, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("dropout", [{}, {"dropout_p": 0.3, "rng": 7}])
@pytest.mark.parametrize(
    "options", [{"window": (24, 0)}, {"mask": masks.document([20, 40, 36])}], ids=["window", "mask"]
)
def test_rows_that_see_own_keys_alone(options, dropout, monkeypatch):
    """They are computed while others' keys arrive; rows that see none of a part's keys have no part in it backward."""
    seen = []

    def compute(self, own, moved, rows, keys, plain=walk.Walk._compute):
        seen.append((type(self).__name__, self.team.index, rows, keys))
        return plain(self, own, moved, rows, keys)

    monkeypatch.setattr(walk.Walk, "_compute", compute)
    given, layout, options = problem(), Layout.contiguous(N, 2), {**options, **dropout}
    fwd = cuattn.forward(*given[:3], enable_gqa=True, **options)
    replayed = {key: x for key, x in options.items() if key != "rng"}
    grads = cuattn.backward(given[3], *given[:3], fwd, enable_gqa=True, **replayed)
    for algorithm in ("gather", "ring", "needed"):
        with mock.patch.object(model, "_SHARDS", -1 if algorithm == "needed" else model._SHARDS):
            model.options_of.cache_clear()
            found = spawn(lambda comm, a=algorithm: together(comm, given, layout, options, algorithm=a), ranks=2)
        model.options_of.cache_clear()
        for whole, made, _ in found:
            for one, other in zip((*whole, *made), (*fwd[:3], *grads[:3]), strict=True):
                np.testing.assert_allclose(one, other, atol=3e-5, rtol=1e-4)
    edge = 80 if "window" in options else 64  # of rows of the second rank, in tiles of 16
    expected = {
        ("ForwardWalk", 1, ((edge, 96),), ((48, 96),)),
        ("ForwardWalk", 1, ((48, edge),), ((16, 80 if "window" in options else 96),)),
        ("BackwardWalk", 1, ((48, edge),), ((16, 48),)),
    }
    assert {*seen} >= expected


def test_the_same_call_gives_the_same_bits():
    arrays, layout = problem(np.float16), Layout.zigzag(N, 3)
    for algorithm in (None, "combine"):
        first, again = (
            spawn(lambda comm, a=algorithm: together(comm, arrays, layout, {"is_causal": True}, algorithm=a), ranks=3)[
                0
            ]
            for _ in range(2)
        )
        assert_same((*first[0], *first[1]), (*again[0], *again[1]))


def test_one_rank_has_the_bits_of_a_call_without_ranks():
    arrays = problem()
    fwd = cuattn.forward(*arrays[:3], enable_gqa=True, window=(30, 5), dropout_p=0.2, rng=1)
    grads = cuattn.backward(arrays[3], *arrays[:3], fwd, enable_gqa=True, window=(30, 5), dropout_p=0.2)
    with connect() as comm:
        options = {"window": (30, 5), "dropout_p": 0.2, "rng": 1}
        whole, made, _ = together(comm, arrays, Layout.contiguous(N, 1), options)
    assert_same((*whole, *made), (*fwd[:3], *grads[:3]))


def test_fresh_dropout_is_drawn_once():
    x = problem()[0]
    layout = Layout.contiguous(N, 3)

    def work(comm):
        mine, generator = layout.shard(x, comm.rank), np.random.default_rng(comm.rank)
        return [
            distributed.forward(mine, mine, mine, comm=comm, dropout_p=0.5, rng=rng).rng_state
            for rng in (None, generator)
        ]

    for states in zip(*spawn(work, ranks=3), strict=True):
        assert len(set(states)) == 1 and isinstance(states[0], cuattn.RNGState)
    assert spawn(lambda comm: distributed.forward(x, x, x, comm=comm, rng=3).rng_state, ranks=2) == [None, None]


def test_results_go_where_they_are_wanted():
    q, k, v, do = problem(np.float16)
    layout = Layout.balanced(masks.causal(N), 2, unit=16)
    fwd = cuattn.forward(q, k, v, enable_gqa=True, is_causal=True, out_dtype=np.float32)
    dlse = np.random.default_rng(3).standard_normal(fwd.l.shape).astype(np.float32)
    grads = cuattn.backward(do, q, k, v, fwd, enable_gqa=True, is_causal=True, dlse=dlse, out_dtype=np.float32)

    def work(comm, algorithm):
        mine = [layout.shard(x, comm.rank) for x in (q, k, v, do)]
        placing = dict(comm=comm, layout=layout, enable_gqa=True, is_causal=True, algorithm=algorithm)
        o = np.empty(mine[0].shape, np.float32)
        own = distributed.forward(*mine[:3], **placing, out=(o, None, None), out_dtype=np.float32)
        assert own.o is o
        rest = dict(dlse=layout.shard(dlse, comm.rank, -1), out_dtype=np.float32)
        made = distributed.backward(mine[3], *mine[:3], own, **placing, **rest)
        half = distributed.attention(*mine[:3], **placing)
        assert half.dtype == np.float16
        return [layout.unshard(x, comm) for x in (o, *made[:3], half)]

    for algorithm in (None, "combine"):
        for found in spawn(work, algorithm, ranks=2):
            for one, other in zip(found, (fwd.o, *grads[:3], fwd.o), strict=True):
                np.testing.assert_allclose(one, other, atol=2e-3 if one.dtype == np.float16 else 2e-5)


def test_hidden_keys_and_empty_ranks_leak_nothing():
    """NaN in what nobody sees stays there, and ranks without rows or keys take part."""
    q, k, v, do = problem()
    layout = Layout.from_runs([[(0, 48)], [], [(48, N)]])
    mask = masks.full(N) & np.broadcast_to(np.arange(N) < 60, (N, N))
    k[..., 60:, :] = v[..., 60:, :] = np.nan
    for whole, made, _ in spawn(together, (q, k, v, do), layout, {"mask": mask}, ranks=3):
        assert all(np.isfinite(x).all() for x in (*whole, *made))


def test_torch_tensors_come_back():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, N, 16, dtype=torch.bfloat16)
    layout = Layout.contiguous(N, 2)

    def work(comm):
        mine = layout.shard(x, comm.rank)
        return layout.unshard(distributed.attention(mine, mine, mine, comm=comm, layout=layout), comm)

    whole = spawn(work, ranks=2)[0]
    assert isinstance(whole, torch.Tensor) and whole.dtype == torch.bfloat16
    assert torch.allclose(whole.float(), cuattn.attention(x, x, x).float(), atol=2e-2)


def test_calls_that_were_in_order_are_checked_once_and_agreed_on_in_one_message(monkeypatch):
    """And what differs then, between ranks or from before, is told as it is at first."""
    from cuattn import dispatch
    from cuattn.distributed import request

    checked, plain = [], dispatch.check_call
    monkeypatch.setattr(dispatch, "check_call", lambda call: checked.append(call) or plain(call))
    request._memo.cache_clear()
    x = normal(np.random.default_rng(0), (2, 32, 8), np.dtype(np.float32))

    def work(comm):
        sizes = []
        gather = comm.allgather
        comm.allgather = lambda obj: sizes.append(obj) or gather(obj)
        found = [distributed.attention(x, x, x, comm=comm, is_causal=True) for _ in range(3)]
        counts = [len(sizes)]
        shorter = x[:, : 32 - 16 * comm.rank]  # of which rank 0 thinks that it is the call before
        found.append(distributed.attention(shorter, shorter, shorter, comm=comm, is_causal=True))
        counts.append(len(sizes))
        with pytest.raises(DistributedError, match="scale differs"):
            distributed.attention(x, x, x, comm=comm, is_causal=True, scale=None if comm.rank else 0.5)
        return found, counts

    for rank, (found, counts) in enumerate(spawn(work, ranks=2)):
        assert counts == [4, 6]  # two of the first call, one of each that is the same, two of the shorter
        for o in found[1:3]:
            np.testing.assert_array_equal(o, found[0])
        both = np.concatenate([x, x[:, :16]], 1)
        whole = cuattn.attention(both, both, both, is_causal=True)
        np.testing.assert_allclose(found[3], whole[:, 32:] if rank else whole[:, :32], atol=1e-5)
    assert len(checked) == 4
