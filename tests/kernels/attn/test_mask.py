"""Walks over tiles and the visibility of single elements against dense masks."""

import numpy as np
import pytest

from tests.kernels.probe import run

pytestmark = pytest.mark.gpu

_MASK = {"block_m": 32, "block_n": 16, "band_left": True, "band_right": True, "mask": 0}


def test_walk_visits_what_the_band_sees():
    n_queries, n_keys, left, right, offset = 70, 100, 9, 4, 17
    body = f"""
        Params p{{}};
        p.n_queries = {n_queries}, p.n_keys = {n_keys};
        p.band_left = {left - offset}, p.band_right = {right + offset};
        __shared__ MaskPlace place;
        for (int tile = 0; tile < 3; ++tile) {{
            __syncwarp();
            place.rows = {{tile * 32, min(tile * 32 + 32, p.n_queries), tile}};
            place.lowest = band_first(p, place.rows) / cfg::block_n;
            __syncwarp();
            TileWalk walk(p, place, 7);
            i32 last = 1000;
            for (Tile at = walk.next(); at.exists(); at = walk.next()) {{
                if (l == 0) state[tile * 7 + at.n()] = at.n() < last ? (at.partial() ? 1 : 2) : 99;
                last = at.n();
            }}
            for (int i = l; i < 32 * {n_keys}; i += 32) {{
                const int row = min(tile * 32 + i / {n_keys}, p.n_queries - 1), key = i % {n_keys};
                seen[(tile * 32 + i / {n_keys}) * {n_keys} + key] = KeyMask(p, 0, 0, key).visible(p, row, key);
            }}
        }}
        for (int key = l; key < {n_keys}; key += 32) alive[key] = band_sees(p, key);"""
    state, seen, alive = run(
        ["attn/mask.cuh"], "u8* state, u8* seen, u8* alive", body, np.zeros((3, 7), np.uint8),
        np.zeros((96, n_keys), np.uint8), np.zeros(n_keys, np.uint8), constants=_MASK,
    )  # fmt: skip
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)
    band = (j >= i - left) & (j <= i + right)
    np.testing.assert_array_equal(seen[:n_queries], band)
    np.testing.assert_array_equal(alive, band.any(0))
    for m in range(3):
        for n in range(7):
            tile = band[32 * m : 32 * m + 32, 16 * n : 16 * n + 16]
            full = tile.all() and tile.shape[1] == 16
            if tile.any():
                assert state[m, n] == (2 if full else 1)
            else:
                assert state[m, n] in (0, 1)


@pytest.mark.parametrize("mask", [0, 1, 3, 8, 9, 10, 16, 17, 26])
def test_row_walk_goes_both_ways(mask):
    rng = np.random.default_rng(mask)
    row_tiles, key_tiles, left, right, offset = 75, 7, 1700, 4, 70
    n_queries, n_keys = 32 * row_tiles - 5, 16 * key_tiles - 3
    ranges = 2 * (mask % 8)
    bounds = np.sort(rng.integers(0, row_tiles + 1, (key_tiles, ranges, 2)), -1).repeat(2, -1)[..., [0, 2, 1, 3]]
    blocks = rng.random((row_tiles, key_tiles)) < 0.1
    states = rng.integers(0, 4, (-(-row_tiles // 4), -(-key_tiles // 4), 4, 4), np.uint32)  # bits 0: seen, 1: hidden
    words = (states << (2 * np.arange(16, dtype=np.uint32)).reshape(4, 4)).sum((2, 3), dtype=np.uint32)
    body = f"""
        Params p{{}};
        p.n_queries = {n_queries}, p.n_keys = {n_keys}, p.row_tiles = {row_tiles}, p.key_tiles = {key_tiles};
        p.band_left = {left - offset}, p.band_right = {right + offset};
        p.table.bounds = bounds, p.table.block_m = 32, p.table.block_n = 16;
        p.mask.data = blocks, p.mask.row = {key_tiles}, p.mask.col = 1;
        p.table.states = words, p.table.alive = words;
        __shared__ WalkTables tables;
        for (int n = 0; n < {key_tiles}; ++n) {{
            __syncwarp();
            if (l == 0) describe_tables(tables, p, 0, 0, n);
            __syncwarp();
            int count = 0;
            for (RowWalk walk(p, tables); walk.next(p); ++count) if (l == 0) up[{row_tiles} * n + count] = walk.tile;
            count = 0;
            for (DirectedRowWalk<true> walk(p, tables); walk.next(p); ++count)
                if (l == 0) down[{row_tiles} * n + count] = walk.tile;
        }}"""
    nothing = np.full((key_tiles, row_tiles), -1, np.int32)
    _, _, _, up, down = run(
        ["attn/row_walk.cuh"], "const int4* bounds, u8* blocks, u32* words, i32* up, i32* down", body,
        np.append(bounds, 0).astype(np.int32),
        blocks.astype(np.uint8), words, nothing, nothing, constants={**_MASK, "mask": mask},
    )  # fmt: skip
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)
    band = (j >= i - left) & (j <= i + right)
    for n in range(key_tiles):
        seen = [band[32 * m : 32 * m + 32, 16 * n : 16 * n + 16].any() for m in range(row_tiles)]
        for first, end in bounds[n, :, :2]:
            seen[first:end] = [False] * (end - first)
        if mask & 8:
            seen &= blocks[:, n]
        if mask & 16:
            seen &= states[np.arange(row_tiles) // 4, n // 4, np.arange(row_tiles) % 4, n % 4] % 2 == 1
        visited = np.flatnonzero(seen)
        np.testing.assert_array_equal(up[n, : len(visited)], visited)
        np.testing.assert_array_equal(down[n, : len(visited)], visited[::-1])
        assert (up[n, len(visited) :] == -1).all() and (down[n, len(visited) :] == -1).all()
