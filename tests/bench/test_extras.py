"""The commands run where the extras are installed: what they import is declared, peers are imported late."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LATE = {"bench/llama", "bench/fuzz", "bench/gallery"}  # imported by functions that need them


def declared(*names):
    text = (ROOT / "pyproject.toml").read_text()
    lists = [re.search(rf"^{name} = \[(.*?)\]", text, re.M | re.S).group(1) for name in names]
    return {re.match(r"[\w-]+", item).group().replace("-", "_") for x in lists for item in re.findall(r'"(.+?)"', x)}


def imported(file):
    """Return the packages that a module imports as it is imported itself."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"bench", "cuattn", "tests"}


def test_what_the_commands_import_is_in_the_extras():
    known = declared("dependencies", "bench")
    assert {"rich", "pandas", "matplotlib"} <= known
    for file in (ROOT / "bench").rglob("*.py"):
        place = file.relative_to(ROOT).as_posix()
        if place != "bench/gpu_check.py" and not place.startswith(tuple(LATE)):
            assert imported(file) <= known, place


def test_the_page_says_what_to_install():
    text = (ROOT / "bench" / "README.md").read_text()
    measured = text[text.index("<!-- measured") : text.index("<!-- /measured")]
    assert '".[bench]"' in " ".join(measured.split())
    assert "PyTorch" in measured.split("###")[0]
