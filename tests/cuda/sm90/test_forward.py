"""What Hopper's launches are made of, without a GPU: decisions, arguments, views for the copy engine."""

import pytest

from cuattn import masks
from cuattn.cuda import families
from cuattn.cuda.sm80.forward import Forward as PortableForward
from cuattn.cuda.sm90.forward import Forward
from cuattn.errors import UnsupportedError
from cuattn.problem import Band, Origin, place_of
from tests.cuda.cases import BF16
from tests.cuda.recording import H200, TICKET, array, operands, sequence_of
from tests.cuda.recording import driver as driver
from tests.cuda.sm90.test_forward_plan import CAUSAL, problem

pytestmark = pytest.mark.usefixtures("driver")


def launched(driver, p, taken, masks=(), **more):
    """Return the one launch of a problem's sequence."""
    assert Forward(p, taken, masks).unsupported_reason() is None
    *_, last = driver.run(sequence_of(Forward(p, taken, masks)), {"q": 1, "k": 2, "v": 3}, masks, **more)[0]
    return last


def shapes(driver, p, taken):
    """Return shape, strides and rows of a box of the maps of q, k, v, o."""
    return [tuple(described) for described in launched(driver, p, taken).maps]


def test_argument(driver):
    p = problem(kv_heads=4, n_queries=1000, band=CAUSAL)
    found = launched(driver, p, operands(p))
    made = found.argument
    _, places = driver.run(sequence_of(Forward(p, operands(p), ())), {})
    assert [made[f"{name}.data"] for name in "qkvolm"] == [1, 2, 3, *places[:3]] and made["counters"] == TICKET
    assert list(made["k.batch"]) == [0, 0, 0, 4 * 4096 * 128] and made["k.head"] == 4096 * 128
    assert list(made["o.batch"]) == [0, 0, 0, 16 * 1000 * 128] and made["o.row"] == 128
    assert (made["l.head"], made["m.row"]) == (1000, 1)
    assert (made["batch"], made["heads"], made["group"], made["row_tiles"], made["key_tiles"]) == (2, 16, 4, 8, 32)
    assert (made["band_left"], made["band_right"]) == (2**30, 0)
    assert found.grid == (132,) and found.block == (384,)
    assert (found.path, found.kernel) == ("sm90/fwd.cu", "attention_forward")


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_multiprocessors_are_left_to_others(operation, driver):
    p = problem(operation=operation, sm_margin=12)
    made = families.launch_sequence(p, operands(p), ())
    (persistent,) = (kernel for kernel in made._kernels if kernel._found[1] in ("sm90/fwd.cu", "sm90/bwd.cu"))
    assert persistent._shape[0] == 120
    assert H200.without(200).multiprocessors == 1


def test_parts_of_keys(driver):
    p = problem(64, batch=(1,), heads=2, kv_heads=2, n_queries=8192, n_keys=16384)
    found = launched(driver, p, operands(p))
    made = found.argument
    assert (made["splits"], made["split_tiles"], found.constants["split"]) == (3, 43, True)
    assert made["l_part"] - made["o_part"] == 3 * 86 * 192 * 64 * 4 and found.grid == (132,)
    assert "parts" in Forward(p, operands(p), ()).prepare().notes[0]
    launched(driver, p, operands(p), capturing=True)
    assert driver.done[0].size == 4 * (1 + 3 * 86)


@pytest.mark.parametrize("n_queries", [1, 16, 520])
def test_heads_that_share_keys_are_packed(driver, n_queries):
    p = problem(kv_heads=4, n_queries=n_queries, n_keys=8192, kernel="sm90")
    rows = 4 * n_queries
    found = launched(driver, p, operands(p))
    q, _, _, o = found.maps
    assert q.shape == o.shape == (2, 4, rows, 128) and q.strides == o.strides == (16 * n_queries * 256, rows * 256, 256)
    made = found.argument
    assert (made["heads"], made["group"], made["n_queries"], made["o.head"], made["l.head"]) == (
        4,
        1,
        rows,
        rows * 128,
        rows,
    )
    assert any("4 query heads share" in note for note in Forward(p, operands(p), ()).prepare().notes)


@pytest.mark.parametrize(
    ("n_queries", "options", "changes", "heads"),
    [
        (1, {"swap": True}, {}, 4),
        (16, {"swap": True}, {}, 16),  # heads lie inside of rows
        (1, {"broadcast": (1,)}, {}, 16),
        (1024, {}, {}, 16),  # nothing is gained
        (16, {}, {"band": Band(None, 0, 8176)}, 16),
        (16, {}, {"kv_heads": 16}, 16),
    ],
)
def test_where_heads_are_packed(driver, n_queries, options, changes, heads):
    p = problem(**{"kv_heads": 4, "n_queries": n_queries, "n_keys": 8192, "kernel": "sm90", **changes})
    assert launched(driver, p, operands(p, **options)).argument["heads"] == heads


def test_views(driver):
    p = problem()
    q, k, _, o = shapes(driver, p, operands(p, swap=True))
    assert q == ((2, 16, 4096, 128), (4096 * 16 * 256, 256, 16 * 256), 128)
    assert k == q
    assert o == ((2, 16, 4096, 128), (16 * 4096 * 256, 4096 * 256, 256), 64)


