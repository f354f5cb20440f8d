"""What Hopper's backward launches, without a GPU."""

import pytest

from cuattn import masks
from cuattn.cuda import families
from cuattn.cuda.sm80 import backward
from cuattn.cuda.sm90 import backward as hopper_backward
from cuattn.errors import UnsupportedError
from cuattn.problem import Operands
from tests.cuda.recording import array
from tests.cuda.recording import device as device
from tests.cuda.sm90.test_backward_plan import problem
from tests.cuda.sm90.test_forward_plan import CAUSAL

pytestmark = pytest.mark.usefixtures("device")


def operands(p, mask=None, **options):
    q = array((*p.batch, p.heads, p.n_queries, p.head_dim), **options)
    k = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim), **options)
    v = array((*p.batch, p.kv_heads, p.n_keys, p.head_dim_v), **options)
    do = array((*p.batch, p.heads, p.n_queries, p.head_dim_v), **options)
    stat = array((*p.batch, p.heads, p.n_queries), p.stat_dtype)
    return Operands(q, k, v, mask=mask, do=do, o=array(p.o_shape), l=stat, m=stat)


def launched(device, p, taken, **more):
    assert hopper_backward.reason_against(p, taken) is None
    return device.run(hopper_backward.record(p, taken), {"q": 1, "k": 2, "v": 3}, backward.INPUTS, taken.mask, **more)[
        0
    ]


def test_one_kernel_and_its_neighbours(device):
    p = problem(kv_heads=4, n_queries=1000, band=CAUSAL)
    preprocess, keys, convert = launched(device, p, operands(p))
    assert (keys.path, keys.grid, keys.block) == ("sm90/bwd.cu", (132,), (384,))
    assert preprocess.grid == (8 * 16 * 2,) and convert.grid == (16 * 16 * 2,)
    made = keys.argument
    assert (made["row_tiles"], made["key_tiles"], made["section"]) == (16, 32, 8)
    assert list(made["dk"]["batch"]) == [0, 0, 0, 4 * 4096 * 128] and made["dq"]["head"] == 1000 * 128
    assert made["dq_acc"] == preprocess.argument["dq_acc"] == convert.argument["dq_acc"] != 0
    assert made["ticket"] and not made["turns"]


def test_views(device):
    p = problem(kv_heads=4, n_queries=1000)
    _, keys, _ = launched(device, p, operands(p, swap=True))
    q, k, _, do, dk, _ = (described[2:] for described in keys.maps)
    assert q == do == ((2, 16, 1000, 128), (1000 * 16 * 256, 256, 16 * 256), 64)
    assert k == ((2, 4, 4096, 128), (4096 * 4 * 256, 256, 4 * 256), 128)
    assert dk == ((2, 4, 4096, 128), (4 * 4096 * 256, 4096 * 256, 256), 64)


def test_wide_heads_take_two_kernels_with_tables_of_their_own(device):
    p = problem(256, mask="column")
    done = launched(device, p, operands(p, masks.causal(4096)), capturing=True)
    preprocess, keys, rows = [each for each in done if "mask" not in getattr(each, "path", "mask")]
    assert not preprocess.constants["atomic_dq"] and not keys.argument["dq_acc"]
    assert (rows.path, rows.constants["v_stages"]) == ("sm90/bwd_rows.cu", 2)
    assert keys.argument["table"]["bounds"] != rows.argument["table"]["bounds"]


def test_turns(device):
    p = problem(deterministic=True)
    _, keys, _ = launched(device, p, operands(p))
    assert keys.constants["deterministic"] and keys.argument["turns"]


def test_broadcast_queries_share_an_accumulator(device):
    p = problem()
    taken = operands(p)._replace(q=array((1, 16, 4096, 128)))
    _, keys, convert = launched(device, p, taken)
    assert convert.grid == (64 * 16,) and not keys.argument["dq"]["batch"].any()
    assert "q is a sum" in hopper_backward.reason_against(problem(256), taken)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"k": array((1, 16, 4096, 128))}, "gradient of k is a sum"),
        ({"do": array((2, 16, 4096, 128), address=4098)}, "cannot read do"),
    ],
)
def test_unfit_arrays(changes, words):
    p = problem()
    assert words in hopper_backward.reason_against(p, operands(p)._replace(**changes))


def test_choice():
    p = problem()
    assert families._choose(p, operands(p))[::3] == (hopper_backward, None)
    assert families._choose(p, Operands(*operands(p)[:3]))[::3] == (
        hopper_backward,
        None,
    )  # planned
    assert families._choose(problem(kernel="sm80"), None)[::3] == (backward, "kernel is 'sm80'")
    short = problem(n_queries=100, n_keys=100)
    assert "fewer than its tiles" in families._choose(short, operands(short)).against
    short = problem(n_queries=100, n_keys=100, kernel="sm90")
    assert families._choose(short, operands(short))[::3] == (hopper_backward, None)
    wide = problem(264, kernel="sm90")
    with pytest.raises(UnsupportedError, match="'sm90', but it takes head dimensions up to 256"):
        families._choose(wide, operands(wide))
