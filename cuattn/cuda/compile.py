"""CUDA text to machine code with NVRTC, kept on disk; machine code to functions on the current device.

Nothing here needs a GPU except :func:`load`.  The disk cache lies in ``$CUATTN_CACHE_DIR``, else
``$XDG_CACHE_HOME/cuattn``, else ``~/.cache/cuattn``; its key is the NVRTC version, the options and the whole text.
Files appear by an atomic rename, so any number of processes may share it; an unwritable folder only costs the next
process a compilation.
"""

import functools
import hashlib
import os
import pathlib
import re
import tempfile
from typing import NamedTuple

from cuattn.errors import CompileError

__all__ = ["Resources", "cache_dir", "compile_cubin", "compile_log", "load", "resources"]

_OPTIONS = ("--std=c++17", "--diag-suppress=1444", "--device-as-default-execution-space")


class Resources(NamedTuple):
    """What one kernel uses: registers per thread and bytes per thread of stack and spills."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def cache_dir() -> pathlib.Path:
    """Return the folder of the disk cache (it may not exist yet)."""
    explicit = os.environ.get("CUATTN_CACHE_DIR")
    if explicit:
        return pathlib.Path(explicit)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "cuattn"


@functools.lru_cache(maxsize=1)
def _include_options() -> tuple[str, ...]:
    # CuPy knows where the CUDA headers of its wheel are; the call is private, so it is made in this one place.
    from cupy._core import core

    try:
        options = core.assemble_cupy_compiler_options(())
    except Exception as error:  # missing headers are a RuntimeError, and more may come
        raise CompileError(_missing("the CUDA headers were not found", error)) from error
    return tuple(option for option in options if option.startswith("-I"))


def _missing(what: str, error: Exception) -> str:
    return (
        f"{what} ({type(error).__name__}: {error}); install the extra that matches your driver: "
        '`pip install "cuattn[cuda13]"` or `pip install "cuattn[cuda12]"`'
    )


@functools.lru_cache(maxsize=1)
def _nvrtc():
    try:
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # a missing wheel shows up as many kinds of error
        raise CompileError(_missing("NVRTC could not be loaded", error)) from error
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
            nvrtc.compileProgram(program, (f"-arch={arch}", *_OPTIONS, *options, *_include_options()))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(f"{name} did not compile for {arch} ({error}):\n{log}") from None
        cubin = nvrtc.getCUBIN(program)
        # CuPy cuts the last byte, as it rightly does for text; the ELF file ends in a zero at a multiple of 8.
        return cubin + b"\0" * (-len(cubin) % 8), nvrtc.getProgramLog(program)
    finally:
        nvrtc.destroyProgram(program)


def compile_cubin(text: str, arch: str, options: tuple[str, ...] = (), name: str = "cuattn.cu") -> bytes:
    """Return machine code for ``text``, from the disk cache when it is there.  Arguments as for :func:`compile_log`."""
    version = ".".join(map(str, _nvrtc().getVersion()))
    key = hashlib.sha256("\0".join((version, arch, *_OPTIONS, *options, text)).encode()).hexdigest()
    file = cache_dir() / f"{key}.cubin"
    try:
        return file.read_bytes()
    except OSError:
        pass
    cubin, _ = compile_log(text, arch, options, name)
    _store(file, cubin)
    return cubin


def _store(file: pathlib.Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError:
        return


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def resources(text: str, arch: str, name: str = "cuattn.cu") -> dict[str, Resources]:
    """Compile ``text`` and return what each of its kernels uses, by kernel name."""
    _, log = compile_log(text, arch, ("--ptxas-options=-v",), name)
    found: dict[str, Resources] = {}
    kernel, frame = "", (0, 0, 0)
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            kernel, frame = match[1], (0, 0, 0)
        elif match := _FRAME.search(line):
            frame = tuple(map(int, match.groups()))
        elif (match := _REGISTERS.search(line)) and kernel:
            found[kernel] = Resources(int(match[1]), *frame)
    return found


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
    module.load(cubin)
    function = module.get_function(kernel)
    if shared_bytes > 40 * 1024:
        max_dynamic_shared_size_bytes = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        driver.funcSetAttribute(function.ptr, max_dynamic_shared_size_bytes, shared_bytes)
    return function
