"""CUDA text to machine code with NVRTC, kept on disk; machine code to functions on the current device.

Nothing here needs a GPU except :func:`load` and :func:`function`.  The disk cache lies in ``$CUATTN_CACHE_DIR``, else
``$XDG_CACHE_HOME/cuattn``, else ``~/.cache/cuattn``; its key is the NVRTC version, the options and the whole text.
Files appear by an atomic rename and begin with a digest of what follows, so any number of processes may share it, and a
damaged file, like an unwritable folder, only costs a compilation.  What lies there is loaded as code: a folder that
others may write to is not used.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from cuattn.cuda import source
from cuattn.cuda.device import device_of
from cuattn.errors import CompileError

_DIGEST = hashlib.sha256().digest_size
OPTIONS = ("--std=c++17", "--diag-suppress=1444", "--device-as-default-execution-space")


def cache_dir() -> pathlib.Path:
    """Return the folder of the disk cache (it may not exist yet)."""
    explicit = os.environ.get("CUATTN_CACHE_DIR")
    if explicit:
        return pathlib.Path(explicit).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "cuattn"


@contextlib.contextmanager
def _needed(what: str) -> Iterator[None]:
    """Say what to install if something cannot be found or loaded: a missing wheel shows up as many kinds of error."""
    try:
        yield
    except Exception as error:
        raise CompileError(
            f"{what} ({type(error).__name__}: {error}); install the extra that matches your driver: "
            '`pip install "cuattn[cuda13]"` or `pip install "cuattn[cuda12]"`'
        ) from error


@functools.lru_cache(maxsize=1)
def _include_options() -> tuple[str, ...]:
    # CuPy knows where the CUDA headers of its wheel are; the call is private, so it is made in this one place.
    from cupy._core import core

    with _needed("the CUDA headers were not found"):
        return tuple(option for option in core.assemble_cupy_compiler_options(()) if option.startswith("-I"))


@functools.lru_cache(maxsize=1)
def _nvrtc():
    with _needed("NVRTC could not be loaded"):
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    return nvrtc


def compile_log(text: str, arch: str, options: tuple[str, ...] = (), name: str = "cuattn.cu") -> tuple[bytes, str]:
    """Compile without the cache.

    Parameters
    ----------
    text : str
        Complete CUDA source, see :func:`cuattn.cuda.source.build`.
    arch : str
        Exact architecture, for example ``"sm_90"`` or ``"sm_90a"``.
    options : tuple of str, optional
        Further compiler options.

    Returns
    -------
    cubin : bytes
    log : str
        The compiler's messages.

    Raises
    ------
    CompileError
        With the compiler's log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, name, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *OPTIONS, *options, *_include_options()))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(f"{name} did not compile for {arch} ({error}):\n{log}") from None
        cubin = nvrtc.getCUBIN(program)
        # CuPy cuts the last byte, as it rightly does for text; the ELF file ends in a zero at a multiple of 8.
        return cubin + b"\0" * (-len(cubin) % 8), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def nvrtc_version() -> str:
    """Return the compiler's version, "13.0" for example: registers and spills depend on it."""
    return ".".join(map(str, _nvrtc().getVersion()))


def compile_cubin(text: str, arch: str, name: str = "cuattn.cu") -> bytes:
    """Return machine code for ``text``, from the disk cache when it is there.  Arguments as for :func:`compile_log`."""
    folder = cache_dir()
    key = hashlib.sha256("\0".join((nvrtc_version(), arch, *OPTIONS, text)).encode()).hexdigest()
    file = folder / f"{key}.cubin"
    trusted = _trusted(folder)
    cubin = _read(file) if trusted else None
    if cubin is None:
        cubin, _ = compile_log(text, arch, (), name)
        if trusted:
            _store(file, cubin)
    return cubin


@functools.lru_cache(maxsize=8)
def _trusted(folder: pathlib.Path) -> bool:
    """Return whether nobody else may write to the folder, which need not exist; warn if someone may."""
    try:
        status = folder.stat()
    except OSError:
        return True
    if not hasattr(os, "getuid") or (status.st_uid in (0, os.getuid()) and not status.st_mode & 0o022):
        return True
    warnings.warn(
        f"cuattn keeps no compiled kernels in {folder}: it would load them as code, and others may write there; "
        "expected a folder of your own (chmod go-w, or another CUATTN_CACHE_DIR)",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _read(file: pathlib.Path) -> bytes | None:
    """Return the machine code in a file of the cache, or None if it is missing or damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, cubin = content[:_DIGEST], content[_DIGEST:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _store(file: pathlib.Path, cubin: bytes) -> None:
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".") as folder:
            whole = pathlib.Path(folder, file.name)
            whole.write_bytes(hashlib.sha256(cubin).digest() + cubin)
            whole.replace(file)


def load(cubin: bytes, kernel: str, shared_bytes: int = 0):
    """Load machine code on the current device and return one function of it.

    Parameters
    ----------
    cubin : bytes
    kernel : str
        The ``extern "C"`` name.
    shared_bytes : int, optional
        Dynamic shared memory per block; when it and the static part exceed 48 KB, the function must be told.

    Returns
    -------
    cupy.cuda.Function
        Called as ``function(grid, block, args, shared_bytes, stream)``.
    """
    import cupy
    from cupy_backends.cuda.api import driver

    module = cupy.cuda.Module()
    try:
        module.load(cubin)
        found = module.get_function(kernel)
    except driver.CUDADriverError as error:
        raise CompileError(f"the driver cannot load {kernel} ({error}); expected one for these GPUs") from error
    if shared_bytes > 40 * 1024:
        max_dynamic_shared_size_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(found.ptr, max_dynamic_shared_size_bytes, shared_bytes)
    return found


@functools.lru_cache(maxsize=4096)
def function(
    device: int,
    path: str,
    kernel: str,
    constants: tuple[tuple[str, object], ...],
    shared_bytes: int,
    exact: bool,
    traced: str = "",
) -> Any:
    """Return a kernel of ``kernels/<path>`` for GPU number `device`, which must be current.

    Parameters
    ----------
    device : int
    path, kernel : str
        File and ``extern "C"`` name.
    constants : tuple of (str, object)
        What the kernel is specialised by, see :mod:`cuattn.cuda.constants`.
    shared_bytes : int
        Dynamic shared memory per block.
    exact : bool
        Whether it uses what only the device's exact architecture has, ``sm_90a`` for example.
    traced : str, optional
        The text of its score and mask functions.
    """
    arch = device_of(device).arch + "a" * exact
    return load(compile_cubin(source.build(path, dict(constants), traced), arch, name=path), kernel, shared_bytes)
