"""JAX arrays: read through NumPy on the CPU and through DLPack on a GPU, always on one device."""

import sys

import numpy as np

from cuattn.errors import DtypeError, UnsupportedError
from cuattn.interop.native import OnCuPy
from cuattn.interop.origin import device_array_module

__all__ = ["Jax"]


class Jax(OnCuPy):
    """Concrete arrays of JAX."""

    @staticmethod
    def owns(value):
        """Return whether `value` is a JAX array; tracers are."""
        jax = sys.modules.get("jax")
        return jax is not None and isinstance(value, getattr(jax, "Array", ()))

    @staticmethod
    def name_of(value):
        """Return the name of this kind."""
        return "jax"

    @staticmethod
    def take(name, value):
        """Return a NumPy or CuPy array over the memory of `value`, and its place."""
        jax = sys.modules["jax"]
        if isinstance(value, jax.core.Tracer):
            raise UnsupportedError(
                f"{name} is a JAX tracer ({type(value).__name__}), and cuattn takes no part in JAX's transformations; "
                "call it outside jax.jit, jax.grad and jax.vmap (jax.lax.stop_gradient does not help inside them), "
                "or wrap cuattn.forward and cuattn.backward in a jax.custom_vjp that calls them by jax.pure_callback"
            )
        if value.is_deleted():
            raise DtypeError(f"{name} is a JAX array whose buffer was deleted or donated; expected a live array")
        if len(value.devices()) != 1:
            raise UnsupportedError(
                f"{name} is spread over {len(value.devices())} devices; expected an array on one device"
            )
        (device,) = value.devices()
        if device.platform == "cpu":
            try:
                return np.asarray(value), ("cpu", 0, device)
            except TypeError as error:
                raise DtypeError(f"{name} has dtype {value.dtype}, which NumPy cannot read: {error}") from error
        if device.platform in ("gpu", "cuda"):
            cupy = device_array_module(name, value)
            return cupy.from_dlpack(value), ("cuda", value.__dlpack_device__()[1], device)
        raise UnsupportedError(f"{name} is on JAX platform {device.platform!r}; expected 'cpu' or 'gpu'")

    @staticmethod
    def give(array, handle):
        """Return a JAX array over the memory of `array`, on the device `handle`."""
        jax = sys.modules["jax"]
        if not isinstance(array, np.ndarray):
            return jax.dlpack.from_dlpack(array)
        if array.dtype != np.float64:
            return jax.device_put(array, handle)
        enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
        with enable_x64(True):  # a float64 argument was made under it; outside, JAX would round the result
            return jax.device_put(array, handle)
