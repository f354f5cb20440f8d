"""Fixtures and profiles shared by all tests."""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    max_examples=int(os.environ.get("CUATTN_EXAMPLES", "40")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    derandomize=True,  # CI must not fail on Tuesdays; CUATTN_EXAMPLES widens the search by hand
)
settings.load_profile("default")


class Host:
    """Run a test body on NumPy arrays."""

    name = "numpy"

    @staticmethod
    def put(array):
        """Hand the library an array of this kind."""
        return array

    @staticmethod
    def get(array):
        """Take a result back to NumPy."""
        assert isinstance(array, np.ndarray)
        return array


class Device:
    """Run a test body on CuPy arrays."""

    name = "cupy"

    def __init__(self):
        import cupy

        self.cupy = cupy

    def put(self, array):
        if not isinstance(array, np.ndarray):
            return array
        strides = array.strides
        if 0 in strides and array.size:  # keep broadcast axes broadcast
            index = tuple(slice(0, 1) if s == 0 else slice(None) for s in strides)
            return self.cupy.broadcast_to(self.cupy.asarray(np.ascontiguousarray(array[index])), array.shape)
        return self.cupy.asarray(array)

    def get(self, array):
        assert isinstance(array, self.cupy.ndarray)
        return array.get()


def has_gpu():
    try:
        import cupy

        return cupy.is_available()
    except Exception:  # a broken installation raises more than ImportError
        return False


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """The array library that a shared test body runs on."""
    if request.param == "numpy":
        return Host
    if not has_gpu():
        pytest.skip("needs a CUDA GPU")
    return Device()


def pytest_collection_modifyitems(items):
    """Skip GPU tests where there is no GPU, so that the README's test command works everywhere."""
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
