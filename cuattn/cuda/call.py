"""One kind of call as kernels see it: its arrays, their axes, the fields of ``Params``, and its launches."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cuattn.cuda.arguments import (
    Array,
    Axes,
    Laid,
    collapse,
    layout_fields,
    load_bytes,
    problem_fields,
    slots_of,
    steps_of,
)
from cuattn.cuda.constants import Constants
from cuattn.cuda.device import device_of
from cuattn.cuda.functions import Functions
from cuattn.cuda.params import PARAMS, TANGENTS, derived
from cuattn.cuda.sequence import LaunchSequence
from cuattn.cuda.source import calls_functions, constants_of, functions_text, slots_read
from cuattn.cuda.tables import CallMasks
from cuattn.plans import Plan
from cuattn.problem import OPERATIONS, Problem, ScoreFunction

_OWN = {
    name.partition(".")[0] for name in TANGENTS.names if "." in name
}  # arrays that only kernels along tangents take


class Own(NamedTuple):
    """What a kernel takes behind ``Params``: a struct, and which of its fields take addresses, and which."""

    dtype: np.dtype
    slots: Mapping[str, str]


class Call:
    """How a family does one operation for one kind of call: a base class, which collects the launches.

    A subclass says what speaks against it (:meth:`unsupported_reason`), and begins, adds launches and plans
    (:meth:`prepare`).  Nothing is compiled before the launches are made.

    Parameters
    ----------
    problem : Problem
    operands : mapping of str to cupy.ndarray
        Of a call that is only planned, q, k and v.
    masks : sequence of Mask
        On the host or on the arrays' GPU; only their layouts matter.

    Attributes
    ----------
    device : Device
    arrays : dict of str to array
        Operands and results, from :meth:`begin` on.
    sequence : LaunchSequence
        From :meth:`begin` on.
    """

    sequence: LaunchSequence
    packed_masks: ClassVar[bool] = False
    """Whether the kernels read elements of boolean masks as bits."""
    lays_results: ClassVar[bool] = False
    """Whether results that are among the operands may lie there at any strides."""

    def __init__(self, problem: Problem, operands: Mapping[str, Any], masks: Sequence[Any]) -> None:
        self.problem, self.operands, self._given_masks = problem, operands, masks
        self.device = device_of(operands["q"].device.id).without(problem.sm_margin)

    @functools.cached_property
    def _masks(self) -> CallMasks:
        return CallMasks(self.problem, self._given_masks, self.device.number, self.packed_masks)

    @functools.cached_property
    def axes(self) -> Axes:
        """The merged batch axes.

        An operand may have a stride of 0 along an axis that its gradient has: axes that only one of the two has are
        not merged, so the layouts of contiguous arrays of the operands' shapes count, too.
        """
        operands = [array for name, array in self.operands.items() if not ScoreFunction.has(name)]
        arrays = [*operands, *(Array(x.shape, x.dtype) for x in operands)]
        return collapse(self.problem.batch, [*map(steps_of, arrays), *self._masks.layouts.values()])

    @staticmethod
    def simplify(problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        """Return a problem and masks that come to the same, and that the kernels do faster; by default as they are.

        A column mask must give the bits that its boolean twin gives on the same kernel.
        """
        return problem, masks

    def unsupported_reason(self) -> str | None:
        """Say why the family does not do this call, or return None.

        That another one would be quicker is a reason unless `problem.kernel` names this one.
        """
        return None

    def prepare(self) -> Plan:
        """:meth:`begin` the call, add its launches, and plan it."""
        raise NotImplementedError

    def begin(self, scratch: dict[str, Array], counters: int = 0, arithmetic: np.dtype | None = None) -> None:
        """Make the launch sequence, empty yet.

        Parameters
        ----------
        scratch : dict of str to Array
        counters : int, optional
            See :class:`LaunchSequence`.
        arithmetic : numpy.dtype, optional
            Of a score function; by default that of the sums.
        """
        problem, operation = self.problem, OPERATIONS[self.problem.operation]
        made = operation.made(replace(problem, rank=3), self.operands)  # every axis written out
        results = {name: Array(*one) for name, one in made.items()}
        laid = (
            self.lays_results
            and 0 not in (problem.n_queries, problem.n_keys)
            and results.keys() <= self.operands.keys()
        )
        if laid:
            results = {name: Laid(*one, self.operands[name].strides) for name, one in made.items()}
        self.arrays = {**self.operands, **results}
        self._fields = problem_fields(problem, self.axes)
        for name, array in self.arrays.items():
            if not ScoreFunction.has(name) and name not in _OWN:
                self._fields |= layout_fields(name, steps_of(array), self.axes, len(problem.batch))
        score, given = problem.score, {*self.operands, *["mask" for mask in self._given_masks if mask.unowned]}
        absent = {"bias", "mask", *operation.optional} - given
        inputs = [name for name in operation.inputs if name not in absent]
        self.functions = None if score is None else Functions(problem, self.operands, arithmetic)
        self.sequence = LaunchSequence(
            self.device.number, inputs if score is None else [*inputs, *score.names], results, scratch, counters,
            problem, self.functions,
        )  # fmt: skip
        self.sequence.laid = laid
        taken = slots_of(name for name in self.sequence.names if name != "mask")
        self.slots = {slot: self.addressed(name) for slot, name in taken.items()}

    def addressed(self, name: str) -> str:
        """Return whose address stands for an array's: an empty one has none, and copies of nothing must name one."""
        return "k" if name in self.arrays and 0 in self.arrays[name].shape else name

    @property
    def has_gradients(self) -> bool:
        """Whether gradients may differ from 0: by values that have columns, or by the rows' log-sum-exps."""
        problem = self.problem
        scores = problem.n_queries * problem.n_keys * problem.instances
        return scores > 0 and (problem.head_dim_v > 0 or "dlse" in self.operands)

    def load_bytes(self, *names: str) -> int:
        """Return the widest access that the addresses and row strides of the named operands allow."""
        return load_bytes(*(self.operands[name] for name in names if name in self.operands))

    def add(
        self,
        path: str,
        kernel: str,
        constants: Constants,
        grid: tuple[int, ...],
        warps: int,
        values: Mapping[str, Any],
        tile: tuple[int, ...] = (),
        own: Own | None = None,
        **more: Any,
    ) -> None:
        """Append the launch of a kernel that takes ``Params``.

        Parameters
        ----------
        path, kernel, constants
            Of the kernel, see :func:`cuattn.cuda.compile.function`.
        grid : tuple of int
        warps : int
            Of a block.
        values : dict of str to object
            Fields of ``Params`` that are this kernel's own.
        tile : tuple of int, optional
            Of a kernel that reads tables of masks: rows and keys of its tiles, and rows that the tables count in.
        own : Own, optional
            Of a kernel that takes more than ``Params``.
        **more
            For :class:`cuattn.cuda.launch.Kernel`.
        """
        fields, slots, tables = {**self._fields, **values}, slots_read(path, self.slots), None
        if tile and self.problem.masks:
            extent = self._masks.extent(*tile)
            fields |= self._masks.fields(self.axes, extent)
            tables = self._masks.tables(extent)
        dtype, functions, text = PARAMS, self.functions, ""
        if calls_functions(path):
            if functions is not None:
                dtype, text = functions.dtype, functions.text
                fields, slots = {**fields, **functions.values}, {**slots, **functions.slots}
            dtype, values, masked = self._masks.traced(dtype, "visible" if "function" in self.problem.masks else "")
            fields, more = {**fields, **values}, {**more, "traced": functions_text(text, masked)}
        if tables is not None:
            slots = {**slots, **{slot: slot for slot in tables.slots if slot in dtype.fields}}
        if own is not None:
            dtype, slots = derived(dtype, own.dtype, ""), {**slots, **own.slots}
        launched = path, kernel, constants, grid, 32 * warps, dtype, fields, slots
        self.sequence.add(*launched, tables=tables, **more)

    def planned(
        self, path: str, tile: Sequence[int], warps: int, shared_bytes: int, constants: Constants, *notes: str
    ) -> Plan:
        """Return the plan of the call, whose launches were added, but for the family and what speaks for it.

        The arguments are those of its main kernel.
        """
        return Plan(
            "", self.problem.operation, *tile[:2], warps, shared_bytes, self.sequence.workspace_bytes, "", notes,
            constants_of(path, constants),
        )  # fmt: skip
