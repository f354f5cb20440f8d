"""Names by which Python and the kernels know the same thing."""

import re

from cuattn.cuda import constants, source


def all_code():
    files = [path for path in source.kernel_root().rglob("*") if path.suffix in (".cu", ".cuh")]
    return "\n".join(re.sub(r"//.*", "", path.read_text(encoding="utf-8")) for path in files)


def test_constants_are_documented():
    """Every constant that a kernel reads is documented in cuattn/cuda/constants.py, and the other way round."""
    code = all_code()
    used = set(re.findall(r"\bcfg::(\w+)", code))
    mentioned = set(re.findall(r"``(\w+)``", constants.__doc__))
    rows = re.findall(r"^((?:``\w+``(?:, )?)+) +(?:int|bool|type) ", constants.__doc__, re.MULTILINE)
    assert used - mentioned == set()
    assert {name for row in rows for name in re.findall(r"\w+", row)} - used == set()


def test_arguments_are_called_p():
    """By this name Python finds the fields that a kernel reads: no other is ever given an address."""
    named = re.findall(r"\w*Params\s*(?:const\s*)?[&*]?\s*(\w+)\s*[,)]", all_code())
    assert {*named} == {"p", "params"}
    assert not re.search(r"\bparams\.(?!cuh)", all_code())  # it only initialises a member that is p
    assert source.slots_read("sm90/bwd_convert.cu", {"q.data": "q", "dq.data": "dq", "dq_acc": "dq_acc"}) == {
        "dq.data": "dq",
        "dq_acc": "dq_acc",
    }
