"""Arrays of any kind in, the same kind out.

:func:`to_backend` turns the arrays of one call into NumPy arrays (host memory) or CuPy arrays (device memory) that
share memory with them, and returns the :class:`~cuattn.interop.origin.ArrayOrigin` that turns results back into the
caller's kind.  A framework is recognised through ``sys.modules`` alone: an object of a framework can only exist
when that framework has been imported, so nothing is imported in order to look.

What is accepted, and what comes back:

=========================  ==================================  =====================================
argument                   seen by a backend as                result
=========================  ==================================  =====================================
``numpy.ndarray``          itself                              ``numpy.ndarray``
``cupy.ndarray``           itself                              ``cupy.ndarray``
``torch.Tensor``, CPU      NumPy, same memory                  tensor over the result's memory
``torch.Tensor``, CUDA     CuPy, same memory                   tensor, allocated by PyTorch
``jax.Array``, CPU         NumPy, same memory, read-only       ``jax.Array`` on the same device
``jax.Array``, GPU         CuPy, same memory                   ``jax.Array`` on the same device
other with ``__dlpack__``  NumPy or CuPy, same memory          its namespace's ``from_dlpack``, or else a
                                                               NumPy or CuPy array
=========================  ==================================  =====================================

Subclasses of ``numpy.ndarray`` (``memmap``, ``matrix``) are read as plain arrays and plain arrays come back, as
from most of SciPy; ``numpy.ma.MaskedArray`` is refused, since its mask would be lost without a word.  JAX copies a
NumPy result that is not aligned as XLA wants it.  bfloat16 is ``ml_dtypes.bfloat16`` on this side of the door;
NumPy cannot export it through DLPack, so for a host array of a framework other than PyTorch and JAX a bfloat16
result comes back as a NumPy array.
"""

from cuattn.errors import DtypeError
from cuattn.interop.dlpack import DLPack, Jax
from cuattn.interop.origin import ArrayOrigin, CuPy, NumPy, type_name
from cuattn.interop.outputs import Outputs
from cuattn.interop.torch_tensors import Torch

__all__ = ["ArrayOrigin", "Outputs", "signature", "to_backend", "type_name"]

# Most specific first: tensors of CuPy, PyTorch and JAX have __dlpack__ too, and dlpack takes whatever has it.
_KINDS = (NumPy, Torch, CuPy, Jax, DLPack)

_kinds = {}  # by the type of arrays that were met


def signature(arrays):
    """Return what arrays look like and where they are, without checking them.

    A call that looks like one whose arrays :func:`to_backend` took needs no other check.

    Parameters
    ----------
    arrays : dict of str to object
        Those of one call, at least one.

    Returns
    -------
    layouts : object
        Hashable: names, dtype and shape of each and, on a GPU, strides, device and alignment.
    addresses : list of int
        On a GPU.

    None stands for both when only :func:`to_backend` can tell.
    """
    values = list(arrays.values())
    kind = _kinds.get(type(values[0])) or _kind_of(values[0])
    return kind and kind.signature(tuple(arrays), values)


def to_backend(named):
    """Return NumPy or CuPy views of a call's arrays and the way back.

    Parameters
    ----------
    named : dict of str to object
        The arrays of one call, at least one, under the names that error messages use.

    Returns
    -------
    arrays : dict of str to (numpy.ndarray or cupy.ndarray)
        Views of the same memory, in the order of `named`; all NumPy or all CuPy.
    origin : ArrayOrigin
        The arrays' kind and place.

    Raises
    ------
    DtypeError
        When an argument is no array, has a dtype without a NumPy counterpart, or differs from the first array in
        kind or device.
    UnsupportedError
        When an argument takes part in automatic differentiation, lives where no backend can read it, or needs
        CuPy while CuPy cannot be imported.

    Examples
    --------
    >>> import numpy as np
    >>> arrays, origin = to_backend({"q": np.zeros((2, 3))})
    >>> arrays["q"].shape, origin
    ((2, 3), NumPy(kind='numpy', backend='cpu', device=0))
    """
    arrays = {}
    first = origin = None
    for name, value in named.items():
        kind = _kind_of(value)
        if kind is None:
            hint = "; pass numpy.asarray(...) of it" if isinstance(value, (list, tuple, float, int)) else ""
            raise DtypeError(
                f"{name} is {type_name(value)}; expected an array of NumPy, CuPy, PyTorch or JAX, "
                f"or an object with __dlpack__{hint}"
            )
        arrays[name], place = kind.take(name, value)
        if first is None:
            first, origin = name, place
        elif place is not origin and place != origin:
            raise DtypeError(
                f"{name} is {_whereabouts(value, place)}, but {first} is {_whereabouts(named[first], origin)}; "
                "all arrays of one call must be of one kind and on one device"
            )
    return arrays, origin


def _kind_of(value):
    """Return the kind of array that `value` is, or None."""
    found = _kinds.get(type(value))
    if found is None:
        found = next((kind for kind in _KINDS if kind.owns(value)), None)
        if found is not None:
            _kinds[type(value)] = found
    return found


def _whereabouts(value, place):
    """Say what `value` is and where, for an error message."""
    return f"{type_name(value)} on {'the CPU' if place.backend == 'cpu' else f'CUDA device {place.device}'}"
