"""Dropout bits on the device against cuattn.rng."""

import numpy as np
import pytest

from cuattn import rng as cuattn_rng
from cuattn.rng import round_keys
from tests.kernels.probe import run

pytestmark = pytest.mark.gpu

_BODY = """
    u32 x[4], keys[7][2];
    Dropout dropout{};
    for (int r = 0; r < 7; ++r) dropout.keys[r][0] = k[2 * r], dropout.keys[r][1] = k[2 * r + 1];
    dropout.offset = 5, dropout.batch = 0, dropout.heads = 4, dropout.head = 1, dropout.row = 32, dropout.key = 64;
    random_words(x, dropout, random_stream(dropout, 0, 2), l / 4, 2 * (l % 4));
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
    random_words(again, dropout, (dropout.row + l / 4) ^ mixed.row, key_products(mixed, dropout.key + 2 * (l % 4)));
    for (int w = 0; w < 4; ++w) wrong[l] += again[w] != x[w];"""


@pytest.mark.parametrize("threshold", [1, 6554, 32768, 32769, 65535])
def test_block_of_draws(threshold):
    seed = 0x0123456789ABCDEF
    keys = np.array(_round_keys(seed), np.uint64).view(np.uint32)
    _, words, dropped, kept, wrong = run(
        ["attn/philox.cuh"], "const u32* k, u32* words, u32* dropped, u8* kept, u32* wrong",
        _BODY.replace("THRESHOLD", str(threshold)).replace("u32 x[4], keys[7][2];", "u32 x[4];"),
        keys, np.empty((32, 4), np.uint32), np.empty((32, 4), np.uint32), np.empty((32, 4, 2), np.uint8),
        np.zeros(32, np.uint32),
    )  # fmt: skip
    draws = cuattn_rng.draws(cuattn_rng.RNGState(seed, 5), 3, (32, 48), (64, 80))
    found = np.empty((16, 16), np.uint16)
    keep = np.empty((16, 16), bool)
    pairs = np.empty((16, 16), np.uint16)
    for lane in range(32):
        for w in range(4):
            row, key = lane // 4 + 8 * (w % 2), 2 * (lane % 4) + 8 * (w // 2)
            found[row, key : key + 2] = words[lane, w] & 0xFFFF, words[lane, w] >> 16
            pairs[row, key : key + 2] = dropped[lane, w] & 0xFFFF, dropped[lane, w] >> 16
            keep[row, key : key + 2] = kept[lane, w]
    np.testing.assert_array_equal(found, draws)
    np.testing.assert_array_equal(keep, draws >= threshold)
    assert not wrong.any()
    np.testing.assert_array_equal(pairs, np.where(keep, np.tile(np.uint16([0xCAFE, 0xBEEF]), 8), 0))
