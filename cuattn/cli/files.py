"""Arrays in .npz files: bfloat16 travels as uint16, and a file appears complete or not at all."""

import contextlib
import math
import os
import pathlib
import secrets
import shutil

import ml_dtypes
import numpy as np

from cuattn.errors import ArgumentError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("q", "k", "v", "do", "bias")
NAMES = (*FLOATS, "mask", "dtype")


class Archive:
    """The arrays of a problem in an .npz file, described before they are loaded.

    What a file unpacks to may be a thousand times its size, so shapes are to be checked first.

    Parameters
    ----------
    path : str
        An .npz file, compressed or not.  Pickled objects in it are never loaded.
    required : tuple of str
        The entries that must be there.

    Attributes
    ----------
    arrays : dict of str to numpy.ndarray
        For each entry but ``dtype`` an array of its shape and dtype whose elements share one row of zeros.  Where
        ``dtype`` says bfloat16, those of q, k, v, do and bias that hold 16-bit words are bfloat16.

    Raises
    ------
    ArgumentError
        When the file is no such file; the message is one line that begins with its path.
    """

    def __init__(self, path, required):
        self._path = path
        with self._readable():
            self._file = np.lib.npyio.NpzFile(path)
            found = self._file.files
            if unknown := [name for name in found if name not in NAMES]:
                raise ArgumentError(f"{path} has entries {unknown}; expected only {', '.join(NAMES)}")
            if missing := [name for name in required if name not in found]:
                raise ArgumentError(
                    f"{path} has no {' and no '.join(missing)}; it holds {', '.join(found) or 'nothing'}"
                )
            headers = {name: self._header(name) for name in found}
        declared = self._declared(*headers.pop("dtype")) if "dtype" in headers else None
        self.arrays = {
            name: np.broadcast_to(np.zeros(shape[-1:], self._dtype(name, stored, declared)), shape)
            for name, (shape, stored) in headers.items()
        }

    def load(self, name):
        """Return an entry in this machine's byte order."""
        array = self._stored(name)
        return array.astype(array.dtype.newbyteorder("="), copy=False).view(self.arrays[name].dtype)

    def _stored(self, name):
        """Return an entry as it is in the file."""
        with self._readable():
            return self._file[name]

    @contextlib.contextmanager
    def _readable(self):
        """Say of what goes wrong in a damaged file which file it is, in one line."""
        try:
            yield
        except ArgumentError:
            raise
        except Exception as error:  # it may go wrong in zipfile, zlib, struct or NumPy's header parser
            text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
            raise ArgumentError(f"{self._path} cannot be read: {text}") from error

    def _header(self, name):
        """Return the shape and the dtype that an entry says it has."""
        with self._file.zip.open(f"{name}.npy") as file:
            major, _ = np.lib.format.read_magic(file)
            shape, _, dtype = getattr(np.lib.format, f"read_array_header_{min(major, 2)}_0")(file)
        return shape, dtype

    def _declared(self, shape, dtype):
        """Return the entry ``dtype`` as a string."""
        if math.prod(shape) != 1 or dtype.kind not in "SU" or dtype.itemsize > 256:
            raise ArgumentError(f"{self._path}: dtype is {dtype} of shape {shape}; expected one string like 'bfloat16'")
        return self._stored("dtype").astype(str).item()

    def _dtype(self, name, stored, declared):
        """Return the dtype that an entry has once it is loaded."""
        words = name in FLOATS and stored.itemsize == 2 and stored.kind in "uV"  # V2: numpy.savez makes it of bfloat16
        if words and declared == "bfloat16":
            return BFLOAT16
        if not words and (name in ("bias", "mask") or declared in (None, stored.name)):
            return stored.newbyteorder("=")
        hint = "; for bfloat16 stored as uint16, add an entry dtype = 'bfloat16'" if words else ""
        raise ArgumentError(f"{self._path}: {name} has dtype {stored}, but the entry dtype says {declared!r}{hint}")


def check_output(path):
    """Raise where a file could not be written, before anything is computed."""
    # Root may write anything, but whoever took all write permissions from a file wants to keep it.
    path = pathlib.Path(path)
    if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
        raise ArgumentError(f"--output {path} is read-only; expected a file that may be replaced")
    if path.is_dir() or not (_special(path) or os.access(path.resolve().parent, os.W_OK)):
        raise ArgumentError(f"--output {path} cannot be written; expected a file in an existing, writable folder")


def write(path, arrays):
    """Write arrays; a regular file is replaced, with its permissions, only once the new one is complete.

    Parameters
    ----------
    path : str
        The file, named exactly so.  A device or a pipe is written into.
    arrays : dict of str to numpy.ndarray
        bfloat16 is stored as uint16, and then an entry ``dtype`` = "bfloat16" is added.
    """
    path = pathlib.Path(path)
    if _special(path):
        _save(path, arrays)
        return
    path = path.resolve()
    part = path.with_name(f".cuattn-{secrets.token_hex(8)}")
    # Readable for nobody who may not read the complete file.
    part.touch(0o600 if path.exists() else 0o666, exist_ok=False)
    try:
        _save(part, arrays)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _save(path, arrays):
    """Write arrays into a file that may be there already."""
    stored = {name: array.view(np.uint16) if array.dtype == BFLOAT16 else array for name, array in arrays.items()}
    if BFLOAT16 in [array.dtype for array in arrays.values()]:
        stored["dtype"] = np.array("bfloat16")
    with path.open("wb") as file:
        np.savez(file, **stored)


def _special(path):
    """Tell whether there is something other than a regular file: a device, a pipe, a folder."""
    return path.exists() and not path.is_file()
