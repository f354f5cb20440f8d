"""What is needed of whom, and what it costs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import masks
from cuattn.distributed import Layout, plan, spawn
from cuattn.distributed.model import Rates, Size, cost, least, options_of
from cuattn.distributed.work import Work
from tests.distributed.layouts import layouts

H200 = Rates(6e14, 4e11, 5e10, 4e12, 2e-5, 8, overlapped=True)
SIZE = Size(False, 1, 32, 32, 128, 128, 2, 4)


@given(data=st.data(), n=st.integers(1, 200), m=st.integers(1, 200), size=st.integers(1, 4), seed=st.integers(0, 9))
def test_what_is_seen_is_needed(data, n, m, size, seed):
    rows, keys = data.draw(layouts(n, size)), data.draw(layouts(m, size))
    seen = np.random.default_rng(seed).random((n, m)) < 0.02
    work = Work(rows, keys, masks.BooleanMask(seen).bind(n, m))
    index = {axis: [np.r_[(*(slice(*run) for run in runs), slice(0))].astype(int) for runs in layout.runs]
             for axis, layout in (("row", rows), ("key", keys))}  # fmt: skip
    for rank in range(size):
        for source in range(size):
            part = seen[np.ix_(index["row"][rank], index["key"][source])]
            for axis, found in (("key", work.needed("key", rank, source)), ("row", work.needed("row", source, rank))):
                taken = {i for start, stop in found for i in range(start, stop)}
                own = index[axis][source if axis == "key" else rank]
                used = set(own[part.any(axis=0 if axis == "key" else 1)].tolist())
                assert used <= taken <= set(own.tolist())
            assert len({i for start, stop in work.needed("key", rank, source) for i in range(start, stop)}) == round(
                work.needs["key"][rank, source]
            )
    assert work.elements.sum() >= seen.sum() > -1


def modelled(algorithm, mask, n, ranks, rates=H200, layout=None):
    layout = layout or Layout.contiguous(n, ranks, unit=128)
    return cost(algorithm, Work(layout, layout, mask), SIZE, rates, 1)


def test_costs_are_those_of_the_arithmetic():
    n, ranks = 1 << 17, 8
    ring = modelled("ring", None, n, ranks)
    alone = n * n * SIZE.flops / H200.flops
    assert ring.received == (ranks - 1) / ranks * n * 32 * 256 * 2
    assert ring.balance == 1 and ring.steps == ranks
    assert 1 <= ring.seconds / (alone / ranks) < 1.09
    causal = masks.causal(n)
    assert modelled("needed", causal, n, ranks).balance == pytest.approx(1.87, abs=0.02)
    zigzag = Layout.zigzag(n, ranks)
    half = modelled("needed", causal, n, ranks, layout=zigzag)
    assert half.balance == pytest.approx(1, abs=0.01)
    assert half.received == ring.received  # of the rank that holds the last rows
    window = modelled("needed", masks.sliding_window(n, 4096), n, ranks)
    assert window.received / ring.received < 0.05


def test_slow_links_cost_time():
    n = 1 << 14
    fast, slow = (modelled("ring", None, n, 16, Rates(6e14, 4e11, link, 4e12, 2e-5, 8, True)) for link in (4e11, 1e9))
    assert slow.seconds > 3 * fast.seconds and slow.waiting > fast.waiting
    alike = modelled("ring", None, n, 8, Rates(6e14, 4e11, 1e9, 4e12, 2e-5, 8, True))
    assert alike.waiting < slow.waiting


def test_the_choice():
    n = 1 << 14

    def choice(rows, keys, heads=1, mask=None, backward=False, kv_heads=32):
        size = Size(backward, 1, 32, kv_heads, 128, 128, 2, 4)
        return least(options_of(rows, keys, mask, size, H200, heads))

    even = Layout.contiguous(n, 4)
    assert choice(even, even) == "needed"
    queries = Layout.from_runs([[(0, 4)], [(4, 8)], [(8, 12)], [(12, 16)]])
    assert choice(queries, even) == "combine"  # decoding
    assert choice(even, even, heads=4, mask=masks.causal(n)) == "heads"  # nothing else is balanced


def test_plans_print_and_agree():
    x = np.zeros((4, 256, 16), np.float32)

    def work(comm):
        return [
            plan(x, x, x, comm=comm, is_causal=True, direction=way, dropout_p=0.5) for way in ("forward", "backward")
        ]

    first, second = spawn(work, ranks=2)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.algorithm, ours.bytes, ours.steps, ours.costs) == (
            theirs.algorithm,
            theirs.bytes,
            theirs.steps,
            theirs.costs,
        )
        text = str(ours)
        for name in ("algorithm", "received", "balance", "overlap", "local kernel", "least by the model"):
            assert name in text
    assert [p.direction for p in first] == ["forward", "backward"]


def test_all_keys_at_once_where_memory_allows_and_heads_in_parts():
    n = 1 << 17

    def found(ranks, slices, backward=False, rates=H200, groups=32):
        layout, size = Layout.contiguous(n, ranks), Size(backward, 1, 32, groups, 128, 128, 2, 4)
        return options_of(layout, layout, None, size, rates, groups, slices)

    assert found(4, 32)["needed"][0].parts == 0  # three shards of keys are too many
    some, whole = (found(2, slices, backward=True)["heads"][0] for slices in (32, 1))
    assert some.parts == 4 and whole.parts == 1  # of which each but the first is exchanged meanwhile
    assert some.waiting < whole.waiting and some.received == whole.received
    assert found(2, 4, backward=True)["heads"][0].parts == 2  # a part has heads of each rank
    slow = Rates(6e14, 1e9, 1e9, 4e12, 2e-5, 8, overlapped=True)
    hidden = found(2, 1, rates=slow)
    assert hidden["needed"][0].parts == 0 and hidden["gather"][0].parts == 1
