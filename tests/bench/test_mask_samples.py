"""The masks' data: reproducible, within the paper's ranges, and what every runner makes of it agrees."""

import numpy as np
import pytest

from bench.cases import Case
from bench.mask_samples import KINDS, column_mask, documents_per_sequence, samples

PAPER_RHO = {  # tables 4 and 5 of the FlashMask paper: 8K, 32K
    "full": (0.00, 0.00),
    "causal": (0.49, 0.50),
    "sliding_window": (0.92, 0.94),
    "causal_document": (0.86, 0.95),
    "document": (0.74, 0.92),
    "share_question": (0.91, 0.97),
    "global_sliding_window": (0.84, 0.87),
    "causal_blockwise": (0.67, 0.87),
    "prefix_lm_document": (0.86, 0.95),
    "prefix_lm_causal": (0.37, 0.37),
    "qk_sparse": (0.52, 0.52),
    "random_eviction": (0.49, 0.50),
}


@pytest.mark.parametrize("kind", KINDS)
def test_sparsity_is_close_to_the_papers(kind):
    for n, batch, expected in zip((8192, 32768), (16, 4), PAPER_RHO[kind], strict=True):
        assert column_mask(samples(kind, n, batch)).block_sparsity(128, 128) == pytest.approx(expected, abs=0.06)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_the_same_every_time_and_do_not_depend_on_their_number(kind):
    assert samples(kind, 1024, 3) == samples(kind, 1024, 3) == samples(kind, 1024, 5)[:3]


@pytest.mark.parametrize("kind", ["causal_document", "document", "share_question", "causal_blockwise"])
@pytest.mark.parametrize("n", [8192, 32768, 131072])
def test_documents_fill_the_sequence_in_the_papers_numbers(kind, n):
    fewest, most = documents_per_sequence(n)
    drawn = samples(kind, n, 8)
    assert len({sample.lengths for sample in drawn}) > 1
    for sample in drawn:
        assert sum(sample.lengths) == n
        assert fewest <= len(sample.lengths) <= most
        assert min(sample.lengths) > 0


def test_questions_have_two_to_six_answers_of_ten_to_twenty_percent():
    for sample in samples("share_question", 32768, 16):
        for length, (question, answers) in zip(sample.lengths, *sample.arguments, strict=True):
            assert question + sum(answers) == length
            assert 2 <= len(answers) <= 6
            assert all(0.09 * length <= answer <= 0.2 * length for answer in answers)
            assert question >= 0.09 * length


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'diagonal'"):
        samples("diagonal", 128, 1)


def test_equal_samples_share_one_mask():
    assert column_mask(samples("sliding_window", 256, 4)).leading == ()
    assert column_mask(samples("document", 8192, 4)).leading == (4, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_flex_sees_what_cuattn_sees(kind):
    torch = pytest.importorskip("torch")
    from bench.inputs import make
    from bench.peers.flex import block_mask, mask_function

    n, batch = 640, 3
    case = Case("t", "forward", batch, 1, 1, n, n, 8, dtype="float32", mask=kind)
    inputs = make(case, "cpu")
    exact = np.stack([sample.column_mask().dense() for sample in inputs.samples])
    visible = mask_function(case, inputs.samples, torch.from_numpy)
    if visible is None:
        assert exact.all()
        return
    b, i, j = torch.arange(batch)[:, None, None], torch.arange(n)[:, None], torch.arange(n)
    assert np.array_equal(visible(b, 0, i, j).expand(batch, n, n).numpy(), exact)
    tables = block_mask(case, visible, inputs)
    some = exact.reshape(batch, n // 128, 128, n // 128, 128).any((2, 4))
    assert np.array_equal(tables.to_dense().numpy()[:, 0] > 0, some[: tables.shape[0]])
    every = exact.reshape(batch, n // 128, 128, n // 128, 128).all((2, 4))
    assert np.array_equal(tables.full_kv_num_blocks.numpy()[:, 0], every[: tables.shape[0]].sum(-1))


def test_packed_documents_start_where_the_mask_says():
    pytest.importorskip("torch")
    from bench.inputs import make
    from bench.peers.flash import document_starts

    inputs = make(Case("t", "forward", 2, 1, 1, 512, 512, 8, mask="document"), "cpu")
    starts = document_starts(inputs)
    assert starts[0] == 0
    assert starts[-1] == 1024
    assert 512 in starts
    dense = inputs.samples[0].column_mask().dense()
    changes = np.flatnonzero((dense[1:] != dense[:-1]).any(1)) + 1
    assert [start for start in starts if 0 < start < 512] == changes.tolist()
