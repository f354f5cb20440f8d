"""GPU tests of Hopper's kernels are skipped on other GPUs."""

import pytest


@pytest.fixture(autouse=True)
def hopper(request):
    """Skip a GPU test where there is no Hopper."""
    if request.node.get_closest_marker("gpu"):
        import cupy

        if cupy.cuda.Device().compute_capability != "90":
            pytest.skip("needs compute capability 9.0")
