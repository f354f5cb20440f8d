"""cuattn itself, through its public functions, on PyTorch tensors or CuPy arrays."""

from __future__ import annotations

from typing import Any

from bench.cases import TOGETHER, Case
from bench.inputs import DROPOUT_STATE, Inputs
from bench.peers.base import Bound, Runner, names

__all__ = ["Ours"]

BANDS = ("full", "causal", "sliding_window")  # masks that is_causal and window can say


class Ours(Runner):
    """cuattn, with the plan's choice of kernel or a given one.

    Parameters
    ----------
    kernel : str, optional
        ``kernel=`` of cuattn's functions.
    band : bool, optional
        Say full, causal and window masks by ``is_causal`` and ``window`` instead of column vectors.
    cupy : bool, optional
        Call it on CuPy arrays over the tensors' memory.
    """

    ours = True
    compile_seconds = 2.0

    def __init__(self, kernel: str | None = None, band: bool = False, cupy: bool = False) -> None:
        self.name = "cuattn" + (f"-{kernel}" if kernel else "") + ("-band" if band else "")
        self.name += "-cupy" if cupy else ""
        self._kernel = kernel
        self._band = band
        self._cupy = cupy

    def why_not(self, case: Case) -> str | None:
        if self._band and case.mask not in BANDS:
            return "only for masks that are bands"
        return None

    def options(self, case: Case, inputs: Inputs) -> dict[str, Any]:
        """Return the keyword arguments that `forward` and `backward` share."""
        options: dict[str, Any] = {}
        if case.causal or (self._band and case.mask == "causal"):
            options["is_causal"] = True
        elif self._band and case.mask == "sliding_window":
            options["window"] = (inputs.samples[0].number - 1, 0)
        elif inputs.mask is not None and not self._band:
            options["mask"] = inputs.mask.to_device() if inputs.q.is_cuda else inputs.mask
        if case.heads != case.kv_heads:
            options["enable_gqa"] = True
        if case.dropout:
            options["dropout_p"] = case.dropout
        if self._kernel:
            options["kernel"] = self._kernel
        return options

    def bind(self, case: Case, inputs: Inputs) -> Bound:
        import cuattn

        options = self.options(case, inputs)
        operands = (inputs.q, inputs.k, inputs.v, inputs.do)
        q, k, v, do = map(_as_cupy, operands) if self._cupy else operands
        back = _as_torch if self._cupy else _same
        drawn = {"rng": cuattn.RNGState(*DROPOUT_STATE)} if case.dropout else {}
        if case.direction == "forward":
            plan = _plan(q, k, v, **options, **drawn)
            return Bound(lambda: cuattn.forward(q, k, v, **options, **drawn), lambda fwd: {"o": back(fwd.o)}, plan=plan)
        exact = {"deterministic": True} if case.deterministic else {}
        plan = _plan(q, k, v, direction="backward", **options, **drawn, **exact)

        def both() -> Any:
            fwd = cuattn.forward(q, k, v, **options, **drawn)
            return fwd.o, *cuattn.backward(do, q, k, v, fwd, **options, **exact)[:3]

        if case.direction == TOGETHER:
            return Bound(both, lambda found: names(TOGETHER, map(back, found)), plan=plan)
        fwd = cuattn.forward(q, k, v, **options, **drawn)
        return Bound(
            lambda: cuattn.backward(do, q, k, v, fwd, **options, **exact),
            lambda gradients: names("backward", map(back, gradients[:3])),
            plan=plan,
        )


def _same(x: Any) -> Any:
    return x


def _as_cupy(tensor: Any) -> Any:
    """Return a CuPy array over a tensor's memory (bfloat16, which DLPack lacks on one side, goes as integers)."""
    import cupy
    import ml_dtypes
    import torch

    if tensor.dtype == torch.bfloat16:
        return cupy.from_dlpack(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
    return cupy.from_dlpack(tensor)


def _as_torch(array: Any) -> Any:
    """Return a tensor over a CuPy array's memory."""
    import ml_dtypes
    import numpy as np
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _plan(*operands: Any, **options: Any) -> str:
    """Return the printed plan; a plan that fails must not keep the call itself from being measured."""
    import cuattn

    try:
        return str(cuattn.plan(*operands, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
