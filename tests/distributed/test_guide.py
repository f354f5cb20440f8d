"""The guide's programs run as they stand, and so does the self-check."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuattn.distributed

GUIDE = Path(cuattn.distributed.__file__).parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.M | re.S)


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_programs(index):
    exec(compile(BLOCKS[index], f"README.md, block {index}", "exec"), {})


def test_self_check():
    command = [sys.executable, "-m", "cuattn.distributed"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=GUIDE.parents[2], timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all results are those of one device" in done.stdout and "GB/s" in done.stdout
