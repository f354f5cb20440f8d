"""What the command-line tests share."""

import pathlib

import ml_dtypes
import numpy as np

import cuattn
from cuattn.cli import devices, main

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ROOT = pathlib.Path(cuattn.__file__).parent.parent
HOST = devices.Device("cpu", "for the test", np)


def problem(dtype=np.float32, shape=(2, 3, 24, 8), seed=0):
    """Return q, k, v, do."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(dtype) for name in ("q", "k", "v", "do")}


def save(path, **arrays):
    """Write an input file as its user would."""
    if any(array.dtype == BFLOAT16 for array in arrays.values()):
        arrays = {name: a.view(np.uint16) if a.dtype == BFLOAT16 else a for name, a in arrays.items()}
        arrays["dtype"] = "bfloat16"
    np.savez(path, **arrays)
    return str(path)


def run(tmp_path, arrays, *words):
    """Run the command in this process and return what it wrote."""
    out = tmp_path / "out.npz"
    assert main(["run", save(tmp_path / "in.npz", **arrays), "--output", str(out), *words]) == 0
    with np.load(out) as file:
        return {name: file[name] for name in file.files}
