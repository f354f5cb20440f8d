"""Where the command line computes: the best device here, and why."""

from typing import Any, NamedTuple

import numpy as np

import cuattn
from cuattn.errors import ArgumentError, CuattnError, UnsupportedError


class Device(NamedTuple):
    """A place to compute.

    Attributes
    ----------
    backend : {"cpu", "cuda"}
        Host or GPU.
    reason : str
        Why it was chosen.
    xp : module
        NumPy or CuPy.
    """

    backend: str
    reason: str
    xp: Any

    def put(self, array):
        """Return a NumPy array on this device."""
        return self.xp.asarray(array)

    def fetch(self, array):
        """Return an array of this device as a NumPy array."""
        return array if self.xp is np else self.xp.asnumpy(array)

    def finish(self, result):
        """Wait for the work on this device, and return its result."""
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        return result


def best():
    """Return the GPU when CuPy finds one that a kernel runs on, else the CPU."""
    cupy, reason = cupy_with_gpu()
    if cupy is None:
        return Device("cpu", reason, np)
    try:
        probe = cupy.zeros((16, 64), np.float16)
        cuattn.plan(probe, probe, probe)
    except CuattnError as error:
        return Device("cpu", f"the GPU cannot be used: {error}", np)
    return Device("cuda", "CuPy finds a CUDA device that a kernel runs on", cupy)


def pick(wanted, kernel):
    """Return the device that ``run`` was asked for.

    Parameters
    ----------
    wanted : {"auto", "cpu", "cuda"}
        The --device argument.
    kernel : {None, "cpu", "sm80", "sm90"}
        The --kernel argument, which settles "auto".

    Returns
    -------
    Device

    Raises
    ------
    ArgumentError
        When the two contradict each other.
    UnsupportedError
        When a GPU was asked for and CuPy finds none.
    """
    if (wanted, kernel) == ("cuda", "cpu"):
        raise ArgumentError("--device cuda --kernel cpu: expected one device")
    if (wanted, kernel) == ("auto", None):
        return best()
    if "cpu" in (wanted, kernel):
        return Device("cpu", "asked for", np)
    cupy, reason = cupy_with_gpu()
    if cupy is None:
        asked = f"--kernel {kernel}" if wanted == "auto" else f"--device {wanted}"
        raise UnsupportedError(f"{asked} needs a GPU, but {reason}")
    return Device("cuda", "asked for", cupy)


def cupy_with_gpu():
    """Return CuPy, or None and the reason why it is of no use here."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        return None, f"CuPy cannot be imported ({type(error).__name__}: {error})"
    if not cupy.is_available():
        return None, f"CuPy {cupy.__version__} finds no CUDA device"
    return cupy, ""
