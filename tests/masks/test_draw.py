"""Pictures of masks."""

import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn import masks
from cuattn.errors import UnsupportedError
from cuattn.masks import BlockMask, BooleanMask, ColumnMask
from tests.masks.strategies import block_masks, boolean_masks, column_masks

MASKS = {
    "column": masks.causal_document([100, 200]),
    "stack": ColumnMask.stack([masks.causal(70), masks.full(70)]),
    "block": BlockMask(np.eye(3, dtype=bool), 64, 64),
    "boolean": BooleanMask(np.tri(30, 40, dtype=bool)),
    "all": masks.causal(90) & BlockMask(np.eye(2, dtype=bool), 64, 64),
    "empty": masks.full(0),
    "no instance": ColumnMask(*[np.zeros((0, 4), int)] * 4, n_queries=4),
}


@given(st.one_of(column_masks(), boolean_masks(), block_masks().map(lambda drawn: drawn[0])))
def test_html_is_well_formed(mask):
    text = mask._repr_html_()
    svg = ElementTree.fromstring(text).find("svg")
    assert svg is not None and len(text) < 20_000
    assert "&lt;" + type(mask).__name__ in text


def test_html_shows_the_tiles():
    text = masks.causal(4)._repr_html_()
    assert 'viewBox="0 0 4 4"' in text
    assert "M0 0h1v1h-1z" in text and "M0 3h4v1h-4z" in text and "M1 0" not in text


@pytest.mark.parametrize("name", MASKS)
def test_plot(name):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    mask = MASKS[name]
    figure, ax = pyplot.subplots()
    assert mask.plot(ax) is ax
    assert ax.get_ylim()[0] == max(mask.n_queries, 1) and ax.get_xlim()[1] == max(mask.n_keys, 1)
    assert mask.plot() is ax  # the current axes
    figure.canvas.draw()
    pyplot.close(figure)


def test_plot_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnsupportedError, match="plot needs Matplotlib"):
        masks.causal(4).plot()
