"""What the table kernels make of elements, given or computed: bits, states of tiles, and which keys some row sees."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cuattn.cuda.params import TABLES
from cuattn.cuda.tables import CallMasks
from cuattn.masks import BooleanMask, causal_document, from_function, random_eviction
from cuattn.problem import Band
from tests.cuda.sm90.test_forward_plan import problem as problem_of

pytestmark = pytest.mark.gpu


def tables(mask, problem, tile, packed, kind="boolean"):
    """Return the tables of a mask, by name, as arrays of 32-bit words, and what they are made for."""
    import cupy

    masks = CallMasks(dataclasses.replace(problem, masks=(kind,)), [mask], 0, packed)
    made = masks.tables(extent := masks.extent(*tile))
    memory = cupy.full(made.nbytes, 0xA5, np.uint8)
    stream = cupy.cuda.get_current_stream()
    made.fill(made.sources([mask], 0, stream), 0, memory.data.ptr, stream)
    found, ends = memory.get(), [*[place for place in made._places if place is not None][1:], made.nbytes]
    given = [(name, place) for name, place in zip(TABLES, made._places, strict=True) if place is not None]
    return {name: found[place:end].view(np.uint32) for (name, place), end in zip(given, ends, strict=True)}, extent


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize(
    ("shape", "tile", "band"),
    [
        ((1, 333, 421), (128, 128, 64), None),
        ((3, 640, 512), (192, 128, 64), Band(40, 0, 10)),
        ((2, 130, 270), (128, 112, 64), None),
        ((1, 100, 77), (16, 32, 16), None),
        ((2, 65, 300), (64, 64, 64), Band(None, 0, 0)),
        ((2, 1, 300), (128, 128, 128), None),
    ],
)
def test_tables(shape, tile, band, computed):
    rng = np.random.default_rng(shape)
    heads, n_queries, n_keys = shape
    seen = np.repeat(np.repeat(rng.random((heads, -(-n_queries // 32), -(-n_keys // 32))) < 0.4, 32, 1), 32, 2)
    seen = seen[:, :n_queries, :n_keys] & (rng.random(shape) < np.where(rng.random((heads, 1, 1)) < 0.5, 1, 0.9))
    given = BooleanMask(seen)
    mask = from_function(lambda b, h, i, j: seen[h, i, j], n_queries, n_keys, heads=heads) if computed else given
    problem = problem_of(heads=heads, kv_heads=heads, batch=(), n_queries=n_queries, n_keys=n_keys, band=band)
    found, extent = tables(mask, problem, tile, True)

    unit, block_n = tile[2], tile[1]
    states = given.bind(n_queries, n_keys).tile_states(unit, block_n)
    words = found["states"][: heads * extent.strides["states_instance"]].reshape(heads, -(-extent.row_tiles // 4), -1)
    m, n = np.indices(states.shape[1:])
    codes = words[:, m // 4, n // 4] >> (2 * (m % 4 * 4 + n % 4)).astype(np.uint32) & 3
    np.testing.assert_array_equal(codes, np.array([2, 3, 1])[states])

    rows = 2 * -(-n_queries // 128)
    bits = found["bits"].view(np.uint64)[: heads * extent.strides["bits_instance"]]
    bits = bits.reshape(heads, rows if n_queries > 1 or computed else 1, -1)
    padded = np.zeros((heads, 64 * bits.shape[1], bits.shape[2]), bool)
    padded[:, :n_queries, :n_keys] = seen
    packed = np.packbits(padded.reshape(heads, -1, 64, bits.shape[2]), axis=2, bitorder="little")
    expected = packed.swapaxes(2, 3).copy().view(np.uint64)[..., 0]
    if n_queries > 1:
        np.testing.assert_array_equal(bits, expected)

    i, j = np.arange(n_queries)[:, None], np.arange(n_keys)
    if band is not None:
        offset = i + band.offset
        seen = seen & (j <= offset + band.right) & (j >= offset - (n_keys if band.left is None else band.left))
    order = found["order"].reshape(-1, 4)[: -(-n_queries // tile[0])]
    assert sorted(order[:, 0]) == list(range(-(-n_queries // tile[0])))
    assert (order[:, 1:3] == (0, extent.key_tiles - 1)).all()
    alive = found["alive"][: heads * -(-n_keys // 32)].reshape(heads, -1)
    np.testing.assert_array_equal(alive[:, j // 32] >> (j % 32).astype(np.uint32) & 1, seen.any(axis=1))


@pytest.mark.parametrize("tile", [(128, 128, 64), (192, 64, 64), (64, 112, 64)])
@pytest.mark.parametrize("band", [None, Band(None, 0, 0)])
@pytest.mark.parametrize("mask", [causal_document([700, 64, 1, 335, 2400, 3000]), random_eviction(6500, 3000, 0)])
def test_spans_of_column_masks(mask, band, tile):
    """No key tile is left out; where keys end with the row, rows may begin up to a row tile earlier."""
    n, (block_m, block_n, _) = 6500, tile
    found, extent = tables(mask, problem_of(batch=(), n_queries=n, n_keys=n, band=band), tile, False, "column")
    order = found["order"].reshape(-1, 4)[: -(-n // block_m)]
    assert sorted(order[:, 0]) == list(range(-(-n // block_m)))
    seen = mask.dense()
    for item, lowest, top, _ in order.astype(int):
        rows = slice(max(item * block_m - (block_m - 64) * (band is not None), 0), (item + 1) * block_m)
        keys = np.flatnonzero(seen[rows].any(0)) // block_n
        assert (lowest, top) == (keys.min(), keys.max())
    assert extent.key_tiles == -(-n // block_n)
