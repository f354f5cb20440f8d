"""The public names and signatures are a promise."""

import inspect

import pytest

import cuattn
import cuattn.errors
import cuattn.masks

SCORES = "mask=None, bias=None, is_causal=False, window=None, scale=None, softcap=None, dropout_p=0.0"
KERNEL = "enable_gqa=False, precision=None, kernel=None"
PLACES = "origin=None, out=None"
GRADIENTS = "deterministic=False, out_dtype=None, dlse=None"
SIGNATURES = {
    "attention": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, {PLACES})",
    "forward": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, out_dtype=None, {PLACES})",
    "backward": f"(do, q, k, v, fwd, /, *, {SCORES}, {KERNEL}, {GRADIENTS}, {PLACES})",
    "merge": "(*parts, out=None)",
    "plan": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, origin=None, out_dtype=None, deterministic=False, "
    "direction='forward')",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(cuattn, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(inspect.Signature(bare))
    assert text == SIGNATURES[name]


def test_names():
    assert set(cuattn.__all__) <= set(dir(cuattn))
    for name in (
        "attention",
        "forward",
        "backward",
        "merge",
        "plan",
        "RNGState",
        "Forward",
        "Gradients",
        "Plan",
        "Origin",
    ):
        assert name in cuattn.__all__
    assert cuattn.Forward._fields == ("o", "l", "m", "rng_state")
    assert cuattn.Gradients._fields == ("dq", "dk", "dv", "dbias")
    assert cuattn.RNGState._fields == ("seed", "offset")


def test_errors_are_also_builtin_errors():
    pairs = {
        "ArgumentError": ValueError,
        "ShapeError": ValueError,
        "DtypeError": TypeError,
        "MaskError": ValueError,
        "UnsupportedError": NotImplementedError,
        "CompileError": RuntimeError,
    }
    for name, builtin in pairs.items():
        error = getattr(cuattn.errors, name)
        assert issubclass(error, cuattn.errors.CuattnError)
        assert issubclass(error, builtin)


CONSTRUCTORS = (
    "full",
    "causal",
    "sliding_window",
    "causal_document",
    "document",
    "share_question",
    "global_sliding_window",
    "causal_blockwise",
    "prefix_lm_causal",
    "prefix_lm_document",
    "qk_sparse",
    "hash_sparse",
    "random_eviction",
    "eviction",
)


@pytest.mark.parametrize("name", (*CONSTRUCTORS, "ColumnMask", "BlockMask"))
def test_masks(name):
    assert hasattr(cuattn.masks, name)
