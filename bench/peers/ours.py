"""cuattn itself, through its public functions: on PyTorch tensors, or on CuPy or NumPy arrays over their memory."""

import importlib

from bench.beside import ALIAS
from bench.cases import TOGETHER
from bench.inputs import DROPOUT_STATE
from bench.mask_samples import column_mask
from bench.peers.base import Bound, Runner, names

__all__ = ["Ours"]

BANDS = ("full", "causal", "sliding_window")  # masks that is_causal and window can say


class Ours(Runner):
    """cuattn, with the plan's choice of kernel or a given one.  On the host it gets NumPy arrays.

    Parameters
    ----------
    name : str
        ``cuattn``, or ``base`` for the other checkout that `bench.beside` loaded; then, behind a dash, one of ``sm90``,
        ``sm80``, ``cpu`` (a kernel), ``band`` (full, causal and window masks by ``is_causal`` and ``window`` instead of
        column vectors), ``cupy`` (CuPy arrays over the tensors' memory), ``attention`` (o alone).
    """

    compile_seconds = 2.0

    def __init__(self, name):
        package, _, self._way = name.partition("-")
        self.name, self.ours = name, package == "cuattn"
        self._package = "cuattn" if self.ours else ALIAS

    def unsupported_reason(self, case):
        if self._way == "band" and case.mask not in BANDS:
            return "only for masks that are bands"
        if self._way == "attention" and case.direction != "forward":
            return "gives o alone, which no backward follows"
        return None

    def options(self, case, inputs):
        """Return the keyword arguments that `forward` and `backward` share."""
        options = {}
        band = self._way == "band"
        if case.causal or (band and case.mask == "causal"):
            options["is_causal"] = True
        elif band and case.mask == "sliding_window":
            options["window"] = (inputs.samples[0].number - 1, 0)
        elif inputs.mask is not None and not band:
            mask = inputs.mask if self.ours else column_mask(inputs.samples, self._import("masks"))
            options["mask"] = mask.to_device() if inputs.q.is_cuda else mask
        elif inputs.visible is not None:
            options["mask"] = self._arrays(inputs, inputs.visible)[0]
        if inputs.bias is not None:
            options["bias"] = self._arrays(inputs, inputs.bias)[0]
        if case.heads != case.kv_heads:
            options["enable_gqa"] = True
        if case.dropout:
            options["dropout_p"] = case.dropout
        if self._way in ("sm90", "sm80", "cpu"):
            options["kernel"] = self._way
        return options

    def bind(self, case, inputs):
        cuattn = self._import()
        options = self.options(case, inputs)
        q, k, v, do = self._arrays(inputs, inputs.q, inputs.k, inputs.v, inputs.do)
        drawn = {"rng": cuattn.RNGState(*DROPOUT_STATE)} if case.dropout else {}

        def convert(found):
            return names(case.direction, [_as_torch(x) for x in found])

        if self._way == "attention":
            return Bound(lambda: cuattn.attention(q, k, v, **options, **drawn), lambda o: convert([o]))
        if case.direction == "forward":
            plan = _plan(cuattn, q, k, v, **options, **drawn)
            return Bound(lambda: cuattn.forward(q, k, v, **options, **drawn), lambda fwd: convert([fwd.o]), plan=plan)
        exact = {"deterministic": True} if case.deterministic else {}
        plan = _plan(cuattn, q, k, v, direction="backward", **options, **drawn, **exact)

        def both():
            fwd = cuattn.forward(q, k, v, **options, **drawn)
            return fwd.o, *cuattn.backward(do, q, k, v, fwd, **options, **exact)[:3]

        if case.direction == TOGETHER:
            return Bound(both, convert, plan=plan)
        fwd = cuattn.forward(q, k, v, **options, **drawn)
        return Bound(lambda: cuattn.backward(do, q, k, v, fwd, **options, **exact), lambda x: convert(x[:3]), plan=plan)

    def _import(self, module=""):
        return importlib.import_module(f"{self._package}.{module}".rstrip("."))

    def _arrays(self, inputs, *tensors):
        """Return the tensors, or CuPy or NumPy arrays over their memory (bfloat16 goes there as integers)."""
        if inputs.q.is_cuda and self._way != "cupy":
            return list(tensors)
        import ml_dtypes
        import torch

        to_array = importlib.import_module("cupy").from_dlpack if inputs.q.is_cuda else torch.Tensor.numpy
        return [
            to_array(x.view(torch.int16)).view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else to_array(x)
            for x in tensors
        ]


def _as_torch(array):
    """Return a tensor over an array's memory."""
    import ml_dtypes
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _plan(package, *operands, **options):
    """Return the printed plan; a plan that fails must not keep the call itself from being measured."""
    try:
        return str(package.plan(*operands, **options))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
