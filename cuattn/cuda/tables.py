"""Tables of masks in device memory: made once per mask, device and tile, and kept on the mask."""

import functools
from typing import Any, NamedTuple

import numpy as np

from cuattn.cuda.launch import Axes, Struct, band_fields, function
from cuattn.cuda.params import BATCH_AXES, MASK_PARAMS
from cuattn.cuda.plan import mask_code
from cuattn.errors import UnsupportedError
from cuattn.masks.device import Ready
from cuattn.problem import Problem

__all__ = ["Tables", "mask_pointers", "mask_tables", "table_fields", "table_layout"]

_ORDER_SHARED_BYTES = 40 * 1024  # more row tiles than fit here run unsorted
_KEYS_PER_BLOCK, _ROWS_PER_BLOCK = 256, 512  # of mask_alive
_UNIT = 128  # keys are padded so that every key tile may be read whole


class Tables(NamedTuple):
    """Device arrays that the kernels read; None where the kind of mask has no such table."""

    leading: tuple[int, ...]  # the mask's own leading axes, C order over which instances are counted
    keys_padded: int
    cols: Any = None
    bounds: Any = None
    order: Any = None
    alive: Any = None
    blocks: Any = None  # block: the blocks as bytes (..., block rows, block columns)


def mask_tables(problem: Problem, mask: Any, device: int, block_m: int, block_n: int) -> Tables | None:
    """Return the tables of a mask, on the current stream.

    Parameters
    ----------
    problem : Problem
    mask : ColumnMask | BlockMask | cupy.ndarray | None
        A host mask is copied to the device the first time.
    device : int
        The current device.
    block_m, block_n : int
        Query rows and keys of a tile.
    """
    if mask is None:
        return None
    if problem.mask == "dense":
        return _dense_tables(problem, mask, device)
    key = ("cuda tables", device, block_m, block_n, problem.n_queries, problem.n_keys, problem.band)
    cached = mask._cache.get(key)
    if cached is None:
        import cupy

        twin = mask.to_device(device)
        twin._wait()
        make = _column_tables if problem.mask == "column" else _block_tables
        cached = make(problem, twin, device, block_m, block_n)
        first = cached.cols if cached.cols is not None else cached.alive
        cached = (cached, Ready(first))
        if not cupy.cuda.get_current_stream().is_capturing():  # what a capture records is written only when replayed
            mask._cache[key] = cached
    tables, ready = cached
    ready.wait()
    return tables


def mask_pointers(mask: Any, tables: Tables | None) -> list[int]:
    """Return the addresses for mask.data and table.cols, bounds, order, alive; 0 where there is none."""
    if tables is None:
        return [0, 0, 0, 0, 0]
    if tables.cols is None:
        dense = tables.blocks if tables.blocks is not None else mask
        return [dense.data.ptr, 0, 0, 0, tables.alive.data.ptr]
    order = 0 if tables.order is None else tables.order.data.ptr
    return [0, tables.cols.data.ptr, tables.bounds.data.ptr, order, 0]


