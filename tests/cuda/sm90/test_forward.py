"""What Hopper's launches are made of, without a GPU: decisions, arguments, views for the copy engine."""

import pytest

from cuattn import masks
from cuattn.cuda import families
from cuattn.cuda.sm80 import forward
from cuattn.cuda.sm90 import forward as hopper
from cuattn.errors import UnsupportedError
from cuattn.problem import Operands
from tests.cuda.recording import TICKET, array
from tests.cuda.recording import device as device
from tests.cuda.sm90.test_forward_plan import CAUSAL, problem

pytestmark = pytest.mark.usefixtures("device")


def operands(p, mask=None, **options):
    q = array((*p.batch, p.heads, p.n_queries, p.head_dim), **options)
    k = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim), **options)
    v = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim_v), **options)
    return Operands(q, k, v, mask=mask)


def launched(device, p, taken, **more):
    """Return the one launch of a problem's record."""
    assert hopper.reason_against(p, taken) is None
    addresses = {"q": 1, "k": 2, "v": 3}
    *_, last = device.run(hopper.record(p, taken), addresses, forward.INPUTS, taken.mask, **more)[0]
    return last


def shapes(device, p, taken):
    """Return shape, strides and rows of a box of the maps of q, k, v, o."""
    return [described[2:] for described in launched(device, p, taken).maps]


def test_argument(device):
    p = problem(kv_heads=4, n_queries=1000, band=CAUSAL)
    found = launched(device, p, operands(p))
    made = found.argument
    _, places = device.run(hopper.record(p, operands(p)), {}, forward.INPUTS)
    assert [made[name]["data"] for name in "qkvolm"] == [1, 2, 3, *places[:3]] and made["counters"] == TICKET
    assert list(made["k"]["batch"]) == [0, 0, 0, 4 * 4096 * 128] and made["k"]["head"] == 4096 * 128
    assert list(made["o"]["batch"]) == [0, 0, 0, 16 * 1000 * 128] and made["o"]["row"] == 128
    assert (made["l"]["head"], made["m"]["row"]) == (1000, 1)
    assert (made["batch"], made["heads"], made["group"], made["row_tiles"], made["key_tiles"]) == (2, 16, 4, 8, 32)
    assert (made["band_left"], made["band_right"], made["band_offset"]) == (2**30, 0, 0)
    assert found.grid == (132,) and found.block == (384,)
    assert (found.path, found.kernel) == ("sm90/fwd.cu", "attention_forward")


def test_views(device):
    p = problem()
    q, k, _, o = shapes(device, p, operands(p, swap=True))
    assert q == ((2, 16, 4096, 128), (4096 * 16 * 256, 256, 16 * 256), 128)
    assert k == q
    assert o == ((2, 16, 4096, 128), (16 * 4096 * 256, 4096 * 256, 256), 64)


def test_broadcast_axes_have_one_element(device):
    p = problem()
    found = launched(device, p, operands(p, broadcast=(0, 1)))
    assert found.maps[0][2] == (1, 1, 4096, 128)
    assert found.argument["q"]["head"] == 0 and not found.argument["q"]["batch"].any()


def test_batch_axes_merge(device):
    p = problem(batch=(2, 3))
    assert shapes(device, p, operands(p))[1][0] == (6, 16, 4096, 128)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"address": 4098}, "address"), ({"broadcast": (2,)}, "one row")],
)
def test_unfit_arrays(options, words):
    p = problem()
    assert words in hopper.reason_against(p, operands(p, **options))


def test_unfit_stride():
    p = problem(100, 96)
    assert "200 bytes" in hopper.reason_against(p, operands(p))


def test_a_graph_counts_its_tiles_in_memory_of_its_results(device):
    p = problem()
    ticket = launched(device, p, operands(p), capturing=True).argument["counters"]
    cleared = device.done[0]
    assert (cleared.address, cleared.size) == (ticket, 4) and ticket + 4 <= device.end


def test_column_mask_for_all_heads(device):
    mask = masks.causal(4096)
    p = problem(mask="column")
    made = launched(device, p, operands(p, mask), capturing=True).argument
    assert made["table"]["keys_padded"] == 4096 and not made["table"]["batch"].any()
    assert made["table"]["cols"] < made["table"]["bounds"] < made["table"]["order"] < device.end


def test_a_mask_that_is_a_band_is_taken_as_one(device):
    mask = masks.causal(4096)
    p = problem(mask="column")
    done = families._choose(p, operands(p, mask))
    assert (done.kernels, done.problem, done.operands.mask) == (hopper, problem(band=CAUSAL), None)
    assert any("the mask is a band" in note for note in families.plan(p, operands(p, mask)).notes)
    documents = masks.causal_document([96, 4000])
    assert families._choose(p, operands(p, documents)).problem is p
    assert not any("band" in note for note in families.plan(p, operands(p, documents)).notes)
    portable = problem(mask="column", kernel="sm80")  # must give the bits that a boolean mask gives
    assert families._choose(portable, operands(portable, mask)).problem is portable


def test_choice():
    few = problem(batch=(1,), n_queries=1)
    assert "query rows" in families._choose(few, operands(few)).against
    grouped = problem(batch=(16,), heads=32, kv_heads=8, n_queries=1, n_keys=8192)
    assert "fill its tiles" in families._choose(grouped, operands(grouped)).against
    few = problem(batch=(1,), n_queries=1, kernel="sm90")
    assert families._choose(few, operands(few))[::3] == (hopper, None)
    wide = problem(264, kernel="sm90")
    with pytest.raises(UnsupportedError, match="'sm90', but it takes head dimensions up to 256"):
        families._choose(wide, operands(wide))
    assert families._choose(problem(kernel="sm80"), None)[::3] == (forward, "kernel is 'sm80'")
