"""NumPy mirrors of the structs that kernels take: ``CoreParams`` (kernels/attn/params.cuh), with which the argument of
every attention kernel begins, ``MaskParams`` and ``MergeParams``.

A field of a struct within has the name "field.of.it".  The two sides are written by hand and compared by a test that
compiles ``static_assert``s on size and offsets.
"""

import numpy as np

from cuattn.io_model.sizes import cdiv

BATCH_AXES = 4
MAX_PARTS = 64
MAX_WEIGHTS = 10  # kWeights: expressions of a score function that read arrays
_MAX_COLUMN_MASKS = 4

Fields = list[tuple]


def _all(kind: type, names: str, *shape: int) -> Fields:
    return [(name, kind, shape) for name in names.split()]


def _within(name: str, fields: Fields) -> Fields:
    return [(f"{name}.{field}", *rest) for field, *rest in fields]


_STRIDES = [("batch", np.int64, BATCH_AXES), ("head", np.int64)]
_OPERAND = [("data", np.uint64), *_STRIDES, *_all(np.int64, "row col")]
TABLES = ("cols", "bounds", "order", "bits", "values", "rough", "alive", "states")
"""The tables of masks, and what some are made by; the last two are zeros before they are written."""
_TABLE_STRIDES = _all(np.int64, "bits_instance bits_row bits_tile states_instance")
_TABLES = [
    *_all(np.uint64, "cols bounds order alive bits states"),
    *_STRIDES,
    *_TABLE_STRIDES,
    *_all(np.int32, "keys_padded block_m block_n"),
]
_MATRICES = _within("matrices", _all(np.int32, "first_b first_h heads"))
_DROPOUT = [
    ("keys", np.uint64, 7),  # two numbers of 32 bits each
    *_all(np.uint32, "offset batch head heads row key"),
    *_all(np.uint64, "offset_data row_blocks key_blocks"),
]
_OPERANDS = "q k v o l m dout dlse dq dk dv bias dbias mask boolean function"
_WORKSPACE = "o_part l_part m_part delta stat dq_acc dk_acc dv_acc dbias_acc counters ticket turns"
_COUNTS = (
    "batch heads kv_heads group n_queries n_keys head_dim head_dim_v band_left band_right row_tiles key_tiles "
    "section splits split_tiles shared_tile shared_key bias_instances"
)

PARAMS = np.dtype(
    [
        *(field for name in _OPERANDS.split() for field in _within(name, _OPERAND)),
        *_within("table", _TABLES),
        *_within("dropout", _DROPOUT),
        *_all(np.uint64, _WORKSPACE),
        *_all(np.float64, "scale softcap cap_scale dropout_scale"),
        ("batch_size", np.int32, BATCH_AXES),
        *_all(np.int32, _COUNTS),
        *_MATRICES,
    ],
    align=True,
)

_SOURCE = [
    ("data", np.uint64),
    ("stride", np.int64, BATCH_AXES + 1),
    *_all(np.int64, "row col"),
    *_all(np.int32, "block_m block_n"),
]
_SOURCES = [*(f"column.{number}" for number in range(_MAX_COLUMN_MASKS)), "blocks", "boolean", "function"]

MASK_PARAMS = np.dtype(
    [
        *(field for name in _SOURCES for field in _within(name, _SOURCE)),
        *_all(np.uint64, "cols bounds order bits values alive states"),
        *_TABLE_STRIDES,
        ("size", np.int32, BATCH_AXES + 1),
        *_MATRICES,
        *_all(np.int32, "instances alike n_queries n_keys keys_padded row_tiles key_tiles band_left band_right"),
        ("rough", np.uint64),
    ],
    align=True,
)

TANGENTS = np.dtype(
    [
        *(
            field
            for name in ["tq", "tk", "tv", "tbias", "tdo", "to", "tlse", "tdq", "tdk", "tdv", "tdbias", "ddo"]
            for field in _within(name, _OPERAND)
        ),
        *_all(np.uint64, "tdbias_acc"),
        *_all(np.uint64, "elements telements", MAX_WEIGHTS),
        *_all(np.int64, "sizes", MAX_WEIGHTS),
        *_all(np.uint64, "rows"),
    ],
    align=True,
)
"""What kernels along tangents take beside ``Params``: ``Tangents`` (kernels/attn/tangents.cuh)."""

SUM_PARAMS = np.dtype(
    [
        *_all(np.uint64, "in out"),
        *_all(np.int64, "inner results"),
        *_all(np.int32, "size keep", BATCH_AXES + 1),
    ],
    align=True,
)

ADD_PARAMS = np.dtype(
    [*_all(np.uint64, "a b out"), *_all(np.int64, "a_row b_row out_row rows packs")],
    align=True,
)

MERGE_PARAMS = np.dtype(
    [
        *_all(np.uint64, "o l m", MAX_PARTS),
        *_all(np.uint64, "o_out l_out m_out"),
        ("rows", np.int64),
        *_all(np.int32, "head_dim_v parts"),
    ],
    align=True,
)


def derived(first: np.dtype, second: np.dtype, prefix: str) -> np.dtype:
    """Return the struct that derives from two; the second one's fields get a prefix.

    Its parts are aligned to 8 bytes: compilers put smaller ones where the padding of those before would be.

    >>> last = np.dtype([("x", np.int32), ("y", np.uint64)], align=True)
    >>> both = derived(np.dtype([("a", np.uint64)], align=True), last, "last.")
    >>> both.names, both.itemsize
    (('a', 'last.x', 'last.y'), 24)
    """
    begin = cdiv(first.itemsize, second.alignment) * second.alignment
    fields = dict(first.fields)
    fields |= {prefix + name: (kind, begin + offset) for name, (kind, offset) in second.fields.items()}
    formats, offsets = zip(*fields.values(), strict=True)
    unit = max(first.alignment, second.alignment)
    itemsize = cdiv(begin + second.itemsize, unit) * unit
    return np.dtype({"names": [*fields], "formats": formats, "offsets": offsets, "itemsize": itemsize}, align=True)


MERGE_JVP_PARAMS = derived(
    MERGE_PARAMS,
    np.dtype([*_all(np.uint64, "to tlse", MAX_PARTS), *_all(np.uint64, "to_out tlse_out")], align=True),
    "",
)
