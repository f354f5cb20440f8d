"""The runners that are measured side by side; each imports its framework when it is first bound.

``make(["cuattn", "cudnn"])`` turns names into runners.  A peer says itself which cases it can run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.peers.base import Bound, Runner
from bench.peers.fa4 import Fa4, Fa4Packed
from bench.peers.flex import Flex
from bench.peers.jax_nn import Jax
from bench.peers.ours import Ours
from bench.peers.sdpa import BACKENDS, Sdpa
from bench.peers.standard import Standard

__all__ = ["RUNNERS", "Bound", "Runner", "make"]

RUNNERS: dict[str, Callable[[], Runner]] = {
    "cuattn": Ours,
    "cuattn-sm90": lambda: Ours("sm90"),
    "cuattn-sm80": lambda: Ours("sm80"),
    "cuattn-cpu": lambda: Ours("cpu"),
    "cuattn-band": lambda: Ours(band=True),
    "cuattn-cupy": lambda: Ours(cupy=True),
    **{name: (lambda name=name: Sdpa(name)) for name in BACKENDS},
    "standard": Standard,
    "jax": Jax,
    "flex": lambda: Flex("flex", None),
    "flex-FLASH": lambda: Flex("flex-FLASH", "FLASH"),
    "fa4": Fa4,
    "fa4-varlen": Fa4Packed,
}


def make(names: Iterable[str]) -> list[Runner]:
    """Return runners by name.

    Parameters
    ----------
    names : iterable of str
        Keys of `RUNNERS`.

    Returns
    -------
    list of Runner
        In the same order, each name once.

    Raises
    ------
    ValueError
        For a name that is not known; the message lists those that are.

    Examples
    --------
    >>> [runner.name for runner in make(["cuattn-sm90", "fa2"])]
    ['cuattn-sm90', 'fa2']
    """
    runners = []
    for name in dict.fromkeys(names):
        if name not in RUNNERS:
            raise ValueError(f"no runner is called {name!r}: expected one of {', '.join(RUNNERS)}")
        runners.append(RUNNERS[name]())
    return runners
