"""Which blocks of the backward's key kernel share their key tiles."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cuattn.cuda.sm80.backward import Cut
from tests.cuda.sm80.test_forward_plan import DEVICES, shaped

DEVICE = DEVICES["H200"]


def shared(problem, sums=()):
    return Cut(problem, DEVICE).shared_keys(sums)


def float64(heads, n_queries, n_keys, group=1, **options):
    return shaped(np.float64, heads * group, heads, n_queries, n_keys, 128, **options)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize(("heads", "n_queries", "n_keys"), [(64, 4096, 4096), (133, 1040, 40), (34, 5000, 250)])
def test_the_last_round_is_dealt_out(heads, n_queries, n_keys, group):
    tiles, row_tiles = heads * -(-n_keys // 64), -(-n_queries // 16)
    found = shared(float64(heads, n_queries, n_keys, group))
    assert found.first == tiles - tiles % DEVICE.multiprocessors
    assert found.parts > 1 and found.grid - found.first <= DEVICE.multiprocessors
    assert found.grid - found.first == (tiles - found.first) * found.parts
    assert found.parts * found.row_tiles >= row_tiles > (found.parts - 1) * found.row_tiles


@pytest.mark.parametrize(
    "problem",
    [
        float64(132, 4096, 64),  # nothing is left over
        float64(131, 4096, 64),  # one round
        float64(132 + 100, 4096, 64),  # most have work
        float64(132 + 57, 4096, 64),  # two to a tile would have long sums
        float64(133, 1024, 64),  # no dK or dV in memory
        float64(133, 4096, 64, is_causal="top_left"),
        shaped(np.float64, 133, None, 4096, 64, 64),  # several blocks on a multiprocessor
        shaped(np.float32, 133, None, 40000, 64, 128),
        shaped(heads=133, n_queries=4096, n_keys=64, head_dim=128),
    ],
)
def test_else_none_are_shared(problem):
    found = shared(problem)
    assert found.parts == 1 and found.first == found.grid


def test_sums_over_broadcast_axes_are_not_shared():
    problem = float64(133, 4096, 64)
    assert shared(problem).parts > 1
    assert shared(problem, ["dk"]).parts == shared(problem, {"dv": 1}).parts == 1
    assert "dk and dv" in str(Cut(problem, DEVICE).notes())


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_mask_has_the_same_sums_in_float32(head_dim, device):
    """dk and dv of float32 depend on the tile, and a mask's kind must not."""
    problem = shaped(np.float32, n_queries=300, n_keys=300, head_dim=head_dim)
    kinds = [Cut(dataclasses.replace(problem, masks=(kind,)), device).keys for kind in ("column", "block", "boolean")]
    assert len(set(kinds)) == 1
