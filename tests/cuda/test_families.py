"""Families are chosen in order, and a new one, or a new operation, needs no change to any file."""

import dataclasses

import numpy as np
import pytest

import cuattn.cuda
from cuattn.cuda import families
from cuattn.cuda.arguments import Array
from cuattn.cuda.call import Call
from cuattn.errors import UnsupportedError
from cuattn.problem import OPERATIONS
from tests.cuda.cases import F16
from tests.cuda.recording import driver as driver
from tests.cuda.recording import operands
from tests.cuda.sm90.test_forward_plan import problem

pytestmark = pytest.mark.usefixtures("driver")


class Mine(Call):
    """How the family of these tests computes a forward, or an operation that nobody else knows."""

    def unsupported_reason(self):
        return "it is for eight heads" if self.problem.heads != 8 else None

    def prepare(self):
        self.begin({"o_part": Array((3,), np.dtype(np.float32))})
        constants = {"elem": self.problem.row.cuda}
        self.add("sm80/fwd.cu", "my_kernel", constants, (self.problem.instances,), 4, {})
        return self.planned("sm80/fwd.cu", (1, 1), 4, 0, constants)


@pytest.fixture
def mine(monkeypatch):
    """A family that is only an entry of the table."""
    added = {"mine": families.Family("a test", {"forward": Mine, "transpose": Mine}), **families.FAMILIES}
    monkeypatch.setattr(families, "FAMILIES", added)
    monkeypatch.setitem(OPERATIONS, "transpose", OPERATIONS["forward"])


def test_names_in_order():
    assert list(cuattn.cuda.FAMILIES) == ["sm90", "sm80"]


def test_a_family_is_an_entry(mine, driver):
    p = problem(heads=8, kv_heads=8, dtype=F16)
    assert list(families.FAMILIES) == ["mine", "sm90", "sm80"]
    assert families.plan(p, operands(p), ()).kernel == "mine"
    (launch,), _ = driver.run(families.launch_sequence(p, operands(p), ()), {"q": 1})
    assert (launch.path, launch.kernel, launch.grid, launch.block) == ("sm80/fwd.cu", "my_kernel", (16,), (128,))
    assert launch.argument["q.data"] == 1 and launch.argument["o_part"] and launch.argument["heads"] == 8


def test_what_it_does_not_take_goes_on(mine):
    p = problem()
    made = families.plan(p, operands(p), ())
    assert made.kernel == "sm90" and "not the mine kernel: it is for eight heads" in made.notes
    with pytest.raises(UnsupportedError, match="kernel is 'mine', but it is for eight heads"):
        families.plan(dataclasses.replace(p, kernel="mine"), operands(p), ())


def test_an_operation_is_an_entry_of_a_table(mine):
    p = problem(operation="transpose", heads=8, kv_heads=8)
    assert families.plan(p, operands(p), ()).direction == "transpose"
    p = dataclasses.replace(p, kernel="sm80")
    with pytest.raises(UnsupportedError, match="kernel is 'sm80', but it does no transpose"):
        families.plan(p, operands(p), ())


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_the_planned_workspace_is_what_is_allocated(operation, kernel, driver):
    p = problem(operation=operation, kernel=kernel, n_queries=130, masks=("column",))
    mask = cuattn.masks.causal_document([96, 4000]).restrict(slice(0, 130))
    taken = operands(p)
    sequence = families.launch_sequence(p, taken, (mask,))
    driver.run(sequence, {}, (mask,), capturing=True)
    counters = 4 if (operation, kernel) == ("forward", "sm90") else 0
    assert families.plan(p, taken, (mask,)).workspace_bytes == driver.sizes[-1] - counters > 0


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"masks": ("column",)}, {"dropout": 6554}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kernel", ["sm80", "sm90"])
def test_a_backward_is_planned_without_what_a_forward_returns(kernel, head_dim, options):
    p = problem(head_dim, operation="backward", kernel=kernel, **options)
    whole, masks = operands(p), (cuattn.masks.causal_document([96, 4000]),) if p.masks else ()
    planned = {name: array for name, array in whole.items() if name in "qkv"}
    assert families.plan(p, planned, masks) == families.plan(p, whole, masks)
