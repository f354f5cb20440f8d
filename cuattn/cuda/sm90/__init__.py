"""The kernels for compute capability 9.0: bulk tensor copies and warpgroup products."""
