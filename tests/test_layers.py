"""The house has one-way stairs: every import points to a lower layer."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "cuattn"

# A module may import those of its own room and of the rows above it; cpu and cuda, in one row, never each other.
ROWS = (
    {"errors"},
    {"rng", "io_model"},
    {"tracing"},
    {"masks"},
    {"plans", "problem", "results"},
    {"cpu", "cuda"},
    {"interop"},  # so that only what serves callers knows other libraries' arrays
    {"scoring"},
    {"dispatch"},
    {"api"},
    {"derivatives"},
    {"__init__"},
    {"reference", "pairwise", "distributed", "torch", "jax"},
    {"sklearn", "transformers"},
    {"cli"},
    {"__main__"},
)
NARROW = {  # rooms that see less than the rows above them
    "interop": {"errors", "io_model"},
    "reference": {"errors", "rng", "io_model"},
}
# Libraries that no module imports at its top level, but those of the rooms named here.
LATE = {
    "cupy": set(),
    "cupy_backends": set(),
    "torch": {"torch", "transformers"},
    "jax": {"jax"},
    "transformers": {"transformers"},
    "sklearn": {"sklearn"},
    "mpi4py": set(),
    "scipy": set(),
    "matplotlib": set(),
    "rich": {"cli"},
}


modules = pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path):
    """Yield the rooms of cuattn that a file imports, with the line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"cuattn.{alias.name}" for alias in node.names] if node.module == "cuattn" else [node.module]
        else:
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}:{node.lineno} imports relatively"
            continue
        for name in names:
            if name == "cuattn" or name.startswith("cuattn."):
                yield [*name.split("."), "__init__"][1], node.lineno


@modules
def test_imports_point_down(path):
    here = room(path)
    assert any(here in row for row in ROWS), f"{here} has no place in the layers"
    if here == "__init__":
        return  # it gathers the public names
    above = itertools.takewhile(lambda row: here not in row, ROWS)
    allowed = {here} | NARROW.get(here, set().union(*above))
    for there, line in imported_rooms(path):
        assert there in allowed, f"{path}:{line}: {here} imports {there}"


@modules
def test_libraries_are_imported_late(path):
    """CuPy, PyTorch, JAX and their like are never imported at module level, but by the rooms that are about them."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for root in {name.split(".")[0] for name in names} & LATE.keys():
            assert room(path) in LATE[root], f"{path}:{node.lineno}: imports {root}"


def printed(code):
    """Return what a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_numpy_alone():
    code = (
        "import sys, numpy, ml_dtypes; before = set(sys.modules); import cuattn; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'cuattn'}))"
    )
    assert printed(code) == "[]"


def test_import_is_quick():
    # The processor's time, which is the clock's on an idle machine, and does not count what else the machine does.
    code = "import time, numpy, ml_dtypes; t = time.process_time(); import cuattn; print(time.process_time() - t)"
    best = min(float(printed(code)) for _ in range(5))
    assert best < 0.15, f"import cuattn took {best:.3f} s beyond NumPy"
