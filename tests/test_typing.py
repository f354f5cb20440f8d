"""The type checker agrees with the public surface: pyright on the package, and on calls as users write them."""

import importlib
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import cuattn
from tests.test_docs import PUBLIC

X: NDArray[np.float32] = np.ones((2, 8, 4), np.float32)


def test_an_arrays_type_comes_back():
    o: NDArray[np.float32] = cuattn.attention(X, X, X, is_causal=True, mask=cuattn.masks.causal(8), window=(3, None))
    out: NDArray[np.float32] = cuattn.attention(X, X, X, out=np.empty_like(o))
    assert o.shape == out.shape


def test_results_have_named_parts():
    fwd: cuattn.Forward = cuattn.forward(
        X, X, X, dropout_p=0.5, rng=cuattn.RNGState(1, 2), origin=cuattn.Origin(key=16)
    )
    state: cuattn.RNGState | None = fwd.rng_state
    merged: cuattn.Forward = cuattn.merge(fwd, fwd)
    lse: Any = merged.lse
    gradients: cuattn.Gradients = cuattn.backward(X, X, X, X, fwd, dropout_p=0.5, origin=cuattn.Origin(key=16))
    plan: cuattn.Plan = cuattn.plan(X, X, X)
    assert (state, lse.shape, gradients.dbias, plan.kernel) == (cuattn.RNGState(1, 2), (2, 8), None, "cpu")


def test_masks_combine_to_masks():
    mask: cuattn.masks.ColumnMask = cuattn.masks.causal_document([3, 5])
    both = mask & np.ones((8, 8), bool) & cuattn.BlockMask([[True]], 8, 8)
    assert both.dense().shape == (8, 8)


def test_errors_are_the_usual_ones_too():
    with pytest.raises(ValueError) as caught:
        cuattn.attention(X, X, X, softcap=-1.0)
    error: cuattn.CuattnError = caught.value if isinstance(caught.value, cuattn.CuattnError) else cuattn.CuattnError()
    assert "softcap" in str(error)


def test_every_public_name_has_a_known_type():
    """As users' strict checkers see it; estimators have bases of scikit-learn, which has no types."""
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    command += ["--verifytypes", "cuattn", "--ignoreexternal", "--outputjson"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)["typeCompleteness"]["symbols"]
    symbols = {symbol["name"]: symbol for symbol in found}
    unknown = {name for name, of in symbols.items() if not of["isTypeKnown"] or of["isTypeAmbiguous"]}
    for name in PUBLIC:
        room, _, member = name.rpartition(".")
        value = getattr(importlib.import_module(room), member)
        if callable(value) and room != "cuattn.sklearn":
            place = f"{value.__module__}.{value.__qualname__}"
            assert place in symbols
            assert not [name for name in unknown if name == place or name.startswith(f"{place}.")]
