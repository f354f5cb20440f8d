"""Every example in the documentation runs, and public docstrings are complete."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import cuattn
from cuattn.distributed import Comm, DistributedError, DistributedPlan

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(cuattn.__path__, "cuattn.")
    if not info.name.endswith("__main__") and not info.name.startswith("cuattn.cuda")
)
WRAPPERS = [f".{name}" for name in ("torch", "jax", "transformers") if importlib.util.find_spec(name)]
ROOMS = ("", ".masks", ".rng", ".io_model", ".reference", ".errors", ".pairwise", ".sklearn", ".distributed", *WRAPPERS)
PUBLIC = [f"cuattn{room}.{name}" for room in ROOMS for name in importlib.import_module(f"cuattn{room}").__all__]

# Of numpydoc's findings all count but that there is no more than a summary, and that fields of records, which are
# described as attributes, are no parameters.
ALLOWED = ("ES01",)
OF_RECORDS = ("PR01",)


@pytest.mark.parametrize("name", ["cuattn", *MODULES])
def test_doctests(name):
    wraps = name.split(".")[1:2] in (["torch"], ["jax"], ["transformers"], ["sklearn"])  # what may be absent
    module = pytest.importorskip(name) if wraps else importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name):
    validate = pytest.importorskip("numpydoc.validate").validate
    room, _, member = name.rpartition(".")
    value = getattr(importlib.import_module(room), member)
    if not callable(value):
        return
    record = hasattr(value, "_fields") or value in (cuattn.Plan, DistributedError, DistributedPlan, Comm)
    codes = ALLOWED + OF_RECORDS if record else ALLOWED
    found = [f"{code}: {text}" for code, text in validate(name)["errors"] if code not in codes]
    assert not found, "\n".join(found)


PAGES = sorted(
    [ROOT / "README.md", ROOT / "bench" / "README.md", ROOT / "kernels" / "README.md", *(ROOT / "cuattn").rglob("*.md")]
)
ELSEWHERE = ("tracing", "pairwise", "distributed")  # rooms whose tests run their guides; test_coming_from.py its own
GUIDES = [page for page in PAGES[1:] if page.parent.name not in ELSEWHERE and not page.name.startswith("coming_from")]


def blocks(page):
    """Return a page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def missing(block):
    """Return what a block imports that is not here: a package, or a GPU for CuPy."""
    for package in dict.fromkeys(re.findall(r"^\s*(?:import|from) (\w+)", block, flags=re.M)):
        if importlib.util.find_spec(package) is None:
            return package
        if package == "cupy" and not importlib.import_module("cupy").is_available():
            return "a GPU"
    return None


def run(block, names, page, index):
    exec(compile(block, f"{page.relative_to(ROOT)}, block {index}", "exec"), names)


def of_a_page(page):
    return pytest.param(page, id=str(page.relative_to(ROOT)))


@pytest.mark.parametrize("page", [*map(of_a_page, PAGES)])
def test_pages_name_what_exists(page):
    """Modules that are run, files that are linked or mentioned, and the extras of pip commands."""
    text = page.read_text()
    for module in set(re.findall(r"python -m ((?:bench|cuattn)[\w.]*)", text)):
        assert importlib.util.find_spec(module.rstrip(".")), module
    for path in set(re.findall(r"(?:`|python )((?:bench|kernels|tests|cuattn)/[\w./-]+)", text)):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:ptx|attn|sm80|sm90|util)/\w+\.cuh?)`", text):
        assert (ROOT / "kernels" / path).exists(), path
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        assert link.startswith("http") or (page.parent / link).exists(), link
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    for names in re.findall(r'pip install[^\n]*?"(?:\.|cuattn)\[([\w,]+)\]"', text):
        assert set(names.split(",")) <= set(extras), names


@pytest.mark.parametrize("index", range(len(blocks(ROOT / "README.md"))))
def test_readme_examples(index, tmp_path, monkeypatch, capsys):
    """Python blocks of the README run as they stand; those that need a GPU or PyTorch say so by importing it."""
    block = blocks(ROOT / "README.md")[index]
    if missing(block):
        pytest.skip(f"this example needs {missing(block)}")
    monkeypatch.chdir(tmp_path)
    run(block, {}, ROOT / "README.md", index)
    if index == 0:  # says what it prints
        assert block.strip().endswith(f"  # {capsys.readouterr().out.strip()}")


@pytest.mark.parametrize("page", [*map(of_a_page, GUIDES)])
def test_guides(page, tmp_path, monkeypatch):
    """Blocks of a guide run one after the other, those that import what is not here left out."""
    monkeypatch.chdir(tmp_path)
    names = {}
    for index, block in enumerate(blocks(page)):
        if not missing(block):
            run(block, names, page, index)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [of_a_page(page) for page in (*PAGES[:1], *GUIDES) if "cupy" in page.read_text()])
def test_examples_on_a_gpu(page, tmp_path, monkeypatch):
    """Blocks that import CuPy run where there is a GPU."""
    monkeypatch.chdir(tmp_path)
    names = {"cuattn": cuattn}
    for index, block in enumerate(blocks(page)):
        if re.search(r"^import cupy", block, flags=re.M) and not missing(block):
            run(block, names, page, index)
