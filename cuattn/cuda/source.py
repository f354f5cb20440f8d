"""One kernel file and its includes as one text, with the constants it is specialised for in front.

``#include "..."`` lines are replaced by the file they name (relative to ``kernels/``, each file once, with ``#line``
marks so that compiler messages name the file that was written).  The text is therefore complete: it is the key of the
compile cache, and no include path leads to our own files.

In front stands the prologue, ``namespace cfg { ... }``: a Python ``bool``, ``int`` or ``float`` becomes a
``constexpr`` of that type, a ``str`` a type alias.  Kernels branch on it with ``if constexpr``;
:mod:`cuattn.cuda.constants` lists the names.

The text of a score or mask function (:func:`cuattn.tracing.source`) stands where kernels include
``attn/functions.cuh``, which declares the same for kernels without one.
"""

import functools
import pathlib
import re
from collections.abc import Mapping
from importlib import resources

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')
_CONSTANT, _FIELD, _COMMENT = re.compile(r"\bcfg::(\w+)"), re.compile(r"\bp\.(\w+)"), re.compile("//.*")
_TYPES = {bool: "bool", int: "int", float: "double"}
_FUNCTIONS = "attn/functions.cuh"
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}


@functools.lru_cache(maxsize=1)
def kernel_root():
    """Return the folder that holds the kernels: inside the installed package, or beside it in a checkout."""
    packaged = resources.files("cuattn") / "kernels"
    return packaged if packaged.is_dir() else pathlib.Path(__file__).resolve().parents[2] / "kernels"


@functools.lru_cache(maxsize=64)
def flatten(path: str) -> str:
    """Return the text of ``kernels/<path>`` with its quoted includes written out, each once.

    Parameters
    ----------
    path : str
        Relative to the kernel folder, with forward slashes, for example ``"sm80/fwd.cu"``.

    Returns
    -------
    str
        CUDA source that includes system headers only.
    """
    return flatten_text(_read(path, None), path)


@functools.lru_cache(maxsize=128)
def _names_read(path: str, pattern: re.Pattern = _CONSTANT) -> frozenset[str]:
    return frozenset(pattern.findall(_COMMENT.sub("", flatten(path))))


def constants_of(path: str, constants: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Return those of the constants that a kernel file, with all that it includes, reads."""
    return tuple((name, value) for name, value in constants.items() if name in _names_read(path))


def slots_read(path: str, slots: Mapping[str, str]) -> dict[str, str]:
    """Return those of the fields of ``Params``, which every file calls p, that a kernel file may read."""
    return {slot: name for slot, name in slots.items() if slot.partition(".")[0] in _names_read(path, _FIELD)}


def calls_functions(path: str) -> bool:
    """Return whether a kernel file asks for score or mask functions."""
    return not _names_read(path).isdisjoint(("score", "mask"))


def functions_text(score: str, mask: str) -> str:
    """Return what stands for ``attn/functions.cuh``: texts of a score and of a mask function; "" for neither.

    >>> print(functions_text("", "namespace traced::mask { ... }"))
    #include "attn/untraced.cuh"
    namespace traced::mask { ... }
    """
    stubs = '#include "attn/untraced.cuh"\n', '#include "attn/unmasked.cuh"\n'
    return "".join(text or stub for text, stub in zip((score, mask), stubs, strict=True)) if score or mask else ""


def flatten_text(text: str, name: str = "text", seen: set[str] | None = None, traced: str = "") -> str:
    """Return `text` with its quoted includes written out, each once.

    Parameters
    ----------
    text : str
    name : str, optional
        What compiler messages call it.
    seen : set of str, optional
        Files that are not written out again; it grows.
    traced : str, optional
        What stands for ``attn/functions.cuh``.
    """
    seen = {name} if seen is None else seen
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), 1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if line.strip() == "#pragma once" else line)
            continue
        path = include[1]
        if path not in seen:
            seen.add(path)
            included = traced if traced and path == _FUNCTIONS else _read(path, f"{name}:{number}")
            lines.append(flatten_text(included, path, seen, traced))
        lines.append(f'#line {number + 1} "{name}"')
    return "\n".join(lines) + "\n"


@functools.lru_cache(maxsize=512)
def _read(path: str, origin: str | None) -> str:
    file = kernel_root() / path
    if not file.is_file():
        by = f", included by {origin}" if origin else ""
        raise FileNotFoundError(f"kernel source {path!r} does not exist{by}")
    return file.read_text(encoding="utf-8")


def prologue(constants: Mapping[str, object]) -> str:
    """Return ``namespace cfg`` with one typed constant per item.

    Parameters
    ----------
    constants : mapping of str to bool, int, float or str
        A ``str`` names a CUDA type and becomes an alias.

    Returns
    -------
    str
        CUDA source.

    Examples
    --------
    >>> print(prologue({"elem": "float", "head_dim": 64, "bias": False}))
    namespace cfg {
    using elem = float;
    constexpr int head_dim = 64;
    constexpr bool bias = false;
    }  // namespace cfg
    <BLANKLINE>
    """
    headers = sorted({_HEADERS[value] for value in constants.values() if value in _HEADERS})
    lines = [f"#include <{header}>" for header in headers]
    lines += ["namespace cfg {", *map(_declare, constants, constants.values()), "}  // namespace cfg"]
    return "\n".join(lines) + "\n"


def _declare(name: str, value: object) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    kind = _TYPES.get(type(value))
    if kind is None:
        raise TypeError(f"prologue constant {name} must be a bool, int, float or str, got {value!r}")
    return f"constexpr {kind} {name} = {str(value).lower()};"


def build(path: str, constants: Mapping[str, object], traced: str = "") -> str:
    """Return the complete text of one specialised kernel file.

    Parameters
    ----------
    path : str
        As for :func:`flatten`.
    constants : mapping
        As for :func:`prologue`.
    traced : str, optional
        The text of its score and mask functions.
    """
    return prologue(constants) + (flatten_text(_read(path, None), path, None, traced) if traced else flatten(path))
