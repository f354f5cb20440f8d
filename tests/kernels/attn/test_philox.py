"""Dropout bits on the device against cuattn.rng."""

import numpy as np
import pytest

from cuattn import rng as cuattn_rng
from cuattn.rng import RNGState, round_keys
from tests.kernels.probe import gather, run

pytestmark = pytest.mark.gpu

_BODY = """
    u32 x[4];
    Params p{};
    Dropout& dropout = p.dropout;
    p.n_queries = p.n_keys = 48;
    for (int r = 0; r < 7; ++r) dropout.keys[r][0] = k[2 * r], dropout.keys[r][1] = k[2 * r + 1];
    dropout.offset = 5, dropout.batch = 0, dropout.heads = 4, dropout.head = 1, dropout.row = 32, dropout.key = 64;
    if (cfg::runs) dropout.row_blocks = rows, dropout.key_blocks = keys;
    random_words(x, p, random_stream(dropout, 0, 2), FIRST_ROW + l / 4, FIRST_KEY + 2 * (l % 4));
    for (int w = 0; w < 4; ++w) {
        words[4 * l + w] = x[w];
        dropped[4 * l + w] = drop_pair<THRESHOLD>(0xbeefcafe, x[w]);
        kept[2 * (4 * l + w)] = kept_low<THRESHOLD>(x[w]), kept[2 * (4 * l + w) + 1] = kept_high<THRESHOLD>(x[w]);
#if __CUDA_ARCH__ >= 900
        const u32 ones = clamp_draws<THRESHOLD>(x[w]) - 0x00010001u * (THRESHOLD - 1);
        if (ones != (u32{kept_low<THRESHOLD>(x[w])} | u32{kept_high<THRESHOLD>(x[w])} << 16)) ++wrong[l];
#endif
    }
    u32 again[4];
    const StreamWords mixed = stream_words(dropout, random_stream(dropout, 0, 2));
    const u32 row = global_row(p, FIRST_ROW + l / 4), key = global_key(p, FIRST_KEY + 2 * (l % 4));
    random_words(again, dropout, row ^ mixed.row, key_products(mixed, key));
    for (int w = 0; w < 4; ++w) wrong[l] += again[w] != x[w];"""


@pytest.mark.parametrize("threshold", [1, 6554, 32768, 32769, 65535])
@pytest.mark.parametrize("runs", [False, True])
def test_block_of_draws(threshold, runs):
    seed = 0x0123456789ABCDEF
    keys = np.array([low | high << 32 for low, high in round_keys(RNGState(seed).key)], np.uint64).view(np.uint32)
    blocks = np.int32([0, 960, 32]), np.int32([480, 64, 0])  # of a shard in runs: its blocks 2 and 1 are the ones below
    names = {"THRESHOLD": threshold, "FIRST_ROW": 32 if runs else 0, "FIRST_KEY": 16 if runs else 0}
    body = _BODY
    for name, value in names.items():
        body = body.replace(name, str(value))
    words, dropped, kept, wrong = run(
        ["attn/philox.cuh"],
        "const u32* k, const i32* rows, const i32* keys, u32* words, u32* dropped, u8* kept, u32* wrong", body,
        keys, *blocks, np.empty((32, 4), np.uint32), np.empty((32, 4), np.uint32), np.empty((32, 4, 2), np.uint8),
        np.zeros(32, np.uint32), constants={"runs": runs, "dropout": 1, "score": False},
    )[3:]  # fmt: skip
    draws = cuattn_rng.draws(cuattn_rng.RNGState(seed, 5), 3, (32, 48), (64, 80))
    # Word w of a lane has two neighbours of tile w / 2, in its upper half or its lower one.
    found, pairs, keep = (gather(x.reshape(32, 2, 4)) for x in (words.view(np.uint16), dropped.view(np.uint16), kept))
    np.testing.assert_array_equal(found, draws)
    np.testing.assert_array_equal(keep.astype(bool), draws >= threshold)
    assert not wrong.any()
    np.testing.assert_array_equal(pairs, np.where(keep, np.tile(np.uint16([0xCAFE, 0xBEEF]), 8), 0))
