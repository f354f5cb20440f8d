"""NumPy mirror of ``struct Params`` (kernels/attn/params.cuh), the one argument of every attention kernel.

The two are written by hand and compared by a test that compiles ``static_assert``s on size and offsets.
"""

import numpy as np

__all__ = [
    "BATCH_AXES", "DROPOUT", "MASK_PARAMS", "MASK_SOURCE", "MASK_TABLES", "MAX_PARTS", "MERGE_PARAMS",
    "OPERAND", "OPERAND_FIELDS", "PARAMS",
]  # fmt: skip

BATCH_AXES = 4

_pointer = np.uint64

OPERAND = np.dtype(
    [("data", _pointer), ("batch", np.int64, BATCH_AXES), ("head", np.int64), ("row", np.int64), ("col", np.int64)],
    align=True,
)

MASK_TABLES = np.dtype(
    [
        ("cols", _pointer),
        ("bounds", _pointer),
        ("order", _pointer),
        ("alive", _pointer),
        ("batch", np.int64, BATCH_AXES),
        ("head", np.int64),
        ("keys_padded", np.int32),
        ("block_m", np.int32),
        ("block_n", np.int32),
    ],
    align=True,
)

DROPOUT = np.dtype(
    [
        ("keys", np.uint32, (7, 2)),
        ("offset", np.uint32),
        ("batch", np.uint32),
        ("head", np.uint32),
        ("heads", np.uint32),
        ("row", np.uint32),
        ("key", np.uint32),
        ("offset_data", _pointer),
        ("row_blocks", _pointer),
        ("key_blocks", _pointer),
    ],
    align=True,
)

OPERAND_FIELDS = ("q", "k", "v", "o", "l", "m", "dout", "dlse", "dq", "dk", "dv", "bias", "dbias", "mask", "boolean")

_WORKSPACE = (
    "o_part", "l_part", "m_part", "delta", "stat", "dq_acc", "dk_acc", "dv_acc", "dbias_acc", "counters",
    "ticket", "turns",
)  # fmt: skip

_INTEGERS = (
    "batch", "heads", "kv_heads", "group", "n_queries", "n_keys", "head_dim", "head_dim_v",
    "band_left", "band_right", "row_tiles", "key_tiles", "section", "splits", "split_tiles",
    "shared_tile", "shared_key", "bias_instances",
)  # fmt: skip

PARAMS = np.dtype(
    [(name, OPERAND) for name in OPERAND_FIELDS]
    + [("table", MASK_TABLES), ("dropout", DROPOUT)]
    + [(name, _pointer) for name in _WORKSPACE]
    + [(name, np.float64) for name in ("scale", "softcap", "cap_scale", "dropout_scale")]
    + [("batch_size", np.int32, BATCH_AXES)]
    + [(name, np.int32) for name in _INTEGERS],
    align=True,
)

_LEADING_AXES = BATCH_AXES + 1

MAX_COLUMN_MASKS = 4

MASK_SOURCE = np.dtype(
    [
        ("data", _pointer),
        ("stride", np.int64, _LEADING_AXES),
        ("row", np.int64),
        ("col", np.int64),
        ("block_m", np.int32),
        ("block_n", np.int32),
    ],
    align=True,
)

MASK_PARAMS = np.dtype(
    [("column", MASK_SOURCE, MAX_COLUMN_MASKS), ("blocks", MASK_SOURCE), ("boolean", MASK_SOURCE)]
    + [(name, _pointer) for name in ("cols", "bounds", "order", "alive")]
    + [("size", np.int32, _LEADING_AXES)]
    + [
        (name, np.int32)
        for name in (
            "alike", "n_queries", "n_keys", "keys_padded", "row_tiles", "key_tiles", "band_left", "band_right",
        )
    ],
    align=True,
)  # fmt: skip

MAX_PARTS = 64

MERGE_PARAMS = np.dtype(
    [(name, _pointer, MAX_PARTS) for name in ("o", "l", "m")]
    + [(name, _pointer) for name in ("o_out", "l_out", "m_out")]
    + [("rows", np.int64), ("head_dim_v", np.int32), ("parts", np.int32)],
    align=True,
)
