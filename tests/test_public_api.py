"""The public names and signatures are a promise."""

import importlib
import inspect
import pkgutil
import re

import pytest

import cuattn
import cuattn.errors
import cuattn.masks
from cuattn.api import documented_by

FUNCTION = "score=None, score_args=()"
SCORES = f"mask=None, bias=None, {FUNCTION}, is_causal=False, window=None, scale=None, softcap=None, dropout_p=0.0"
KERNEL = "enable_gqa=False, precision=None, kernel=None"
PLACES = "origin=None, out=None"
GRADIENTS = "deterministic=False, out_dtype=None, dlse=None"
TANGENTS = "tq=None, tk=None, tv=None, tbias=None, tscore_args=None"
SIGNATURES = {
    "attention": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, {PLACES})",
    "forward": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, out_dtype=None, {PLACES})",
    "backward": f"(do, q, k, v, fwd, /, *, {SCORES}, {KERNEL}, {GRADIENTS}, {PLACES})",
    "jvp": f"(q, k, v, /, *, {TANGENTS}, {SCORES}, rng=None, {KERNEL}, out_dtype=None, {PLACES})",
    "backward_jvp": f"(do, q, k, v, jvp, /, *, tdo=None, {TANGENTS}, {SCORES}, {KERNEL}, {GRADIENTS}, {PLACES})",
    "double_backward": "(gdq, gdk, gdv, do, q, k, v, fwd, /, *, gdbias=None, gdscore=None, "
    f"{SCORES}, {KERNEL}, {GRADIENTS}, {PLACES})",
    "merge": "(*parts, out=None)",
    "plan": f"(q, k, v, /, *, {SCORES}, rng=None, {KERNEL}, origin=None, out_dtype=None, deterministic=False, "
    "direction='forward')",
}


# Every module at the top is public, or the docstring of cuattn says that it is internal.
ROOMS = {"errors", "masks", "rng", "pairwise", "distributed", "io_model", "reference"}
WRAPPERS = {"torch", "jax", "transformers", "sklearn"}
INTERNAL = {"api", "cli", "cpu", "cuda", "derivatives", "dispatch", "interop", "plans", "problem", "results", "scoring"}


def test_the_public_rooms_are_named():
    text = " ".join(cuattn.__doc__.split())
    named = text[text.index("Public are") : text.index("All other modules are internal")]
    assert set(re.findall(r"``(\w+)``", named)) - {"__all__"} == ROOMS | WRAPPERS
    found = {info.name for info in pkgutil.iter_modules(cuattn.__path__)} - {"__main__"}
    assert found == ROOMS | WRAPPERS | INTERNAL | {"tracing"}


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_what_rooms_offer_is_their_own(room):
    """A public name is no module and no import by accident."""
    module = importlib.import_module(f"cuattn.{room}")
    assert module.__doc__ and len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert not name.startswith("_") and not inspect.ismodule(getattr(module, name)), name
        assert getattr(getattr(module, name), "__module__", room).startswith((f"cuattn.{room}", room)), name


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(cuattn, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    text = str(inspect.Signature(bare))
    assert text == SIGNATURES[name]


def test_names():
    assert set(cuattn.__all__) <= set(dir(cuattn))
    results = {"Forward", "Jvp", "Gradients", "DoubleGradients"}
    assert {*SIGNATURES, *results, "RNGState", "Plan", "Origin"} <= set(cuattn.__all__)
    assert cuattn.Forward._fields == ("o", "l", "m", "rng_state")
    assert cuattn.Gradients._fields == ("dq", "dk", "dv", "dbias")
    assert cuattn.Jvp._fields == ("o", "l", "m", "rng_state", "to", "tlse")
    assert cuattn.DoubleGradients._fields == ("ddo", "dq", "dk", "dv", "dbias")
    assert cuattn.RNGState._fields == ("seed", "offset")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (cuattn.errors.ArgumentError, ValueError),
        (cuattn.errors.ShapeError, ValueError),
        (cuattn.errors.DtypeError, TypeError),
        (cuattn.errors.MaskError, ValueError),
        (cuattn.errors.UnsupportedError, NotImplementedError),
        (cuattn.errors.CompileError, RuntimeError),
    ],
)
def test_errors_are_also_builtin_errors(error, builtin):
    assert issubclass(error, (cuattn.errors.CuattnError)) and issubclass(error, builtin)


def test_masks():
    names = {
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
        "ColumnMask",
        "BlockMask",
    }
    assert names <= set(cuattn.masks.__all__)


@pytest.mark.parametrize("docstring", ["Sum.\n\n    <a>\n    ", "Sum.\n\n<a>\n"])
def test_shared_paragraphs_are_indented_as_docstrings_are(docstring):
    """From Python 3.13 on these come without their indentation."""

    def function():
        pass

    function.__doc__ = docstring
    documented_by({"a": "x : int\n        A number."})(function)
    assert function.__doc__ == "Sum.\n\nx : int\n    A number.\n"
