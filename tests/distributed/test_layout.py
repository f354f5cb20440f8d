"""Layouts are partitions, and arrays survive them."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import masks
from cuattn.distributed import Layout, spawn
from cuattn.errors import ArgumentError, DtypeError, ShapeError
from tests.distributed.layouts import layouts


@given(n=st.integers(0, 300), size=st.integers(1, 5), unit=st.sampled_from((1, 16, 33)))
def test_every_kind_is_a_partition(n, size, unit):
    mask = masks.causal(n)
    made = [Layout.contiguous(n, size, unit=unit), Layout.zigzag(n, size, unit=unit)]
    made += [Layout.balanced(mask, size, unit=unit, equal_rows=equal) for equal in (False, True)]
    for layout in made:
        assert (layout.size, layout.n) == (size, n)
        if n:
            assert Layout.from_runs(layout.runs) == layout
        assert all(start % unit == 0 for rank in range(size) for start, _ in layout.rows(rank))
        assert pickle.loads(pickle.dumps(layout)) == layout and hash(layout) == hash(pickle.loads(pickle.dumps(layout)))
    spread = [len(rows) for rows in np.array_split(np.arange(-(-n // unit)), size)]
    assert made[0].lengths == tuple(np.diff(np.minimum(np.cumsum([0, *spread]) * unit, n)).tolist())
    units = [-(-length // unit) for length in made[3].lengths]
    assert max(units) - min(units) <= 1


def test_loads_are_balanced():
    """Zigzag for causality, cuts of equal cost for documents: the largest load over the mean."""

    def balance(layout, mask):
        loads = [1 - mask.restrict(rows=layout.rows(rank)).block_sparsity(16, 16) for rank in range(layout.size)]
        loads = np.array(loads) * layout.lengths
        return loads.max() / loads.mean()

    causal, documents = masks.causal(4096), masks.causal_document([500, 1000, 96, 2500])
    assert balance(Layout.contiguous(4096, 4), causal) > 1.6
    assert balance(Layout.zigzag(4096, 4), causal) < 1.01
    for mask in (causal, documents):
        assert balance(Layout.balanced(mask, 4, unit=16), mask) < 1.03
        assert balance(Layout.balanced(mask, 4, unit=16, equal_rows=True), mask) < 1.03


@given(data=st.data(), n=st.integers(0, 40), size=st.integers(1, 4), axis=st.sampled_from((0, 1, -1)))
def test_shards_make_the_whole(data, n, size, axis):
    layout = data.draw(layouts(n, size))
    x = np.moveaxis(np.arange(6 * n).reshape(n, 2, 3), 0, axis)
    wholes = spawn(lambda comm: layout.unshard(layout.shard(x, comm.rank, axis), comm, axis), ranks=size)
    for whole in wholes:
        np.testing.assert_array_equal(whole, x)


def test_shards_are_copies():
    x = np.zeros((4, 2))
    Layout.contiguous(4, 1).shard(x, 0)[...] = 1
    assert not x.any()


@pytest.mark.parametrize(
    "runs", [[[(0, 4)], [(3, 8)]], [[(0, 4)], [(5, 8)]], [[(1, 4)]], [], [[(0, "a")]], [[0, 4]], 3]
)
def test_what_is_no_partition_is_refused(runs):
    with pytest.raises(ArgumentError, match="runs is"):
        Layout.from_runs(runs)


def test_wrong_arguments_are_refused():
    with pytest.raises(ArgumentError, match="size is 0"):
        Layout.contiguous(8, 0)
    with pytest.raises(ArgumentError, match="unit is 0"):
        Layout.zigzag(8, 2, unit=0)
    with pytest.raises(DtypeError, match="mask is"):
        Layout.balanced(np.ones((4, 4), bool), 2)
    with pytest.raises(ShapeError, match="expected 8 along axis -2"):
        Layout.contiguous(8, 2).shard(np.zeros((4, 2)), 0)
