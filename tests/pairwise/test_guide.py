"""The guide's code runs, in order."""

import re
from pathlib import Path

from cuattn import pairwise


def test_guide():
    text = Path(pairwise.__file__).with_name("README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"guide, block {number}", "exec"), names)
    assert set(re.findall(r"^\| `(\w+)\(", text, flags=re.M)) == {name for name in pairwise.__all__ if name.islower()}
