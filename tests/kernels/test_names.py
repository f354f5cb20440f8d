"""Every constant that a kernel reads is documented in cuattn/cuda/source.py, and every documented one is read."""

import re

from cuattn.cuda import source

_USED = re.compile(r"\bcfg::(\w+)")
_ROW = re.compile(r"^((?:``\w+``(?:, )?)+)\s+(?:int|bool|type|float)\b", re.MULTILINE)


def test_constants_are_documented():
    files = [path for path in source.kernel_root().rglob("*") if path.suffix in (".cu", ".cuh")]
    used = {name for path in files for name in _USED.findall(re.sub(r"//.*", "", path.read_text(encoding="utf-8")))}
    documented = {name for row in _ROW.findall(source.__doc__) for name in re.findall(r"\w+", row)}
    assert used - documented == set()
    assert documented - used == set()