def test_broadcast_axes_have_one_element(driver):
    p = problem()
    found = launched(driver, p, operands(p, broadcast=(0, 1)))
    assert found.maps[0].shape == (1, 1, 4096, 128)
    assert found.argument["q.head"] == 0 and not found.argument["q.batch"].any()


def test_batch_axes_merge(driver):
    p = problem(batch=(2, 3))
    assert shapes(driver, p, operands(p))[1][0] == (6, 16, 4096, 128)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"address": 4098}, "address"), ({"broadcast": (2,)}, "one row")],
)
def test_unfit_arrays(options, words):
    p = problem()
    assert words in Forward(p, operands(p, **options), ()).unsupported_reason()


def test_unfit_stride():
    p = problem(100, 96)
    assert "200 bytes" in Forward(p, operands(p), ()).unsupported_reason()


@pytest.mark.parametrize(
    ("shape", "path", "maps", "section"),
    [
        ((1, 16, 4096, 4096), "sm90/fwd_bias.cu", 5, 2),  # both batches of a head share what is read of it
        ((2, 1, 4096, 4096), "sm90/fwd_bias.cu", 5, 1),
        ((2, 1, 1, 4096), "sm90/fwd.cu", 4, 1),
        ((2, 16, 4096, 1), "sm90/fwd.cu", 4, 1),
    ],
)
def test_a_bias_comes_in_tiles_or_with_the_keys(driver, shape, path, maps, section):
    p = problem(bias=BF16)
    found = launched(driver, p, {**operands(p), "bias": array(shape)})
    assert (found.path, len(found.maps), found.argument["section"]) == (path, maps, section)
    assert found.maps[-1].shape == (shape if maps == 5 else (2, 16, 4096, 128))
    assert bool(found.argument["bias.head"]) == (shape[1] > 1)


def test_two_blocks_share_a_multiprocessor_where_heads_are_narrow(driver):
    p = problem(32, bias=BF16, n_queries=256, n_keys=256, batch=(256,))
    found = launched(driver, p, {**operands(p), "bias": array((1, 16, 256, 256))})
    assert found.grid == (264,) and 2 * (found.shared_bytes + 1024) <= H200.shared_bytes + 1024


def test_a_graph_counts_its_tiles_in_memory_of_its_results(driver):
    p = problem()
    ticket = launched(driver, p, operands(p), capturing=True).argument["counters"]
    cleared = driver.done[0]
    assert (cleared.address, cleared.size) == (ticket, 4) and ticket + 4 <= driver.end


def test_column_mask_for_all_heads(driver):
    p = problem(masks=("column",))
    made = launched(driver, p, operands(p), (masks.causal(4096),), capturing=True).argument
    assert made["table.keys_padded"] == 4096 and not made["table.batch"].any()
    assert made["table.cols"] < made["table.bounds"] < made["table.order"] < driver.end


def test_a_mask_that_is_a_band_is_taken_as_one(driver):
    mask = masks.causal(4096)
    p = problem(masks=("column",))
    taken = operands(p)
    call, *_ = families._choose(p, taken, (mask,))
    assert (type(call), call.problem, call._given_masks) == (Forward, problem(band=CAUSAL, twin=True), ())
    assert any("the mask is a band" in note for note in families.plan(p, taken, (mask,)).notes)
    documents = (masks.causal_document([96, 4000]),)
    assert families._choose(p, taken, documents)[0].problem is p
    assert not any("band" in note for note in families.plan(p, taken, documents).notes)
    portable = problem(masks=("column",), kernel="sm80")  # must give the bits that a boolean mask gives
    assert families._choose(portable, taken, (mask,))[0].problem is portable


def test_a_band_that_is_a_mask_stays_where_it_is(driver):
    """A part's place moves the band of the whole, but no mask, which is the part's own."""
    for p, given, right in ((problem(masks=("column",)), (masks.causal(4096),), 0), (problem(band=CAUSAL), (), 512)):
        made = families.launch_sequence(p, operands(p), given)
        launches, _ = driver.run(made, {}, place=place_of(p, Origin(row=512)))
        assert launches[-1].argument["band_right"] == right


def test_choice():
    few = problem(batch=(1,), n_queries=1)
    assert "query rows" in families._choose(few, operands(few), ())[-1][0]
    grouped = problem(batch=(16,), heads=32, kv_heads=8, n_queries=1, n_keys=8192)
    assert "fill its tiles" in families._choose(grouped, operands(grouped), ())[-1][0]
    few = problem(batch=(1,), n_queries=1, kernel="sm90")
    assert type(families._choose(few, operands(few), ())[0]) is Forward
    wide = problem(264, kernel="sm90")
    with pytest.raises(UnsupportedError, match="'sm90', but it takes head dimensions up to 256"):
        families._choose(wide, operands(wide), ())
    call, _, notes = families._choose(problem(kernel="sm80"), operands(problem()), ())
    assert type(call) is PortableForward and notes == ["not the sm90 kernel: kernel is 'sm80'"]
