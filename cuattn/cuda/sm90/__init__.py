"""The kernels for compute capability 9.0: bulk tensor copies and warpgroup products."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cuattn.cuda.sm90 import backward, forward
from cuattn.problem import Problem
from cuattn.problem.bands import join_reach

__all__ = ["FAMILY"]


class _Hopper:
    """The family; it takes a mask that is no more than a band as one, since it takes no boolean masks."""

    name = "sm90"
    operations = {"forward": forward, "backward": backward}

    def simplify(self, problem: Problem, masks: Sequence[Any]) -> tuple[Problem, Sequence[Any]]:
        if problem.masks != ("column",) or problem.band is not None or masks[0]._reach is None:
            return problem, masks
        band, whole = join_reach(None, masks[0]._reach, problem.n_queries, problem.n_keys)
        return (replace(problem, masks=(), band=band), ()) if whole else (problem, masks)


FAMILY = _Hopper()
