"""The dtypes of q, k, v: one row each, which every backend asks instead of spelling a dtype's name or size."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, slots=True)
class Dtype:
    """What a backend needs to know of a dtype.

    Attributes
    ----------
    dtype : numpy.dtype
        The dtype itself.
    stat : numpy.dtype
        Of l, m and of every sum.
    cuda : str | None
        The type's name in CUDA; None keeps arrays of this dtype on the CPU.
    tensor_map : int | None
        CUtensorMapDataType of the elements, for kernels that read by bulk tensor copies.
    products : str
        How the kernels multiply: "half" (16-bit tensor cores), "split" (float32 as parts), "double".
    """

    dtype: np.dtype
    stat: np.dtype = FLOAT32
    cuda: str | None = None
    tensor_map: int | None = None
    products: str = "half"


DTYPES: dict[np.dtype, Dtype] = {
    row.dtype: row
    for row in (
        Dtype(np.dtype(np.float16), cuda="__half", tensor_map=6),
        Dtype(np.dtype(ml_dtypes.bfloat16), cuda="__nv_bfloat16", tensor_map=9),
        Dtype(FLOAT32, cuda="float", products="split"),
        Dtype(np.dtype(np.float64), np.dtype(np.float64), cuda="double", products="double"),
    )
}
"""Every dtype that calls know; a new one is an entry here."""
