"""One kind of call as kernels see it: its arrays, their axes, the fields of ``Params``, and its launches."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cuattn.cuda.arguments import Axes, load_bytes, merged_axes, operand_fields, problem_fields, slot_of
from cuattn.cuda.compile import function
from cuattn.cuda.constants import Constants
from cuattn.cuda.device import device_of
from cuattn.cuda.params import PARAMS
from cuattn.cuda.sequence import Array, LaunchSequence
from cuattn.cuda.tables import CallMasks, slots
from cuattn.plans import Plan
from cuattn.problem import OPERATIONS, Problem

__all__ = ["Call", "gradients", "statistics"]


def statistics(problem: Problem, dtype: Any = None) -> dict[str, Array]:
    """Return a forward's o, in its own dtype or another, with l and m if they are asked for."""
    found = {"o": Array(problem.o_shape, dtype or problem.out_dtype)}
    if problem.statistics or dtype:
        found |= {name: Array(problem.stat_shape, problem.stat_dtype) for name in "lm"}
    return found


def gradients(problem: Problem, operands: Mapping[str, Any]) -> dict[str, Array]:
    """Return a backward's results: for each operand with a gradient one of its (aligned) shape."""
    named = {f"d{name}": operands[name] for name in ("q", "k", "v", "bias") if name in operands}
    return {name: Array(tuple(array.shape), problem.grad_dtype(array.dtype)) for name, array in named.items()}


class Call:
    """How a family does one operation for one kind of call: a base class, which collects the launches.

    A subclass says what speaks against it (:meth:`unsupported_reason`), plans and begins (:meth:`prepare`), and adds
    its launches (:meth:`launch`).

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
        Operands and, from :meth:`begin` on, results.
    sequence : LaunchSequence
        From :meth:`begin` on.
    """

    sequence: LaunchSequence

    def __init__(self, problem: Problem, operands: Mapping[str, Any], masks: Sequence[Any]) -> None:
        self.problem, self.operands, self._given_masks = problem, operands, masks
        self.arrays = dict(operands)
        self.device = device_of(operands["q"].device.id)
        self._table_of: dict[tuple[int, ...], int] = {}

    @functools.cached_property
    def _masks(self) -> CallMasks:
        return CallMasks(self.problem, self._given_masks, self.device.number)

    @functools.cached_property
    def axes(self) -> Axes:
        """The merged batch axes."""
        return merged_axes(self.problem, self.operands.values(), self._masks.layouts)

    def unsupported_reason(self) -> str | None:
        """Say why the family does not do this call, or return None.

        That another one would be quicker is a reason unless `problem.kernel` names this one.
        """
        return None

    def prepare(self) -> Plan:
        """Plan the call and :meth:`begin` it."""
        raise NotImplementedError

    def launch(self, made: Plan) -> None:
        """Add the launches."""
        raise NotImplementedError

    def plan(self) -> Plan:
        """Return the plan of the call."""
        made = self.prepare()
        return dataclasses.replace(made, workspace_bytes=self.sequence.workspace_bytes)

    def launch_sequence(self) -> LaunchSequence:
        """Return what the call launches for arrays of this layout."""
        self.launch(self.prepare())
        return self.sequence

    def begin(
        self,
        results: dict[str, Array],
        scratch: dict[str, Array],
        tiles: Sequence[tuple[int, ...]] = (),
        counters: int = 0,
    ) -> None:
        """Make the launch sequence, empty yet.

        Parameters
        ----------
        results, scratch : dict of str to Array
        tiles : sequence of (int, int) or (int, int, int), optional
            Tiles whose kernels read tables of the masks: rows, keys, and rows that the bounds count in.
        counters : int, optional
            See :class:`LaunchSequence`.
        """
        problem = self.problem
        self.arrays |= results
        self._fields = problem_fields(problem, self.axes)
        for name, array in self.arrays.items():
            self._fields |= operand_fields(name, array, self.axes, len(problem.batch))
        found = {tile: self._masks.tables(*tile) for tile in tiles} if problem.masks else {}
        tables = {table.key: table for table in found.values()}
        self._table_of = {tile[:2]: list(tables).index(table.key) for tile, table in found.items()}
        inputs = OPERATIONS[problem.operation].inputs
        number = self.device.number
        self.sequence = LaunchSequence(number, inputs, results, scratch, list(tables.values()), counters, problem)
        self._slots = {slot_of(name): name for name in self.sequence.names if name != "mask" and slot_of(name)}

    def load_bytes(self, *names: str) -> int:
        """Return the widest access that the addresses and row strides of the named operands allow."""
        return load_bytes(*(self.arrays[name] for name in names if name in self.arrays))

    def add(
        self,
        path: str,
        kernel: str,
        constants: Constants,
        grid: tuple[int, ...],
        warps: int,
        *,
        shared_bytes: int = 0,
        tile: tuple[int, int] | None = None,
        maps: Iterable[tuple[str, Callable[[int], Any]]] = (),
        arch: str | None = None,
        aliases: dict[str, str] | None = None,
        **values: Any,
    ) -> None:
        """Append the launch of a kernel that takes ``Params``.

        Parameters
        ----------
        path, kernel, constants
            Of the kernel, see :func:`cuattn.cuda.compile.function`.
        grid : tuple of int
        warps, shared_bytes : int
            Of a block.
        tile : (int, int), optional
            Rows and keys of its tiles, if it reads tables of masks.
        maps : iterable of (str, callable), optional
            Further arguments: the name of an address, and a function that describes the array there.
        arch : str, optional
            To compile for; by default the device's own.
        aliases : dict of str to str, optional
            Names of operands that take the address of another.
        **values
            Fields of ``Params`` that are this kernel's own.
        """
        fields, places = {**self._fields, **values}, dict(self._slots)
        places |= {slot_of(name): other for name, other in (aliases or {}).items()}
        if tile in self._table_of:
            fields |= self._masks.fields(self.axes, tile[1])
            places |= slots(self._table_of[tile])
        found = function(self.device.number, path, kernel, tuple(constants.items()), shared_bytes, arch)
        self.sequence.add(found, grid, 32 * warps, PARAMS, fields, places, shared_bytes=shared_bytes, maps=maps)
