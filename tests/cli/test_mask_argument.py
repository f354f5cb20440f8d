"""Masks by name on the command line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cuattn
from cuattn import masks
from cuattn.cli.mask_argument import build_mask
from cuattn.errors import ArgumentError


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("full", [12, 16]),
        ("causal", [12, 16]),
        ("causal top_left", [12, 16, "top_left"]),
        ("sliding_window 3", [12, 3]),
        ("global_sliding_window 2 1", [12, 2, 1]),
        ("prefix_lm_causal 5", [12, 5]),
        ("qk_sparse [(3,2),(8,1)]", [12, [(3, 2), (8, 1)]]),
        ("random_eviction 4 7", [12, 4, 7]),
        ("document 5 7", [[5, 7]]),
        ("document [5,7]", [[5, 7]]),
        ("document 12", [[12]]),
        ("document []", [[]]),
        ("causal_blockwise [5,7]", [[5, 7]]),
        ("hash_sparse 5 7", [[5, 7]]),
        ("share_question (4,[3,5])", [[(4, [3, 5])]]),
        ("share_question [(4,[3]),(2,[3])]", [[(4, [3]), (2, [3])]]),
        ("prefix_lm_document (2,5) (3,7)", [[(2, 5), (3, 7)]]),
        ("eviction 2 2 3", [[2, 2, 3]]),
    ],
)
def test_masks_are_named_with_literal_arguments(words, arguments):
    words = words.split()
    assert build_mask(words, 12, 16) == getattr(masks, words[0])(*arguments)


def test_every_constructor_can_be_named():
    with pytest.raises(ArgumentError) as caught:
        build_mask(["spiral"], 4, 4)
    assert all(name in str(caught.value) for name in masks.CONSTRUCTORS)
    assert "ColumnMask" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("document", "expected --mask document LENGTHS"),
        ("sliding_window", "expected --mask sliding_window WINDOW (lengths come from the data)"),
        ("sliding_window 12 3", "expected --mask sliding_window WINDOW"),
        ("sliding_window wide", "--mask sliding_window"),
        ("document [1,2", "not a number or a list"),
        ("document __import__('os').getcwd()", "not a number or a list"),
        ("document {1:2}", "not a number or a list"),
        ("document 'a'", "not a number or a list"),
        ("document -3", "--mask document: "),
        ("document " + "(" * 500 + ")" * 500, "not a number or a list"),
        ("prefix_lm_causal 99", "--mask prefix_lm_causal: "),
    ],
)
def test_bad_mask_arguments_are_explained(words, complaint):
    with pytest.raises(ArgumentError, match=r"^--mask ") as caught:
        build_mask(words.split(), 12, 12)
    assert complaint in str(caught.value)


@given(st.lists(st.text(max_size=8), min_size=1, max_size=3))
def test_any_words_give_a_mask_or_an_argument_error(words):
    for name in (words[0], "sliding_window", "document", "share_question", "random_eviction"):
        try:
            mask = build_mask([name, *words[1:]], 8, 8)
        except ArgumentError:
            continue
        assert isinstance(mask, cuattn.ColumnMask)