def table_layout(problem: Problem, mask: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and instance strides of a mask's tables over (*batch, heads)."""
    if mask is None:
        return None
    leading = mask.shape[:-2] if problem.mask == "dense" else mask.leading
    leading = (1,) * (len(problem.batch) + 1 - len(leading)) + tuple(leading)
    strides = [1] * len(leading)
    for axis in range(len(leading) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * leading[axis + 1]
    return leading, tuple(strides)


def table_fields(problem: Problem, mask: Any, layout: tuple, axes: Axes, block_n: int) -> dict[str, Any]:
    """Return the fields of ``Params`` that describe a mask's tables, from :func:`table_layout`."""
    shape, strides = layout
    batch = axes.strides(shape[:-1], strides[:-1], 1)
    head = strides[-1] if shape[-1] > 1 else 0
    padded = block_n if problem.mask == "column" else 128
    values: dict[str, Any] = {
        "table.batch": batch,
        "table.head": head,
        "table.keys_padded": -(-problem.n_keys // padded) * padded,
    }
    if problem.mask == "block":
        rows, columns = mask.blocks.shape[-2:]
        values.update(
            {
                "table.block_m": mask.block_m,
                "table.block_n": mask.block_n,
                "table.block_rows": rows,
                "table.block_cols": columns,
                "mask.batch": tuple(stride * rows * columns for stride in batch),
                "mask.head": head * rows * columns,
                "mask.row": columns,
                "mask.col": 1,
            }
        )
    return values


def _column_tables(problem: Problem, mask: Any, device: int, block_m: int, block_n: int) -> Tables:
    import cupy

    instances = int(np.prod(mask.leading, dtype=np.int64))
    keys = problem.n_keys
    key_tiles, row_tiles = -(-keys // block_n), -(-problem.n_queries // block_m)
    keys_padded = key_tiles * block_n
    tables = Tables(
        mask.leading,
        keys_padded,
        cols=cupy.empty((instances, keys_padded, 4), np.int32),
        bounds=cupy.empty((instances, key_tiles, 8), np.int32),
        order=cupy.empty((instances, row_tiles), np.int32) if 4 * (row_tiles + 1) <= _ORDER_SHARED_BYTES else None,
    )
    if instances == 0 or key_tiles == 0 or row_tiles == 0:
        return tables
    _check_grid("mask", instances)
    values = {
        **band_fields(problem),
        "n_queries": problem.n_queries,
        "n_keys": keys,
        "keys_padded": keys_padded,
        "row_tiles": row_tiles,
        "key_tiles": key_tiles,
    }
    struct = Struct(MASK_PARAMS, values, ("lts", "lte", "uts", "ute", "cols", "bounds", "order"))
    vectors = mask._array.data.ptr
    step = instances * keys * 4
    pointers = [vectors, vectors + step, vectors + 2 * step, vectors + 3 * step, tables.cols.data.ptr]
    pointers += [tables.bounds.data.ptr, 0 if tables.order is None else tables.order.data.ptr]
    argument = struct.seal(struct.fill(pointers))
    constants = _constants(problem, block_m, block_n)
    function(device, "util/mask_bounds.cu", "mask_bounds", constants)(
        (key_tiles, instances), (-(-block_n // 32) * 32,), (argument,)
    )
    if tables.order is not None:
        order = function(device, "util/mask_bounds.cu", "mask_order", constants)
        order((instances,), (1024,), (argument,), 4 * (row_tiles + 1))
    return tables


def _block_tables(problem: Problem, mask: Any, device: int, block_m: int, block_n: int) -> Tables:
    blocks = mask.blocks
    return _alive_tables(problem, blocks, mask.block_m, mask.block_n, device)._replace(blocks=blocks)


def _dense_tables(problem: Problem, mask: Any, device: int) -> Tables:
    return _alive_tables(problem, mask, 1, 1, device)


def _alive_tables(problem: Problem, mask: Any, block_m: int, block_n: int, device: int) -> Tables:
    """Mark the keys that some row sees; `mask` is boolean (..., rows, columns) in blocks of block_m x block_n."""
    import cupy

    leading, (rows, columns) = mask.shape[:-2], mask.shape[-2:]
    instances = int(np.prod(leading, dtype=np.int64))
    keys_padded = -(-problem.n_keys // _UNIT) * _UNIT
    alive = cupy.zeros((instances, keys_padded), np.uint8)
    if alive.size == 0 or problem.n_queries == 0:
        return Tables(leading, keys_padded, alive=alive)
    _check_grid("mask", instances)
    sizes, strides = _leading_axes(leading, mask.strides[:-2])
    values = {
        **band_fields(problem),
        "stride": strides,
        "size": sizes,
        "row": mask.strides[-2] if rows > 1 else 0,
        "col": mask.strides[-1] if columns > 1 else 0,
        "rows": rows,
        "block_m": block_m,
        "block_n": block_n,
        "n_queries": problem.n_queries,
        "n_keys": problem.n_keys,
        "keys_padded": keys_padded,
    }
    struct = Struct(MASK_PARAMS, values, ("mask", "alive"))
    kernel = function(device, "util/mask_alive.cu", "mask_alive", _constants(problem, block_m, block_n))
    grid = (-(-problem.n_keys // _KEYS_PER_BLOCK), -(-rows // _ROWS_PER_BLOCK), instances)
    kernel(grid, (_KEYS_PER_BLOCK,), (struct.seal(struct.fill([mask.data.ptr, alive.data.ptr])),))
    return Tables(leading, keys_padded, alive=alive)


def _check_grid(name: str, instances: int) -> None:
    if instances > 65535:
        raise UnsupportedError(f"{name} holds {instances} different masks; expected at most 65535 on a GPU")


def _leading_axes(leading: tuple[int, ...], strides: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Fit a mask's leading axes into the BATCH_AXES + 1 of ``MaskParams``, without the axes of length 1."""
    kept = [(n, s) for n, s in zip(leading, strides, strict=True) if n != 1]
    if len(kept) > BATCH_AXES + 1:
        raise UnsupportedError(f"mask has {len(kept)} leading axes; expected at most {BATCH_AXES + 1} on a GPU")
    kept = [(1, 0)] * (BATCH_AXES + 1 - len(kept)) + kept
    return [n for n, _ in kept], [s for _, s in kept]


@functools.lru_cache(maxsize=256)
def _constants(problem: Problem, block_m: int, block_n: int) -> tuple[tuple[str, object], ...]:
    band = problem.band
    return (
        ("block_m", block_m),
        ("block_n", block_n),
        ("band_left", band is not None and band.left is not None),
        ("band_right", band is not None and band.right is not None),
        ("mask", mask_code(problem)),
    )
