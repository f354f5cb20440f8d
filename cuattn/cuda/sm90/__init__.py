"""The kernels for compute capability 9.0: bulk tensor copies and warpgroup products."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from cuattn.cuda.sm90.backward import Backward
from cuattn.cuda.sm90.forward import Forward
from cuattn.problem import Band, Problem


class _Hopper:
    """The family; it takes a mask that is no more than a band as one, since it takes no boolean masks."""

    name = "sm90"
    operations: ClassVar = {"forward": Forward, "backward": Backward}

    def simplify(self, problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        reach = masks[0].reach if problem.masks == ("column",) and problem.band is None else None
        if reach is None:
            return problem, masks
        return replace(problem, masks=(), band=None if reach == (None, None) else Band(*reach, 0)), ()


FAMILY = _Hopper()
