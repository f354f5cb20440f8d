"""The portable kernels: any GPU from compute capability 8.0 on."""

from collections.abc import Sequence
from typing import Any, ClassVar

from cuattn.cuda.sm80.backward import Backward
from cuattn.cuda.sm80.forward import Forward
from cuattn.problem import Problem


class _Portable:
    """The family; it takes masks as they are: a column mask must give the bits that its boolean twin gives."""

    name = "sm80"
    operations: ClassVar = {"forward": Forward, "backward": Backward}

    def simplify(self, problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        return problem, masks


FAMILY = _Portable()
