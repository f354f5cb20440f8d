"""The guides that are written from the code: the catalogue of errors and the environment variables.

``python -m tests.catalogue`` writes both pages anew; a test compares them with what is committed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cuattn import errors
from cuattn.distributed import DistributedError

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "cuattn" / "guides"

# Errors

# Of each class what its user does about it.
ADVICE = {
    errors.ArgumentError: "Give another value, or leave one of two arguments out: the message says what was expected.",
    errors.ShapeError: "Print the shapes. Operands are (..., heads, length, head_dim); for (batch, length, heads, "
    "head_dim) pass `x.swapaxes(-3, -2)`, which copies nothing. Grouped heads need `enable_gqa=True`.",
    errors.DtypeError: "Convert with `astype`, or move the arrays to one device: q, k, v and do share one dtype, and "
    "all arrays of a call one kind and one device.",
    errors.MaskError: "Build the mask by a constructor of `cuattn.masks`, or pass a boolean array or a function.",
    errors.UnsupportedError: "Nothing falls back in silence. Where a kernel was asked for by name, leave `kernel` out "
    "and see `print(cuattn.plan(...))`; where an array takes part in automatic differentiation, call the "
    "differentiable twin that the message names.",
    errors.CompileError: "Install the extra that fits the driver, `cuattn[cuda13]` or `cuattn[cuda12]`, and run "
    "`cuattn`, which reports what it finds. A compiler's log in the message is a fault of cuattn: please report it.",
    DistributedError: "`error.ranks` says what each rank complained of; all ranks raise together.",
}
_MAKERS = {"complaint": errors.ArgumentError, "refuse": errors.ArgumentError}
_WRITERS = {
    "shown",
    "str",
    "repr",
    "type_name",
    "tuple",
    "int",
    "float",
}  # of values: in a template their argument stands
_LONGEST = 24  # of an expression in a template


class Message(NamedTuple):
    """What one line of code says, with the names of values in braces; and the module that says it."""

    error: type[Exception]
    text: str
    module: str
    line: int


@functools.cache
def messages() -> list[Message]:
    """Return the messages of all errors, in the order of the code."""
    kinds = {kind.__name__: kind for kind in ADVICE} | _MAKERS
    found = []
    for path in sorted((ROOT / "cuattn").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and (kind := kinds.get(_name(node.func))):
                text = _template(node.args[0])
                if _name(node.func) == "refuse":
                    text = f"{{name}} is {{value}}; expected {text}"
                if re.search("[a-z]", re.sub(r"\{.*?\}", "", text)):  # else others make the text
                    found.append(Message(kind, text, module, node.lineno))
    return sorted(found, key=lambda message: (message.module, message.line))


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _template(node: ast.expr) -> str:
    """Write a message with the names of what is put into it."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_template, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{_value(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return f"{{{_value(node)}}}"


def _value(node: ast.expr) -> str:
    """Name a value: what writes it is left out, and of what is long all but a word."""
    while isinstance(node, ast.Call) and _name(node.func) in _WRITERS and node.args:
        node = node.args[0]
    text = ast.unparse(node).replace("self.", "").lstrip("_")
    return text if len(text) <= _LONGEST and not set(text) & set("'\"\\") else "..."


def errors_page() -> str:
    """Return the catalogue."""
    found = messages()
    bases = {kind: kind.__mro__[2 if kind.__mro__[1] is errors.CuattnError else 1].__name__ for kind in ADVICE}
    lines = [
        "# Errors",
        "",
        "Written from the code by `python -m tests.catalogue`: every error that cuattn raises on purpose, by class,",
        "then by the module that raises it. Every one is a `cuattn.CuattnError` and also the built-in exception that a",
        "NumPy user would expect. Names in braces stand for values of the call. A message names the argument, its",
        "value and what was expected.",
        "",
        "```python",
        "import numpy as np",
        "import cuattn",
        "",
        "q = np.zeros((8, 100, 64), np.float32)",
        "try:",
        "    cuattn.attention(q, q[:4], q[:4])",
        "except cuattn.ShapeError as error:  # also a ValueError",
        "    print(error)",
        "```",
        "",
        "| error | also a | messages |",
        "|---|---|---|",
    ]
    lines += [
        f"| [{kind.__name__}](#{kind.__name__.lower()}) | `{bases[kind]}` | {sum(m.error is kind for m in found)} |"
        for kind in ADVICE
    ]
    for kind in ADVICE:
        lines += ["", f"## {kind.__name__}", "", (kind.__doc__ or "").splitlines()[0], "", ADVICE[kind]]
        modules: dict[str, list[str]] = defaultdict(list)
        for message in found:
            if message.error is kind:
                modules[message.module].append(message.text)
        for module, texts in modules.items():
            lines += ["", f"In `{module}`:", "", *(f"- {_code(text)}" for text in dict.fromkeys(texts))]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Write a text of one line as code in Markdown."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


