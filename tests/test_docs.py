"""Every example in the documentation runs, and public docstrings are complete."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import cuattn

ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(cuattn.__path__, "cuattn.")
    if not info.name.endswith("__main__") and not info.name.startswith("cuattn.cuda")
)
WRAPPERS = [f".{name}" for name in ("jax", "transformers") if importlib.util.find_spec(name)]
ROOMS = ("", ".masks", ".rng", ".io_model", ".reference", ".errors", ".pairwise", ".sklearn", ".distributed", *WRAPPERS)
PUBLIC = [f"cuattn{room}.{name}" for room in ROOMS for name in importlib.import_module(f"cuattn{room}").__all__]

# numpydoc's codes: summary, sections, parameters and returns that are missing or do not match the signature.
CHECKED = ("GL08", "SS01", "SS02", "SS03", "PR01", "PR02", "PR03", "PR04", "RT01", "EX01")
RECORD = ("GL08", "SS01", "SS02", "SS03")  # of errors and of what functions return, whose fields say what they are


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
    record = isinstance(value, type) and (hasattr(value, "_fields") or issubclass(value, (Exception, cuattn.Plan)))
    record = record or member in ("Comm", "DistributedPlan")
    found = [f"{code}: {text}" for code, text in validate(name)["errors"] if code in (RECORD if record else CHECKED)]
    assert not found, "\n".join(found)


def readme_blocks():
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)


def test_the_readme_names_what_exists():
    """Modules that are run, files that are linked or mentioned, and the extras of pip commands."""
    text = (ROOT / "README.md").read_text()
    for module in set(re.findall(r"python -m ((?:bench|cuattn)[\w.]*)", text)):
        assert importlib.util.find_spec(module.rstrip(".")), module
    for path in set(re.findall(r"(?:\]\(|`|python )((?:bench|kernels|tests|cuattn)/[\w./-]+)", text)):
        assert (ROOT / path).exists(), path
    extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.M)
    for names in re.findall(r'pip install[^\n]*?"\.\[([\w,]+)\]"', text):
        assert set(names.split(",")) <= set(extras), names


@pytest.mark.parametrize("index", range(len(readme_blocks())))
def test_readme_examples(index, tmp_path, monkeypatch):
    """Python blocks of the README run as they stand; those that need a GPU or PyTorch say so by importing it."""
    block = readme_blocks()[index]
    for package in ("torch", "cupy", "jax"):
        if re.search(rf"^\s*import .*\b{package}\b", block, flags=re.M):
            module = pytest.importorskip(package)
            if package == "cupy" and not module.is_available():
                pytest.skip("this example needs a GPU")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, f"README.md, block {index}", "exec"), {})
