"""cuattn itself, through its public functions: on PyTorch tensors, or on CuPy or NumPy arrays over their memory."""

import functools
import importlib

import numpy as np

from bench import score_samples
from bench.beside import ALIAS
from bench.cases import TOGETHER
from bench.harness import Calls
from bench.inputs import DROPOUT_STATE
from bench.mask_samples import column_mask
from bench.peers.base import EVERY, Bound, Runner
from bench.peers.flex import mask_function, to_device
from bench.score_samples import FORMULAS


class Ours(Runner):
    """cuattn, with the plan's choice of kernel or a given one.  On the host it gets NumPy arrays.

    Parameters
    ----------
    name : str
        ``cuattn``, or ``base`` for the other checkout that `bench.beside` loaded; then, behind a dash, one of ``sm90``,
        ``sm80`` (a kernel), ``cupy`` (CuPy arrays over the tensors' memory), ``attention`` (o alone); ``without`` the
        function or bias of the case; its column mask as a ``function``, as a ``boolean`` mask that keeps its tables, or
        as an ``array``, whose tables are made in each call.
    """

    compile_seconds = 2.0
    masks = EVERY
    scores = tuple(FORMULAS)

    def __init__(self, name):
        super().__init__(name)
        package, _, self.way = name.partition("-")
        self.ours = package == "cuattn"
        self.package = "cuattn" if self.ours else ALIAS

    def unsupported_reason(self, case):
        if self.way == "attention" and case.direction != "forward":
            return "gives o alone, which no backward follows"
        if self.way == "without" and case.score is None:
            return "the case has no function"
        return super().unsupported_reason(case)

    def options(self, case, inputs):
        """Return the keyword arguments of the calls."""
        options = {"deterministic": case.deterministic}
        if case.causal:
            options["is_causal"] = True
        elif inputs.samples:
            options["mask"] = self.mask(case, inputs)
        elif inputs.visible is not None:
            options["mask"] = self.array(inputs.visible)
        if case.score and self.way != "without":
            options |= self.function(case, inputs)
        if self.way in ("sm90", "sm80"):
            options["kernel"] = self.way
        return options

    def mask(self, case, inputs):
        """Return a column mask, or another way to say it."""
        if self.way == "function":
            return mask_function(case, inputs.samples, np.asarray)
        masks = importlib.import_module(f"{self.package}.masks")
        mask = inputs.mask if self.ours else column_mask(inputs.samples, masks)
        if self.way in ("boolean", "array"):
            matrix = self.array(to_device(inputs.q.device)(np.array(mask.dense())))
            return masks.BooleanMask(matrix) if self.way == "boolean" else matrix
        return mask.to_device() if inputs.q.is_cuda else mask

    def function(self, case, inputs):
        """Return the keyword arguments that say the case's function; what is not learned is captured."""
        formula = score_samples.formula(case)
        arrays = {name: self.array(x) for name, x in inputs.arrays.items()}
        if formula.option == "bias":
            return arrays
        if formula.option == "softcap":
            return {"softcap": score_samples.CAP}
        learned = tuple(arrays.values()) if case.learned else ()
        fixed = {} if case.learned else {name: x.cpu().numpy() for name, x in inputs.arrays.items()}
        options = {}
        if formula.visible:
            options["mask"] = capturing(formula.visible, formula.given)
        if formula.score:
            options |= {"score": capturing(formula.score, {**fixed, **formula.given}), "score_args": learned}
        return options

    def bind(self, case, inputs):
        package = importlib.import_module(self.package)
        drawn = {"dropout_p": case.dropout, "rng": package.RNGState(*DROPOUT_STATE)} if case.dropout else {}
        operands = map(self.array, inputs.operands)
        calls = Calls(*operands, package=package, **self.options(case, inputs), **drawn)

        def convert(found):
            if case.learned and case.direction == "backward":
                found = *found[:3], *([found.dbias] if "bias" in calls.options else found.dscore)
            return map(_as_torch, found)

        if self.way == "attention":
            keywords = {**calls.options, **calls.first}
            return Bound(lambda: [package.attention(*calls.operands, **keywords)], convert)
        plan = calls.plan("forward" if case.direction == "forward" else "backward")
        if case.direction == TOGETHER:
            return Bound(calls.both, convert, plan=plan)
        if case.direction == "backward":
            calls.fwd  # noqa: B018, the forward is no part of the call
        return Bound(getattr(calls, case.direction), convert, plan=plan, exact=self.way != "without")

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


def capturing(function, arrays):
    """Return a function with some of its arguments given."""
    return functools.partial(function, **arrays) if arrays else function


def _as_torch(array):
    """Return a tensor over an array's memory."""
    import ml_dtypes
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)
