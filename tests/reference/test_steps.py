"""The counting memory, and what every algorithm refuses: M outside the theorems' range, and arrays of other shapes."""

import re

import numpy as np
import pytest

from cuattn import reference
from cuattn.errors import ArgumentError, ShapeError
from cuattn.reference import HBM, Counts
from tests.reference.cases import make_case

CASE = make_case(10, 4, 10)
FWD = reference.flash_forward(*CASE.qkv, CASE.M)
MASK = np.zeros((4, 10), int)
ALGORITHMS = {
    "standard_forward": reference.standard_forward,
    "standard_backward": lambda q, k, v, M: reference.standard_backward(CASE.do, q, k, v, np.ones((10, 10)), M),
    "flash_forward": reference.flash_forward,
    "flash_backward": lambda q, k, v, M: reference.flash_backward(CASE.do, q, k, v, FWD, M),
    "flashmask_forward": lambda q, k, v, M: reference.flashmask_forward(q, k, v, MASK, M),
    "swapped_forward": reference.swapped_forward,
    "rabe_staats_forward": reference.rabe_staats_forward,
}
algorithms = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


@algorithms
@pytest.mark.parametrize("M", [0, 3, 41, 1e9, 10.0, None, "all"])
def test_m_outside_the_range(algorithm, M):
    expected = "expected d <= M <= N d, here 4 <= M <= 40" if isinstance(M, int) else "expected a whole number"
    with pytest.raises(ArgumentError, match=f"M = {M!r}: {expected}"):
        algorithm(*CASE.qkv, M)


@algorithms
@pytest.mark.parametrize(("which", "shape"), [("K", (9, 4)), ("V", (10, 3)), ("Q", (10,)), ("Q", (0, 4))])
def test_shapes(algorithm, which, shape):
    arrays = [np.ones(shape if name == which else (10, 4)) for name in "QKV"]
    # A backward has dO before them; those that agree with each other then disagree with it.
    with pytest.raises(ShapeError, match=re.escape(f"{which} has shape {shape}")):
        algorithm(*arrays, 8)


def test_every_access_is_counted():
    hbm = HBM()
    hbm.place("Q", np.arange(12).reshape(6, 2))
    hbm.allocate((6, 2), "O", fill=0, output=True)
    hbm.allocate(6, "m", fill=-np.inf)
    assert hbm.counts == Counts(reads=0, writes=18, extra=6, sram=0)
    tile = hbm.load(slice(4, 6), "Q")
    hbm.store(slice(4, 6), O=tile * 2)
    hbm.store(slice(0, 3), m=1.0)
    assert hbm.counts == Counts(reads=4, writes=25, extra=6, sram=4)
    assert hbm.counts.total == 29
    assert hbm.take("O")[0][4:].tolist() == [[16, 18], [20, 22]]
    assert hbm.counts.total == 29


def test_tiles_are_copies_both_ways():
    source = np.ones((2, 2))
    hbm = HBM()
    hbm.place("Q", source)
    source[:] = 7
    tile = hbm.load(..., "Q")
    tile[:] = 5
    assert (hbm.load(..., "Q") == 1).all()
    hbm.store(..., Q=tile)
    tile[:] = 0
    assert (hbm.load(..., "Q") == 5).all()


def test_elements_and_rectangles():
    hbm = HBM(np.float32)
    hbm.place("M", np.eye(3), np.bool_)
    assert hbm.load((1, 1), "M")
    assert not hbm.load((0, 1), "M")
    assert hbm.load((slice(0, 2), slice(1, 3)), "M").dtype == np.bool_
    assert hbm.counts.reads == 6


def test_buffers_hold_the_largest_tile_of_each_array():
    hbm = HBM()
    hbm.place("K", np.ones((10, 3)))
    hbm.load(slice(0, 4), "K")
    hbm.load(slice(4, 10), "K")
    hbm.load(slice(0, 1), "K")
    hbm.on_chip("S", np.ones(5))
    assert hbm.counts.sram == 18 + 5
    hbm.end_kernel()
    hbm.load(slice(0, 2), "K")
    assert hbm.counts.sram == 23


def test_unknown_arrays_cannot_be_reached():
    with pytest.raises(KeyError):
        HBM().load(..., "Q")
