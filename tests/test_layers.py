"""The house has one-way stairs: every import points to a lower layer."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "cuattn"

# A module may import those of its own room and of the rooms named here.
GROUND = {"errors"}
BASE = {"errors", "rng", "io_model"}
ALLOWED = {
    "errors": set(),
    "rng": GROUND | {"io_model"},
    "io_model": GROUND,
    "masks": BASE,
    "plans": BASE,
    "reference": BASE | {"masks"},
    "problem": BASE | {"masks"},
    "cpu": BASE | {"masks", "problem", "plans"},
    "cuda": BASE | {"masks", "problem", "plans"},
    "interop": GROUND,
    "results": BASE,
    "dispatch": BASE | {"masks", "problem", "plans", "interop", "cpu", "cuda"},
    "api": BASE | {"masks", "problem", "plans", "interop", "results", "dispatch"},
}
TOP = {"__init__", "__main__", "cli"}  # these see everything


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


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    here = room(path)
    if here in TOP:
        return
    assert here in ALLOWED, f"{here} has no place in the layers"
    for there, line in imported_rooms(path):
        assert there == here or there in ALLOWED[here], f"{path}:{line}: {here} imports {there}"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_gpu_libraries_are_imported_late(path):
    """CuPy, PyTorch and JAX are never imported at module level."""
    for node in ast.parse(path.read_text()).body:
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        roots = {name.split(".")[0] for name in names}
        assert not roots & {"cupy", "torch", "jax", "cupy_backends"}, f"{path}:{node.lineno}"


def test_import_loads_numpy_alone():
    code = (
        "import sys, numpy, ml_dtypes; before = set(sys.modules); import cuattn; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'cuattn'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_import_is_quick():
    # The processor's time, which is the clock's on an idle machine, and does not count what else the machine does.
    code = "import time, numpy, ml_dtypes; t = time.process_time(); import cuattn; print(time.process_time() - t)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(5)
    )
    assert best < 0.15, f"import cuattn took {best:.3f} s beyond NumPy"
