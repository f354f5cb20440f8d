"""The two kinds that the backends work on: NumPy arrays and CuPy arrays."""

import sys

import numpy as np

from cuattn.errors import DtypeError

__all__ = ["CuPy", "NumPy"]

_HOST = ("cpu", 0, None)


class NumPy:
    """Host arrays."""

    @staticmethod
    def owns(value):
        """Return whether `value` is a NumPy array or an instance of a subclass."""
        return isinstance(value, np.ndarray)

    @staticmethod
    def name_of(value):
        """Return the name of this kind."""
        return "numpy"

    @staticmethod
    def take(name, value):
        """Return a plain ndarray over the memory of `value`, and its place."""
        if type(value) is not np.ndarray:
            if isinstance(value, np.ma.MaskedArray):
                raise DtypeError(
                    f"{name} is a numpy.ma.MaskedArray, whose mask would be lost; pass {name}.filled(...) "
                    "and say what may be attended to with mask="
                )
            value = value.view(np.ndarray)
        if not value.dtype.isnative:
            raise DtypeError(
                f"{name} has dtype {value.dtype.str!r}, in the byte order of another machine; "
                f'pass {name}.astype({name}.dtype.newbyteorder("="))'
            )
        return value, _HOST

    @staticmethod
    def give(array, handle):
        """Return the result as it is."""
        return array


class CuPy:
    """Device arrays of CuPy, run on CuPy's current stream of their device."""

    @staticmethod
    def owns(value):
        """Return whether `value` is a CuPy array."""
        cupy = sys.modules.get("cupy")
        return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))

    @staticmethod
    def name_of(value):
        """Return the name of this kind."""
        return "cupy"

    @staticmethod
    def take(name, value):
        """Return the array itself, and its place."""
        return value, ("cuda", value.data.device_id, None)

    @staticmethod
    def give(array, handle):
        """Return the result as it is."""
        return array

    @staticmethod
    def stream(device):
        """Return None: CuPy's current stream of the device stays current."""
        return None
