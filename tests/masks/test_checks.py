"""Arguments that nobody would guess: errors of this package, which name them in a few words."""

import numpy as np
import pytest

from cuattn import masks
from cuattn.errors import CuattnError, DtypeError, MaskError
from cuattn.masks import AllOf, BlockMask, ColumnMask

LONG = [
    "x" * 1_000_000,
    list(range(100_000)),
    np.zeros((300, 300)),
    10**4000,
    {"a": list(range(10_000))},
    (1,) * 100_000,
]


@pytest.mark.parametrize("value", LONG, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: ColumnMask.stack(value),
        lambda value: ColumnMask.stack([[masks.causal(4)], value]),
        lambda value: AllOf(value),
        lambda value: masks.share_question([value]),
        lambda value: masks.share_question([(value, [1])]),
        lambda value: masks.causal(4, align=value),
        lambda value: masks.causal(value),
        lambda value: masks.random_eviction(4, 1, str(value)[:100_000]),
        lambda value: masks.document([value]),
        lambda value: ColumnMask.from_startend_row_indices([[2], [2]], value, 2),
        lambda value: BlockMask([[True]], value, 4),
        lambda value: masks.causal(4).tile_states(4, value),
        lambda value: masks.causal(4).restrict(value),
        lambda value: masks.causal(4).to_device(value),
    ],
)
def test_messages_are_short(call, value):
    with pytest.raises(CuattnError) as caught:
        call(value)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [np.array(1), np.matrix([[1, 2], [3, 4]]), np.float32(2), np.zeros(3), 5, "masks", b"masks", [[[]]], [None]],
)
@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_what_is_no_sequence_of_masks(value):
    with pytest.raises((DtypeError, MaskError), match="masks"):
        ColumnMask.stack(value)


def test_an_array_of_masks_is_a_sequence():
    both = np.empty((1, 2), object)
    both[0, 0], both[0, 1] = masks.causal(3), masks.full(3)
    assert ColumnMask.stack(both).leading == (1, 2)


@pytest.mark.parametrize(
    "mask",
    [
        masks.document([]), masks.causal_document([0, 0]), masks.share_question([]), masks.share_question([(0, [])]),
        masks.share_question([(0, [0, 0]), (0, [])]), masks.causal_blockwise([]), masks.causal_blockwise([0, 0]),
        masks.prefix_lm_document([]), masks.prefix_lm_document([(0, 0)]), masks.qk_sparse(0, []),
        masks.qk_sparse(0, [(0, 0)]), masks.hash_sparse([]), masks.eviction([]), masks.random_eviction(0, 0),
        masks.full(0), masks.causal(0), masks.sliding_window(0, 0), masks.global_sliding_window(0, 0, 0),
        masks.prefix_lm_causal(0, 0),
    ],
)  # fmt: skip
def test_empty_lists_and_zero_lengths(mask):
    assert (mask.n_queries, mask.n_keys) == (0, 0)
    assert mask.dense().shape == (0, 0) and mask.tile_states(4, 4).shape == (0, 0) and mask.block_sparsity() == 0.0
