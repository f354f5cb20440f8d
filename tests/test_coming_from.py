"""The pages for those who come from another library: what stands side by side gives the same."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

import cuattn

PAGES = sorted(Path(cuattn.__file__).with_name("guides").glob("coming_from_*.md"))
ROW = re.compile(r"^\| `(.+)` \| `(.+)` \|$", flags=re.M)
ROWS = [(page.stem, *row) for page in PAGES for row in ROW.findall(page.read_text())]
THEIRS = {"onnx": "onnx", "keops": "pykeops", "geomloss": "geomloss"}  # beside what the page imports for both columns
TOLERANCE = {"geomloss": 5e-3}  # its iteration ends where its annealing does


@pytest.fixture(scope="module")
def names():
    """Return the names that a page's program makes, by page."""
    made: dict[str, dict] = {}

    def of(stem):
        if stem not in made:
            text = (Path(cuattn.__file__).parent / "guides" / f"{stem}.md").read_text()
            (block,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.M | re.S)
            for package in ("torch", "jax"):
                if re.search(rf"^(import|from) {package}\b", block, flags=re.M):
                    pytest.importorskip(package)
            found: dict = {}
            exec(compile(block, stem, "exec"), found)
            made[stem] = found | STAND_INS.get(stem.removeprefix("coming_from_"), dict)()
        return made[stem]

    return of


@pytest.mark.parametrize(("stem", "theirs", "ours"), ROWS)
@pytest.mark.filterwarnings("ignore")
def test_both_sides_give_the_same(stem, theirs, ours, names):
    scope = names(stem)
    found = np.asarray(eval(ours, scope))
    assert np.isfinite(found).all()
    library = stem.removeprefix("coming_from_")
    if not importlib.util.find_spec(THEIRS.get(library, "numpy")):
        pytest.skip(f"cuattn's side ran; the other one needs {THEIRS[library]}")
    wanted = np.asarray(eval(theirs, scope))
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE.get(library, 2e-5), atol=TOLERANCE.get(library, 2e-5))


def test_every_page_has_a_table():
    assert {page.stem for page in PAGES} == {stem for stem, *_ in ROWS}
    assert len(PAGES) == 8 and len(ROWS) > 60


# flash-attn cannot be installed without CUDA's compiler, and xformers has no function for the CPU: what their pages use
# of them, by the textbook.  Biases are xformers' own where it is installed.


def _textbook(q, k, v, visible, *, scale=None, softcap=0.0, bias=0.0):
    """Return attention of (batch, length, heads, head_dim) and its logarithms of row sums."""
    import torch

    k, v = (x.repeat_interleave(q.shape[-2] // x.shape[-2], -2) for x in (k, v))
    q, k, v = (x.transpose(-3, -2).double() for x in (q, k, v))
    s = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    s = torch.tanh(s / softcap) * softcap if softcap else s
    s = torch.where(visible, s + bias, -torch.inf)
    return (s.softmax(-1) @ v).transpose(-3, -2).float(), s.logsumexp(-1).float()


def _flash_attn():
    """Return flash-attn's functions: causality and windows at the bottom right corner, -1 for an open side."""
    import torch

    def steps(n_queries, n_keys):
        return torch.arange(n_queries)[:, None] + n_keys - n_queries - torch.arange(n_keys)

    def flash_attn_func(
        q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        return_attn_probs=False,
    ):  # fmt: skip
        back = steps(q.shape[1], k.shape[1])
        left, right = window_size[0], 0 if causal else window_size[1]
        visible = ((back <= left) | (left < 0)) & ((-back <= right) | (right < 0))
        bias = 0.0 if alibi_slopes is None else -alibi_slopes[:, None, None] * back.abs()
        o, lse = _textbook(q, k, v, visible, scale=softmax_scale, softcap=softcap, bias=bias)
        return (o, lse, None) if return_attn_probs else o

    def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):
        owner = torch.searchsorted(cu_q[1:], torch.arange(len(q)), right=True)
        back = steps(len(q), len(k))
        return _textbook(q, k, v, (owner[:, None] == owner) & ((back >= 0) | torch.tensor(not causal)))[0]

    return {
        "flash_attn_func": flash_attn_func,
        "flash_attn_varlen_func": flash_attn_varlen_func,
        "flash_attn_qkvpacked_func": lambda qkv: flash_attn_func(*qkv.unbind(2)),
    }


def _xformers():
    """Return xformers' function and biases, which make the matrix that is added to the scores."""
    import torch

    def memory_efficient_attention(q, k, v, attn_bias=None, scale=None):
        shape = q.shape[1], k.shape[1]
        bias = attn_bias.materialize(shape) if hasattr(attn_bias, "materialize") else attn_bias
        return _textbook(q, k, v, torch.tensor(True), scale=scale, bias=0.0 if bias is None else bias)[0]

    def bias(visible):
        """Return a class of biases; `visible` says of its arguments, rows and keys what is seen."""

        class Bias:
            def __init__(self, *arguments):
                self.arguments = arguments

            def materialize(self, shape):
                i, j = torch.arange(shape[0])[:, None], torch.arange(shape[1])
                seen = visible(i, j, j.numel() - i.numel(), *self.arguments)
                return torch.zeros(shape).masked_fill(~seen, -torch.inf)

        Bias.from_seqlens = Bias
        return Bias

    def same(i, j, lengths):
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        return owner[i] == owner[j]

    biases = {
        "LowerTriangularMask": bias(lambda i, j, _: j <= i),
        "LowerTriangularFromBottomRightMask": bias(lambda i, j, more: j <= i + more),
        "LocalAttentionFromBottomRightMask": bias(lambda i, j, more, a, b: (i + more - j <= a) & (j - i - more <= b)),
        "BlockDiagonalMask": bias(lambda i, j, _, lengths: same(i, j, lengths)),
        "BlockDiagonalCausalMask": bias(lambda i, j, _, lengths: same(i, j, lengths) & (j <= i)),
    }
    if importlib.util.find_spec("xformers"):
        own = pytest.importorskip("xformers.ops.fmha.attn_bias")
        biases = {name: getattr(own, name) for name in biases}
    return {"memory_efficient_attention": memory_efficient_attention, **biases}


def _onnx():
    """Return a function that evaluates a node of ONNX by its reference; none where ONNX is not installed."""

    def attention(q, k, v, attn_mask=None, past_key=None, past_value=None, **attributes):
        from onnx import TensorProto, helper
        from onnx.reference import ReferenceEvaluator

        given = {"q": q, "k": k, "v": v, "attn_mask": attn_mask, "past_key": past_key, "past_value": past_value}
        given = {name: np.ascontiguousarray(x) for name, x in given.items() if x is not None}
        inputs = [name if name in given else "" for name in ("q", "k", "v", "attn_mask", "past_key", "past_value")]
        more = ["present_key", "present_value"] * (past_key is not None)
        node = helper.make_node("Attention", inputs, ["y", *more], **attributes)
        kinds = {np.dtype(bool): TensorProto.BOOL, np.dtype(np.float32): TensorProto.FLOAT}
        described = [helper.make_tensor_value_info(name, kinds[x.dtype], x.shape) for name, x in given.items()]
        result = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        model = helper.make_model(
            helper.make_graph([node], "one", described, result), opset_imports=[helper.make_opsetid("", 23)]
        )
        return ReferenceEvaluator(model).run(None, given)[0]

    return {"Attention": attention}


STAND_INS = {"flash_attn": _flash_attn, "xformers": _xformers}
if importlib.util.find_spec("onnx"):
    STAND_INS["onnx"] = _onnx
