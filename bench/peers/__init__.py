"""The runners that are measured side by side; each imports its framework when it is first bound.

``make(["cuattn", "cudnn"])`` turns names into runners.  A peer says itself which cases it can run.
"""

from bench.peers.base import Bound, Runner
from bench.peers.fa4 import Fa4, Fa4Packed
from bench.peers.flex import Flex
from bench.peers.jax_nn import Jax
from bench.peers.ours import Ours
from bench.peers.sdpa import BACKENDS, Documents, Sdpa
from bench.peers.standard import Formula, Standard

__all__ = ["RUNNERS", "Bound", "Runner", "make"]

WAYS = ("", "-sm90", "-sm80", "-cpu", "-band", "-cupy", "-attention")
RUNNERS = {
    **dict.fromkeys((f"{package}{way}" for package in ("cuattn", "base") for way in WAYS), Ours),
    **dict.fromkeys(BACKENDS, Sdpa),
    "sdpa-documents": lambda _: Documents(),
    "standard": lambda _: Standard(),
    "numpy": lambda _: Formula(),
    "jax": lambda _: Jax(),
    "flex": lambda name: Flex(name, None),
    "flex-FLASH": lambda name: Flex(name, "FLASH"),
    "fa4": lambda _: Fa4(),
    "fa4-varlen": lambda _: Fa4Packed(),
}


def make(names):
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
        runners.append(RUNNERS[name](name))
    return runners
