"""What Hopper's launches are made of, without a GPU: decisions, arguments, views for the copy engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from cuattn import masks
from cuattn.cuda import choice, hopper, launch
from cuattn.cuda.params import PARAMS
from cuattn.errors import UnsupportedError
from cuattn.problem import Operands
from tests.cuda.test_hopper_plan import BF16, CAUSAL, H200, problem


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(launch, "card", lambda device: H200)
    monkeypatch.setattr(launch, "function", lambda *arguments: arguments)
    monkeypatch.setattr(hopper, "_records", {})


def array(shape, address=4096, swap=False, broadcast=()):
    """Return what a launch looks at of a CuPy array; `swap`: heads inside rows; `broadcast`: axes of stride 0."""
    order = [*range(len(shape) - 3), -2, -3, -1] if swap else range(len(shape))
    strides, step = [0] * len(shape), 2
    for axis in reversed(list(order)):
        strides[axis], step = step, step * shape[axis]
    strides = tuple(0 if axis in broadcast else stride for axis, stride in enumerate(strides))
    data, device = SimpleNamespace(ptr=address), SimpleNamespace(id=0)
    return SimpleNamespace(shape=tuple(shape), strides=strides, ndim=len(shape), dtype=BF16, data=data, device=device)


def operands(p, mask=None, **options):
    q = array((*p.batch, p.heads, p.n_queries, p.head_dim), **options)
    k = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim), **options)
    v = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim_v), **options)
    return Operands(q, k, v, mask=mask)


def argument(record, pointers):
    return np.frombuffer(record.struct.fill(pointers).obj, PARAMS)[0]


def test_argument():
    p = problem(kv_heads=4, n_queries=1000, band=CAUSAL)
    record = hopper.find(p, operands(p))
    made = argument(record, range(1, 8))
    assert [made[name]["data"] for name in "qkvolm"] == [1, 2, 3, 4, 5, 6] and made["counters"] == 7
    assert list(made["k"]["batch"]) == [0, 0, 0, 4 * 4096 * 128] and made["k"]["head"] == 4096 * 128
    assert list(made["o"]["batch"]) == [0, 0, 0, 16 * 1000 * 128] and made["o"]["row"] == 128
    assert (made["l"]["head"], made["m"]["row"]) == (1000, 1)
    assert (made["batch"], made["heads"], made["group"], made["row_tiles"], made["key_tiles"]) == (2, 16, 4, 8, 32)
    assert (made["band_left"], made["band_right"], made["band_offset"]) == (2**30, 0, 0)
    assert record.grid == (132,) and record.block == (384,)
    assert record.function[1:3] == ("sm90/fwd.cu", "attention_forward") and record.function[-1] == "sm_90a"


def test_views():
    p = problem()
    q, k, _, o = hopper.find(p, operands(p, swap=True)).views
    assert q == ((2, 16, 4096, 128), (4096 * 16 * 256, 256, 16 * 256), 128)
    assert k == q
    assert o == ((2, 16, 4096, 128), (16 * 4096 * 256, 4096 * 256, 256), 64)


def test_broadcast_axes_have_one_element():
    p = problem()
    record = hopper.find(p, operands(p, broadcast=(0, 1)))
    assert record.views[0].shape == (1, 1, 4096, 128)
    made = argument(record, range(7))
    assert made["q"]["head"] == 0 and not made["q"]["batch"].any()


def test_batch_axes_merge():
    p = problem(batch=(2, 3))
    assert hopper.find(p, operands(p)).views[1].shape == (6, 16, 4096, 128)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"address": 4098}, "address"), ({"broadcast": (2,)}, "one row")],
)
def test_unfit_arrays(options, words):
    p = problem()
    assert words in hopper.find(p, operands(p, **options))


def test_unfit_stride():
    p = problem(100, 96)
    assert "200 bytes" in hopper.find(p, operands(p))


def test_column_mask_per_batch():
    mask = masks.causal(4096)
    p = problem(mask="column")
    made = argument(hopper.find(p, operands(p, mask)), range(12))
    assert made["table"]["cols"] == 8 and made["table"]["keys_padded"] == 4096 and not made["table"]["batch"].any()


def test_choice():
    few = problem(batch=(1,), n_queries=1)
    assert "query rows" in choice._hopper(few, operands(few))
    few = problem(batch=(1,), n_queries=1, kernel="sm90")
    assert not isinstance(choice._hopper(few, operands(few)), str)
    wide = problem(264, kernel="sm90")
    with pytest.raises(UnsupportedError, match="'sm90', but it takes head dimensions up to 256"):
        choice._hopper(wide, operands(wide))
    assert choice._hopper(problem(kernel="sm80"), None) == "kernel is 'sm80'"
