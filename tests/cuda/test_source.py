"""Flattening, the prologue, and the agreement of the argument structs."""

import re

import pytest

from cuattn.cuda import compile as compiler
from cuattn.cuda import params, source
from cuattn.errors import CompileError
from tests.cuda.nvrtc import compile_log


def test_includes_are_written_out_once_with_line_marks():
    text = source.flatten("sm80/fwd.cu")
    assert '#include "' not in text and "#pragma once" not in text
    assert text.count("struct CoreParams {") == 1
    assert '#line 1 "attn/params.cuh"' in text
    marks = [line for line in text.splitlines() if line.startswith("#line")]
    assert any(mark.endswith('"sm80/fwd.cu"') and mark != '#line 1 "sm80/fwd.cu"' for mark in marks)


def test_line_marks_point_to_the_line_that_was_written():
    text = source.flatten_text('#include "ptx/types.cuh"\nint broken = ;\n', "probe.cu")
    with pytest.raises(CompileError, match=r"probe\.cu\(2\)"):
        compiler.compile_log(text, "sm_80")


def test_missing_include_names_its_origin():
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.cuh'.*probe\.cu:2"):
        source.flatten_text('\n#include "nowhere.cuh"\n', "probe.cu")


def test_prologue_types():
    text = source.prologue({"elem": "__half", "n": 3, "flag": True, "x": 0.5})
    assert "#include <cuda_fp16.h>" in text
    for line in ("using elem = __half;", "constexpr int n = 3;", "constexpr bool flag = true;"):
        assert line in text
    with pytest.raises(TypeError, match="n must be"):
        source.prologue({"n": None})


@pytest.mark.parametrize(
    ("struct", "header", "dtype"),
    [
        ("CoreParams", "attn/params.cuh", params.PARAMS),
        ("MaskParams", "util/mask_params.cuh", params.MASK_PARAMS),
        ("AddParams", "util/add.cu", params.ADD_PARAMS),
        ("MergeParams", "util/merge.cu", params.MERGE_PARAMS),
        ("MergeJvpParams", "util/merge.cu", params.MERGE_JVP_PARAMS),
        ("Tangents", "attn/tangents.cuh", params.TANGENTS),
    ],
)
def test_struct_layouts_agree(struct, header, dtype):
    checks = [f"static_assert(sizeof({struct}) == {dtype.itemsize});"]
    for name, (_, offset, *_) in dtype.fields.items():
        member = re.sub(r"\.(\d)", r"[\1]", name)
        checks.append(f'static_assert(__builtin_offsetof({struct}, {member}) == {offset}, "{name}");')
    constants = {
        "mask": 1,
        "row_warps": 1,
        "width": 1,
        "adds": True,
        **dict.fromkeys(("band_left", "band_right", "stacked", "tangents"), True),
    }
    constants |= dict.fromkeys(("acc", "part", "out", "elem", "bias_elem"), "float")
    constants |= dict.fromkeys(("softcap", "score", "bias", "tbias", "moves", "additive", "runs"), False) | {
        "dropout": 0
    }
    text = source.prologue(constants) + source.flatten(header) + "\n".join(checks)
    compile_log(text, "sm_80")


def test_lanes_meet_in_shuffles_whatever_they_found():
    """A shuffle in one branch of a conditional expression waits for lanes that took the other."""
    texts = {path: path.read_text() for path in source.kernel_root().rglob("*.cu*")}
    shuffle = r"(?:__shfl_\w+_sync)"
    bodies = re.compile(rf"__forceinline__ \w+ (\w+)\([^()]*\) \{{[^{{}}]*{shuffle}\(")
    sums = {name for text in texts.values() for name in bodies.findall(text)}
    assert "quad_sum" in sums
    branch = re.compile(rf"[?:]\s[^;:?,{{}}]*\b(?:{shuffle}|{'|'.join(sorted(sums))})\(")
    found = [f"{path.name}: {match.group()}" for path, text in texts.items() for match in branch.finditer(text)]
    assert not found
