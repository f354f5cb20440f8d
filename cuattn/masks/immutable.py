"""Values that never change, compare by content, pickle, and lie on the host or on one GPU."""

from abc import ABC
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import numpy as np

from cuattn.errors import DtypeError, MaskError, expect_no_tracing
from cuattn.masks import checks
from cuattn.masks.device import Ready, current_stream, load_cupy, namespace, there, upload
from cuattn.masks.runs import Reach

Self = TypeVar("Self", bound="Immutable")


class Immutable(ABC):
    """What a mask is apart from masking: its array `_array`, if it has one, lies on the host or on one GPU.

    Two on the host are equal if they hold the same numbers; one on a GPU equals only itself, because comparing would
    have to read it back.
    """

    _array: Any
    _parameters: tuple[Any, ...]
    _cache: dict[Any, Any]  # what is made once for a GPU and kept: copies of the mask, tables of kernels
    _ready: Ready | None = None

    _parameter_names: ClassVar[tuple[str, ...]] = ()
    """The attributes that, with `_array`, make the mask."""

    reach: Reach | None = None
    """The band that a mask is, where that is known, see `ColumnMask.reach`."""

    def _settle(self, array: Any, *parameters: Any, **known: Any) -> None:
        """Freeze the mask around a trusted array, which it takes over, its parameters and what else is known of it."""
        expect_no_tracing()
        if isinstance(array, np.ndarray):
            array.setflags(write=False)
        elif array is not None and "_ready" not in known:
            with array.device:
                known["_ready"] = Ready(current_stream())
        named = zip(self._parameter_names, parameters, strict=True)
        vars(self).update(named, **known, _array=array, _parameters=parameters, _cache={})
        vars(self).update(self._derived())

    def _derived(self) -> dict[str, Any]:
        """Return the attributes that follow from the array and the parameters."""
        return {}

    @classmethod
    def _wrap(cls: type[Self], array: Any, *parameters: Any, **known: Any) -> Self:
        """Build a mask from what `_settle` takes, which is not checked."""
        mask = object.__new__(cls)
        mask._settle(array, *parameters, **known)
        return mask

    def __setattr__(self, name: str, *value: Any) -> None:
        raise AttributeError(f"cannot change {name}: {type(self).__name__} is immutable")

    def __delattr__(self, name: str) -> None:
        self.__setattr__(name)

    def __copy__(self: Self, memo: Any = None) -> Self:
        return self

    __deepcopy__ = __copy__

    def __reduce__(self) -> tuple[Any, ...]:
        if self.on_device:
            raise MaskError(f"{self!r} cannot be pickled: expected a mask on the host (see to_host)")
        return type(self)._wrap, (self._array, *self._parameters)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self is other or self.on_device or other.on_device:
            return self is other
        return self._parameters == other._parameters and np.array_equal(self._array, other._array)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        if self.on_device:
            return id(self)
        content = self._array is not None and (self._array.shape, self._array.tobytes())
        return hash((type(self), self._parameters, content))

    @property
    def device(self) -> int | None:
        """Index of the GPU that holds the mask; None on the host."""
        return int(self._array.device.id) if self.on_device else None

    @property
    def on_device(self) -> bool:
        """Whether the mask lies on a GPU."""
        return not (self._array is None or isinstance(self._array, np.ndarray))

    @property
    def _where(self) -> str:
        return f"on GPU {self.device}" if self.on_device else "on the host"

    def to_device(self: Self, device: int | None = None) -> Self:
        """Return this mask on a GPU; the copy is made once per device and kept.

        Parameters
        ----------
        device : int, optional
            Index of the GPU; by default CuPy's current device or, for a mask that is on a GPU, its own.

        Returns
        -------
        mask
            Of the same type, in GPU memory that all streams may read.

        Raises
        ------
        DtypeError
            The mask is on another GPU.
        UnsupportedError
            CuPy is not installed.

        Notes
        -----
        Calls with CuPy arrays do this by themselves.  Do it ahead when the first such call will be captured in a
        CUDA graph.
        """
        if device is not None:
            device = checks.integer("device", device)
        if self._array is None or (self.on_device and device in (None, self.device)):
            return self
        if self.on_device:
            raise DtypeError(f"device = {device}: expected {self.device}, where this mask is")
        device = int(load_cupy("device").cuda.Device().id) if device is None else device
        key = ("device", device)
        if key not in self._cache:
            # The upload has been waited for; nobody could tell the band of a copy without reading it back.
            twin = self._wrap(upload(self._array, device), *self._parameters, _ready=None, reach=self.reach)
            self._cache.setdefault(key, twin)
        return self._cache[key]

    def to_host(self: Self) -> Self:
        """Return this mask on the host; from a GPU this copies and waits.

        Returns
        -------
        mask
            Of the same type; bounds outside the problem come back clamped.
        """
        if not self.on_device:
            return self
        with self._scope():
            return self._wrap(self._array.get(), *self._parameters)

    def _wait(self) -> None:
        """Make CuPy's current stream wait until the device vectors are written; free when they are."""
        if self._ready is not None:
            self._ready.wait(current_stream())

    @contextmanager
    def _scope(self) -> Iterator[ModuleType]:
        """Yield the module that computes on the mask, with its device current and its vectors written."""
        with there(self._array):
            self._wait()
            yield namespace(self._array)
