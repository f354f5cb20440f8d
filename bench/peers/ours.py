"""cuattn itself, through its public functions: on PyTorch tensors, or on CuPy or NumPy arrays over their memory."""

import importlib

from bench.beside import ALIAS
from bench.cases import TOGETHER
from bench.harness import Calls
from bench.inputs import DROPOUT_STATE
from bench.mask_samples import column_mask
from bench.peers.base import EVERY, Bound, Runner


class Ours(Runner):
    """cuattn, with the plan's choice of kernel or a given one.  On the host it gets NumPy arrays.

    Parameters
    ----------
    name : str
        ``cuattn``, or ``base`` for the other checkout that `bench.beside` loaded; then, behind a dash, one of ``sm90``,
        ``sm80`` (a kernel), ``cupy`` (CuPy arrays over the tensors' memory), ``attention`` (o alone).
    """

    compile_seconds = 2.0
    masks = EVERY

    def __init__(self, name):
        super().__init__(name)
        package, _, self.way = name.partition("-")
        self.ours = package == "cuattn"
        self.package = "cuattn" if self.ours else ALIAS

    def unsupported_reason(self, case):
        if self.way == "attention" and case.direction != "forward":
            return "gives o alone, which no backward follows"
        return super().unsupported_reason(case)

    def options(self, case, inputs):
        """Return the keyword arguments of the calls."""
        options = {"deterministic": case.deterministic}
        if case.causal:
            options["is_causal"] = True
        elif inputs.mask is not None:
            masks = importlib.import_module(f"{self.package}.masks")
            mask = inputs.mask if self.ours else column_mask(inputs.samples, masks)
            options["mask"] = mask.to_device() if inputs.q.is_cuda else mask
        elif inputs.visible is not None:
            options["mask"] = self.array(inputs.visible)
        if inputs.bias is not None:
            options["bias"] = self.array(inputs.bias)
        if self.way in ("sm90", "sm80"):
            options["kernel"] = self.way
        return options

    def bind(self, case, inputs):
        package = importlib.import_module(self.package)
        drawn = {"dropout_p": case.dropout, "rng": package.RNGState(*DROPOUT_STATE)} if case.dropout else {}
        operands = map(self.array, inputs.operands)
        calls = Calls(*operands, package=package, **self.options(case, inputs), **drawn)

        def convert(found):
            return map(_as_torch, found)

        if self.way == "attention":
            keywords = {**calls.options, **calls.first}
            return Bound(lambda: [package.attention(*calls.operands, **keywords)], convert)
        plan = calls.plan("forward" if case.direction == "forward" else "backward")
        if case.direction == TOGETHER:
            return Bound(calls.both, convert, plan=plan)
        if case.direction == "backward":
            calls.fwd  # noqa: B018, the forward is no part of the call
        return Bound(getattr(calls, case.direction), convert, plan=plan)

    def array(self, tensor):
        """Return a tensor, or a CuPy or NumPy array over its memory (bfloat16 goes there as integers)."""
        if tensor.is_cuda and self.way != "cupy":
            return tensor
        import ml_dtypes
        import torch

        to_array = importlib.import_module("cupy").from_dlpack if tensor.is_cuda else torch.Tensor.numpy
        if tensor.dtype == torch.bfloat16:
            return to_array(tensor.view(torch.int16)).view(ml_dtypes.bfloat16)
        return to_array(tensor)


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