# Environment variables


class Variable(NamedTuple):
    """What an environment variable does, and for whom: "users", "tests", "measurements"."""

    whom: str
    text: str


_LAUNCHED = Variable(
    "users", "how many processes an MPI launcher has started: `cuattn.distributed.connect` then uses MPI"
)
_BLAS = Variable("users", "BLAS's threads; where neither of the two is set, ranks on one machine share its cores")
VARIABLES = {
    "CUATTN_CACHE_DIR": Variable(
        "users", "the folder of compiled kernels; a folder that others may write to is not used"
    ),
    "XDG_CACHE_HOME": Variable("users", "compiled kernels lie in its `cuattn`, unless `CUATTN_CACHE_DIR` is set"),
    "CUPY_CACHE_DIR": Variable("users", "CuPy's own folder of compiled kernels; the report of `cuattn` shows it"),
    "OMP_NUM_THREADS": _BLAS,
    "OPENBLAS_NUM_THREADS": _BLAS,
    "PMI_SIZE": _LAUNCHED,
    "PMIX_SIZE": _LAUNCHED,
    "OMPI_COMM_WORLD_SIZE": _LAUNCHED,
    "CUATTN_EXAMPLES": Variable("tests", "random examples of each property (default 40)"),
    "CUATTN_NVRTC": Variable(
        "tests", "a folder with another NVRTC to ask for registers and spills: `tests/cuda/nvrtc.py`"
    ),
    "CUATTN_FULL": Variable("tests", "set by `bench.gpu_check --full`: the product of all options runs"),
    "XLA_PYTHON_CLIENT_PREALLOCATE": Variable(
        "tests", "set to `false` unless you set it: JAX would take most of a GPU"
    ),
    "PYTEST_XDIST_WORKER": Variable("tests", "set by pytest: a worker whose CUDA context is broken ends"),
    "PATH": Variable("tests", "where `mpiexec` is looked for"),
    "CUATTN_TREES": Variable("measurements", "git ids of the sources where a copy has no `.git`: `NAME=ID,...`"),
    "CUDA_VISIBLE_DEVICES": Variable("measurements", "which GPU's clocks and temperature are noted"),
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": Variable("measurements", "set to 1 unless you set it: a rival's cache"),
    "RANK": Variable("measurements", "set by `torchrun`: a rival's ranks are measured beside"),
    "LOCAL_RANK": Variable("measurements", "set by `torchrun`: the rank's GPU"),
    "TORCH_NCCL_HIGH_PRIORITY": Variable(
        "measurements", "set to 1 unless you set it: messages of PyTorch's ranks begin before what fills a GPU"
    ),
}
_READERS = {"users": "cuattn", "tests": "tests", "measurements": "bench"}


@functools.cache
def reads() -> dict[str, set[str]]:
    """Return the files that read each environment variable: constants in functions that look at the environment."""
    found = defaultdict(set)
    for folder in _READERS.values():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "os.environ" in (text := path.read_text()) and path != Path(__file__):
                for name in _read(ast.parse(text)):
                    found[name].add(path.relative_to(ROOT).as_posix())
    return dict(found)


def _read(module: ast.Module) -> Iterator[str]:
    """Yield what looks like a variable's name in the functions, or statements of a module, with `os.environ`."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for block in (*functions, *(node for node in module.body if id(node) not in inner)):
        nodes = list(ast.walk(block))
        if not isinstance(block, ast.ClassDef) and any(_is_environment(node) for node in nodes):
            for node in nodes:
                if isinstance(node, ast.Constant) and re.fullmatch(r"[A-Z]+(_[A-Z]+)+|RANK|PATH", str(node.value)):
                    yield node.value


def _is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def environment_page() -> str:
    """Return the page of environment variables."""
    found = reads()
    titles = {"users": "For everybody", "tests": "For tests", "measurements": "For measurements"}
    lines = [
        "# Environment variables",
        "",
        "Written from the code by `python -m tests.catalogue`. None has to be set. They are read when they are needed,",
        "not when cuattn is imported.",
    ]
    for whom, title in titles.items():
        lines += ["", f"## {title}", "", "| variable | what it does | read by |", "|---|---|---|"]
        for name, variable in VARIABLES.items():
            if variable.whom == whom:
                files = ", ".join(f"`{file}`" for file in _of(sorted(found[name]), whom))
                lines.append(f"| `{name}` | {variable.text} | {files} |")
    return "\n".join(lines) + "\n"


def _of(files: Iterable[str], whom: str) -> list[str]:
    """Return the files of a reader, or where none of these reads it, of all."""
    files = list(files)
    return [file for file in files if file.startswith(_READERS[whom])] or files


PAGES = {"errors.md": errors_page, "environment.md": environment_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (GUIDES / name).write_text(page())
