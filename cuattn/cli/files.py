"""Arrays in .npz files: bfloat16 travels as uint16, and a file appears complete or not at all."""

import os
import pathlib
import zipfile

import ml_dtypes
import numpy as np

from cuattn.errors import ArgumentError

__all__ = ["check_output", "read", "write"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("q", "k", "v", "do", "bias")
NAMES = (*FLOATS, "mask", "dtype")


def read(path, required):
    """Read the arrays of a problem.

    Parameters
    ----------
    path : str
        An .npz file, compressed or not.  Pickled objects in it are never loaded.
    required : tuple of str
        The entries that must be there.

    Returns
    -------
    dict of str to numpy.ndarray
        The entries but ``dtype``, in this machine's byte order.  Where ``dtype`` says bfloat16, those of q, k, v,
        do and bias that hold 16-bit words are bfloat16.

    Raises
    ------
    ArgumentError
        When the file is no such file; the message is one line that begins with its path.
    """
    try:
        if not zipfile.is_zipfile(path):
            with open(path, "rb"):
                raise ArgumentError(f"{path} is not an .npz file; expected what numpy.savez writes")
        with np.load(path, allow_pickle=False) as file:
            names = file.files
            if unknown := [name for name in names if name not in NAMES]:
                raise ArgumentError(f"{path} has entries {unknown}; expected only {', '.join(NAMES)}")
            if missing := [name for name in required if name not in names]:
                held = ", ".join(names) or "nothing"
                raise ArgumentError(f"{path} has no {' and no '.join(missing)}; it holds {held}")
            arrays = {name: file[name] for name in names}
    except ArgumentError:
        raise
    except Exception as error:  # a damaged archive fails in zipfile, zlib, struct or NumPy's header parser
        text = " ".join(str(error).split()) if not isinstance(error, OSError) else error.strerror or str(error)
        raise ArgumentError(f"{path} cannot be read: {text or type(error).__name__}") from error
    return _decode(path, arrays)


def _decode(path, arrays):
    """Return native arrays, with bfloat16 made out of its 16-bit words."""
    declared = arrays.pop("dtype", None)
    if declared is not None:
        declared = _dtype_name(path, declared)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{path}: {name} is not an array")
        words = array.dtype.itemsize == 2 and array.dtype.kind in "uV"  # V2: what numpy.savez makes of bfloat16
        if name in FLOATS and words:
            if declared != "bfloat16":
                raise ArgumentError(
                    f"{path}: {name} has dtype {array.dtype}; for bfloat16 stored as uint16, add an entry "
                    f"dtype = 'bfloat16' (it is {declared!r})"
                )
            arrays[name] = array.astype("u2" if array.dtype.kind == "u" else array.dtype).view(BFLOAT16)
            continue
        if name in ("q", "k", "v", "do") and declared not in (None, array.dtype.name):
            raise ArgumentError(f"{path}: {name} has dtype {array.dtype}, but the entry dtype says {declared!r}")
        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return arrays


def _dtype_name(path, declared):
    """Return the ``dtype`` entry as a string."""
    value = declared.item() if declared.size == 1 else None
    name = value.decode("ascii", "replace") if isinstance(value, bytes) else value
    if not isinstance(name, str):
        raise ArgumentError(f"{path}: dtype is {declared!r}; expected one string, such as 'bfloat16'")
    return name


def check_output(path):
    """Raise where a file could not be written, before anything is computed."""
    target = pathlib.Path(os.path.realpath(path))
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise ArgumentError(f"--output {path} cannot be written; expected a file in an existing, writable folder")


def write(path, arrays):
    """Write arrays, replacing an existing file only once the new one is complete.

    Parameters
    ----------
    path : str
        The file, named exactly so.
    arrays : dict of str to (numpy.ndarray or None)
        None is left out.  bfloat16 is stored as uint16, and then an entry ``dtype`` = "bfloat16" is added.
    """
    target = pathlib.Path(os.path.realpath(path))
    stored = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    if any(array.dtype == BFLOAT16 for array in stored.values()):
        stored = {name: a.view(np.uint16) if a.dtype == BFLOAT16 else a for name, a in stored.items()}
        stored["dtype"] = np.array("bfloat16")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **stored)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
