"""Arrays in .npz files: bfloat16 travels as uint16, and a file appears complete or not at all."""

import contextlib
import os
import pathlib
import stat
import tempfile
import zipfile

import ml_dtypes
import numpy as np

from cuattn.errors import ArgumentError

__all__ = ["Archive", "check_output", "write"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = ("q", "k", "v", "do", "bias")
NAMES = (*FLOATS, "mask", "dtype")


class Archive:
    """The arrays of a problem in an .npz file, known by shape and dtype before any is loaded.

    What a file unpacks to may be a thousand times its size, so shapes are checked first.

    Parameters
    ----------
    path : str
        An .npz file, compressed or not.  Pickled objects in it are never loaded.
    required : tuple of str
        The entries that must be there.

    Attributes
    ----------
    path : str
        The file.
    names : list of str
        The entries but ``dtype``.

    Raises
    ------
    ArgumentError
        When the file is no such file; the message is one line that begins with its path.
    """

    def __init__(self, path, required):
        self.path = path
        with self._readable():
            if not zipfile.is_zipfile(path):
                with open(path, "rb"):
                    raise ArgumentError(f"{path} is not an .npz file; expected what numpy.savez writes")
            self._zip = zipfile.ZipFile(path)
            members = {info.filename.removesuffix(".npy"): info for info in self._zip.infolist()}
            if unknown := [name for name in members if name not in NAMES]:
                raise ArgumentError(f"{path} has entries {unknown}; expected only {', '.join(NAMES)}")
            if missing := [name for name in required if name not in members]:
                held = ", ".join(members) or "nothing"
                raise ArgumentError(f"{path} has no {' and no '.join(missing)}; it holds {held}")
            self._headers = {name: self._header(name, info) for name, info in members.items()}
        declared = self._declared()
        self.names = [name for name in members if name != "dtype"]
        self._dtypes = {name: self._dtype(name, declared) for name in self.names}

    def stand_in(self, name):
        """Return an array with the shape and dtype of an entry whose elements share one row of memory."""
        shape, _ = self._headers[name]
        dtype = self._dtypes[name]
        row = np.zeros(shape[-1:], dtype)
        return np.lib.stride_tricks.as_strided(row, shape, (*(0 for _ in shape[:-1]), *row.strides), writeable=False)

    def load(self, name):
        """Return an entry in this machine's byte order; where ``dtype`` says bfloat16, 16-bit words are bfloat16."""
        with self._readable(), self._zip.open(f"{name}.npy") as file:
            array = np.lib.format.read_array(file)
        dtype = self._dtypes.get(name, array.dtype)
        return array.astype(array.dtype.newbyteorder("="), copy=False).view(dtype)

    @contextlib.contextmanager
    def _readable(self):
        """Say of what goes wrong in a damaged file which file it is, in one line."""
        try:
            yield
        except ArgumentError:
            raise
        except Exception as error:  # it may go wrong in zipfile, zlib, struct or NumPy's header parser
            text = " ".join(str(error).split()) if not isinstance(error, OSError) else error.strerror or str(error)
            raise ArgumentError(f"{self.path} cannot be read: {text or type(error).__name__}") from error

    def _header(self, name, info):
        """Return the shape and the dtype that an entry says it has, after comparing them with its size."""
        if not info.filename.endswith(".npy"):
            raise ArgumentError(f"{self.path}: {name} is not an array")
        with self._zip.open(info) as file:
            version = np.lib.format.read_magic(file)
            parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = parse(file)
            start = file.tell()
        if dtype.hasobject:
            raise ArgumentError(f"{self.path}: {name} holds Python objects, which are never loaded")
        size = dtype.itemsize * np.prod(shape, dtype=object)
        if start + size != info.file_size:
            held = f"{info.file_size - start} bytes"
            raise ArgumentError(f"{self.path}: {name} holds {held}; expected {size} for {dtype} of shape {shape}")
        return shape, dtype

    def _declared(self):
        """Return the entry ``dtype`` as a string, None without it."""
        if "dtype" not in self._headers:
            return None
        shape, dtype = self._headers["dtype"]
        value = self.load("dtype").item() if np.prod(shape) == 1 and dtype.itemsize < 256 else None
        name = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if not isinstance(name, str):
            raise ArgumentError(f"{self.path}: dtype is {dtype} of shape {shape}; expected one string, like 'bfloat16'")
        return name

    def _dtype(self, name, declared):
        """Return the dtype that an entry has once it is loaded."""
        dtype = self._headers[name][1]
        if name in FLOATS and dtype.itemsize == 2 and dtype.kind in "uV":  # V2: what numpy.savez makes of bfloat16
            if declared != "bfloat16":
                raise ArgumentError(
                    f"{self.path}: {name} has dtype {dtype}; for bfloat16 stored as uint16, add an entry "
                    f"dtype = 'bfloat16' (it is {declared!r})"
                )
            return BFLOAT16
        if name in ("q", "k", "v", "do") and declared not in (None, dtype.name):
            raise ArgumentError(f"{self.path}: {name} has dtype {dtype}, but the entry dtype says {declared!r}")
        return dtype.newbyteorder("=")


def check_output(path):
    """Raise where a file could not be written, before anything is computed."""
    found = _status(path)
    folder = pathlib.Path(os.path.realpath(path)).parent
    if found is None or stat.S_ISREG(found.st_mode):
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ArgumentError(f"--output {path} cannot be written; expected a file in an existing, writable folder")
    elif stat.S_ISDIR(found.st_mode):
        raise ArgumentError(f"--output {path} is a folder; expected a file")
    # Root may write anything, but whoever took all write permissions from a file wants to keep it.
    if found is not None and not (os.access(path, os.W_OK) and found.st_mode & 0o222):
        raise ArgumentError(f"--output {path} is read-only; expected a file that may be replaced")


def write(path, arrays):
    """Write arrays; a regular file is replaced, with its permissions, only once the new one is complete.

    Parameters
    ----------
    path : str
        The file, named exactly so.  A device or a pipe is written into.
    arrays : dict of str to (numpy.ndarray or None)
        None is left out.  bfloat16 is stored as uint16, and then an entry ``dtype`` = "bfloat16" is added.
    """
    stored = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
    if any(array.dtype == BFLOAT16 for array in stored.values()):
        stored = {name: a.view(np.uint16) if a.dtype == BFLOAT16 else a for name, a in stored.items()}
        stored["dtype"] = np.array("bfloat16")
    found = _status(path)
    if found is not None and not stat.S_ISREG(found.st_mode):
        with open(path, "wb") as file:
            np.savez(file, **stored)
        return
    target = pathlib.Path(os.path.realpath(path))
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".cuattn-", suffix=".tmp", delete=False) as file:
        try:
            np.savez(file, **stored)
            file.close()
            _keep_permissions(file.name, found)
            os.replace(file.name, target)
        except BaseException:
            os.unlink(file.name)
            raise


def _status(path):
    """Return what a path leads to, None when there is nothing."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _keep_permissions(path, found):
    """Give a private file the permissions of the file that it will replace, or those of any new file."""
    if found is None:
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(path, 0o666 & ~umask)
        return
    with contextlib.suppress(OSError, AttributeError):  # only root may give a file away
        os.chown(path, found.st_uid, found.st_gid)
    os.chmod(path, stat.S_IMODE(found.st_mode))
