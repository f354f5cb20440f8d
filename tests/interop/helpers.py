"""What the interop tests share."""

import pathlib
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.interop import to_backend

ROOT = pathlib.Path(cuattn.__file__).parent.parent
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ["float16", "bfloat16", "float32", "float64"]


def one(value, name="q"):
    """Enter a single array."""
    arrays, origin = to_backend({name: value})
    return arrays[name], origin


def library(name):
    """Import a framework that may be absent."""
    return pytest.importorskip(name)


class Producer:
    """A minimal foreign array."""

    def __init__(self, array, device=(1, 0)):
        self.array, self.device = array, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def run(script, **env):
    """Run a script in an interpreter of its own."""
    subprocess.run([sys.executable, "-c", script], check=True, env=env or None, cwd=ROOT)
