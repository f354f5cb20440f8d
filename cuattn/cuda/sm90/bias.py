"""A bias in the backward for compute capability 9.0: how the main kernel takes it, and who makes its gradient.

dS is the gradient of a bias of its own, and leaves as it is.  Of one that is broadcast along rows each key tile sums
it.  What is left, a pass over pairs of tiles does (:class:`cuattn.cuda.sm90.pairs.BiasPass`), above all of a bias that
heads or sequences share.  The order is fixed in all three.
"""

import enum
import math
from typing import Any, NamedTuple

from cuattn.cuda.arguments import Array
from cuattn.cuda.constants import Constants, is_sloped
from cuattn.cuda.sm80 import backward as portable
from cuattn.cuda.sm90 import forward
from cuattn.cuda.sm90.forward import SLAB_COLUMNS
from cuattn.cuda.sm90.pairs import BiasPass
from cuattn.cuda.sm90.tensor_map import MappedCall
from cuattn.io_model.sizes import cdiv
from cuattn.problem import Problem

_CACHED = 16 << 20  # bytes that stay in the L2 cache whatever the order
_UNIT = 8  # elements that the copy engine moves at least


class Dbias(enum.IntEnum):
    """How the main kernel makes the gradient of a bias (kernels/attn/bwd_workspace.cuh)."""

    ELSEWHERE, OF_KEYS, STORED = range(3)
    WEIGHTED, DIAGONALS = 3, 4  # what arrays of a score function need of dS; sums along diagonals, too


class BiasForm(NamedTuple):
    """How the main kernel takes a bias, and makes its gradient.

    Attributes
    ----------
    keys : bool
        The bias is broadcast along rows: two numbers a thread.
    tiles : bool
        The copy engine brings tiles of it; elements that come in neither way are loaded.
    gradient : Dbias
    batches_first : bool
        Sequences share a bias that the L2 cache does not hold: they are worked on side by side.
    """

    keys: bool = False
    tiles: bool = False
    gradient: Dbias = Dbias.ELSEWHERE
    batches_first: bool = False


NO_BIAS = BiasForm()


def bias_form(problem: Problem, bias: Any) -> BiasForm:
    """Return how the kernel that computes everything takes a bias, an array with all axes, or None."""
    if bias is None:
        return NO_BIAS
    form = forward.bias_form(problem, bias)
    slabs, slabs_v = (cdiv(columns, SLAB_COLUMNS) for columns in (problem.head_dim, problem.head_dim_v))
    tiles = form == "tiles" and slabs_v <= slabs  # dV then leaves through dQ's place
    shared = bias.size < problem.instances * problem.n_queries * problem.n_keys and bias.shape[-3] > 1
    return BiasForm(form == "keys", tiles, _gradient_form(problem, bias, tiles), shared and bias.nbytes > _CACHED)


def _gradient_form(problem: Problem, bias: Any, tiles: bool) -> Dbias:
    *_, heads, rows, columns = bias.shape
    whole = bias.shape == (*problem.batch, problem.heads, problem.n_queries, problem.n_keys)
    rounded = problem.grad_dtype(bias.dtype) == problem.dtype
    if is_sloped(problem):
        return Dbias.ELSEWHERE  # what is at hand is the gradient by what enters softcap and function
    if whole and tiles and rounded and not problem.dropout and problem.n_keys % _UNIT == 0:
        return Dbias.STORED
    if rows == 1 and columns == problem.n_keys and (heads == 1 or problem.group == 1):
        return Dbias.OF_KEYS
    return Dbias.ELSEWHERE


class BiasGradient:
    """What a call needs to make dbias, whose main kernel is about to be planned.

    Parameters
    ----------
    call : MappedCall
        With a bias among its operands.
    form : Dbias

    Attributes
    ----------
    scratch : dict of str to Array
    fields : dict of str to object
        Of ``Params``, for all kernels.
    """

    def __init__(self, call: MappedCall, form: Dbias) -> None:
        self._call, self._pass, self._sum = call, None, None
        problem, shape = call.problem, call.operands["bias"].shape
        self.scratch: dict[str, Array] = {}
        self.fields: dict[str, Any] = {"bias_instances": math.prod(shape[:-2])}
        if form == Dbias.ELSEWHERE:
            self._pass = BiasPass(call)
            self.scratch = self._pass.scratch
        elif form == Dbias.OF_KEYS:
            self._sum = portable.sum_over(call.axes, shape, problem.kv_heads)
            self.scratch["dbias_acc"] = portable.sum_array(problem, self._sum)

    def finish(self, constants: Constants) -> None:
        """Append the launches behind the main kernel, which has these constants."""
        if self._pass is not None:
            self._pass.add(constants)
        if self._sum is not None:
            portable.add_sum(self._call, "dbias", self._sum)
