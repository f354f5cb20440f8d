"""What compiled kernels use, told by CuPy's NVRTC or by another version.

How many registers a kernel takes, and what it spills, depends on the compiler.  To ask another one than CuPy's::

    python -m pip install --target nvrtc --no-deps "nvidia-cuda-nvrtc-cu12==12.9.*" "nvidia-cuda-runtime-cu12==12.9.*"
    CUATTN_NVRTC=nvrtc python -m pytest tests/cuda -k spills
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import re
from typing import NamedTuple

from cuattn.cuda import compile as compiler
from cuattn.cuda import source

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


class Resources(NamedTuple):
    """What one kernel uses: registers per thread and bytes per thread of stack and spills."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def kernel_resources(path: str, constants: tuple, arch: str, traced: str = "") -> dict[str, Resources]:
    """Compile ``kernels/<path>`` and return what each of its kernels uses, by kernel name."""
    return resources(source.build(path, dict(constants), traced), arch, path)


def resources(text: str, arch: str, name: str = "kernel.cu") -> dict[str, Resources]:
    """Compile a text and return what each of its kernels uses, by kernel name.

    Products of warpgroups that the compiler runs one by one, of which it warns, are an error.
    """
    log = compile_log(text, arch, name)
    assert "C75" not in log, (name, log)
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


def compile_log(text: str, arch: str, name: str = "kernel.cu") -> str:
    """Compile a text and return the assembler's messages.

    The same compiler says the same of the same text: what it said is kept beside the compiled kernels.
    """
    options = ("--ptxas-options=-v",)
    key = "\0".join((version(), arch, *compiler.OPTIONS, *options, name, text))
    file = compiler.cache_dir() / "logs" / f"{hashlib.sha256(key.encode()).hexdigest()}.log"
    kept = compiler._read(file)
    if kept is not None:
        return kept.decode()
    folder = os.environ.get("CUATTN_NVRTC")
    said = _compile(folder, text, arch, name, options) if folder else compiler.compile_log(text, arch, options, name)[1]
    compiler._store(file, said.encode())
    return said


def version() -> str:
    """Return the version of the compiler that is asked."""
    folder = os.environ.get("CUATTN_NVRTC")
    if not folder:
        return compiler.nvrtc_version()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library(folder).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


@functools.cache
def _library(folder: str) -> ctypes.CDLL:
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):  # which looks for the first in the system's folders
        (file,) = (file for file in pathlib.Path(folder).glob(f"nvidia/*/lib/{name}") if "alt" not in file.name)
        library = ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
    return library


def _compile(folder: str, text: str, arch: str, name: str, options: tuple[str, ...]) -> str:
    """Compile with the NVRTC and the headers that pip installed in a folder."""
    library, program, size = _library(folder), ctypes.c_void_p(), ctypes.c_size_t()
    headers = [f"-I{include}" for include in pathlib.Path(folder).glob("nvidia/*/include")]
    arguments = [option.encode() for option in (f"-arch={arch}", *compiler.OPTIONS, *options, *headers)]
    library.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    status = library.nvrtcCompileProgram(program, len(arguments), (ctypes.c_char_p * len(arguments))(*arguments))
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert status == 0, log.value.decode()
    return log.value.decode()
