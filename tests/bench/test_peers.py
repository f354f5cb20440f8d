"""FlashAttention-3 by a stand-in for its library, whose arguments have its names; values of another width."""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.cases import BOTH, Case, select
from bench.peers import make

torch = pytest.importorskip("torch")

from bench.compare import Comparison  # noqa: E402
from bench.peers import flash  # noqa: E402

FULL = Case("t", "forward", 2, 4, 4, 96, 96, 16, dtype="bfloat16")
CASES = {
    "fa3": [
        FULL,
        replace(FULL, causal=True, kv_heads=2),
        replace(FULL, mask="sliding_window"),
        replace(FULL, n_queries=40, deterministic=True),
        replace(FULL, score="softcap"),
    ],
    "fa3-varlen": [replace(FULL, mask="document"), replace(FULL, mask="causal_document")],
}


def _attend(q, k, v, softmax_scale, is_causal, window_size_left, window_size_right, softcap):
    """Attend as (N, H, d), in float32: causal to the last key."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    s = q @ k.mT * softmax_scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    i, j = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    hidden = (j > i) & is_causal | (window_size_left >= 0) & ((i - j > window_size_left) | (j - i > window_size_right))
    return (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def fwd(
    q, k, v, *, softmax_scale, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
):  # fmt: skip
    """Stand in for ``flash_attn_3::fwd``."""
    said = softmax_scale, is_causal, window_size_left, window_size_right, softcap
    if cu_seqlens_q is None:
        o = torch.stack([_attend(*one, *said) for one in zip(q, k, v, strict=True)])
    else:
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_k.diff().max()
        lengths = cu_seqlens_q.diff().tolist()
        o = torch.cat([_attend(*one, *said) for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)])
    return o.to(q.dtype), torch.zeros(()), None, None


def bwd(dout, q, k, v, out, softmax_lse, *, deterministic=False, **options):
    """Stand in for ``flash_attn_3::bwd``."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return *torch.autograd.grad(fwd(*leaves, **options)[0], leaves, dout), softmax_lse


@pytest.fixture
def fa3(monkeypatch):
    monkeypatch.setattr(flash, "_flash_attn_3", lambda: SimpleNamespace(fwd=fwd, bwd=bwd))
    monkeypatch.setattr(flash.Fa3, "package", "")


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases], ids=str)
def test_flash_attention_3_is_asked_for_what_the_case_says(fa3, name, case, direction):
    rows = Comparison("cpu", seconds=0.0, least=2, most=2).measure(replace(case, direction=direction), make([name]))
    assert rows[name]["status"] == "ok", rows


def test_flash_attention_3_is_loaded_with_its_runtime(monkeypatch, tmp_path):
    folder = tmp_path / "flash_attn_3"
    folder.mkdir()
    for file in ("_C.so", "libcudart.so.12"):
        (folder / file).touch()
    loaded = []
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(flash.ctypes, "CDLL", lambda path, mode: loaded.append(path))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    flash._flash_attn_3.cache_clear()
    with contextlib.suppress(AttributeError):  # that library has no operators
        flash._flash_attn_3()
    assert loaded == [str(folder / "libcudart.so.12"), str(folder / "_C.so")]
    assert make(["fa3"])[0].unsupported_reason(select(["shapes"])[0]) is None
    flash._flash_attn_3.cache_clear()


@pytest.mark.parametrize("direction", BOTH)
def test_values_may_be_of_another_width(direction):
    case = replace(FULL, direction=direction, head_dim=24, head_dim_v=16, causal=True)
    assert case.flops() == replace(case, head_dim=20, head_dim_v=0).flops()
    rows = Comparison("cpu", seconds=0.0, least=2, most=2).measure(case, make(["cuattn", "math"]))
    assert [row["status"] for row in rows.values()] == ["ok", "ok"], rows
