"""Every constant that a kernel reads is documented in cuattn/cuda/constants.py, and every documented one is read."""

import re

from cuattn.cuda import constants, source


def test_constants_are_documented():
    files = [path for path in source.kernel_root().rglob("*") if path.suffix in (".cu", ".cuh")]
    code = "\n".join(re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in files)
    used = set(re.findall(r"\bcfg::(\w+)", code))
    mentioned = set(re.findall(r"``(\w+)``", constants.__doc__))
    rows = re.findall(r"^((?:``\w+``(?:, )?)+) +(?:int|bool|type) ", constants.__doc__, re.MULTILINE)
    assert used - mentioned == set()
    assert {name for row in rows for name in re.findall(r"\w+", row)} - used == set()
