"""The runners that are measured side by side; each imports its framework when it is first bound.

``make(["cuattn", "cudnn"])`` turns names into runners.  A peer says itself which cases it can run.
"""

from bench.peers.flash import Fa3, Fa3Packed, Fa4, Fa4Packed
from bench.peers.flex import Flex
from bench.peers.jax_nn import Jax
from bench.peers.ours import Ours
from bench.peers.pytorch import BACKENDS, Documents, Formula, Sdpa, Standard

WAYS = ("", "-sm90", "-sm80", "-cupy", "-attention", "-without", "-function", "-boolean", "-array")
RUNNERS = {
    **dict.fromkeys((f"{package}{way}" for package in ("cuattn", "base") for way in WAYS), Ours),
    **dict.fromkeys(BACKENDS, Sdpa),
    "sdpa-documents": Documents,
    "standard": Standard,
    "numpy": Formula,
    "jax": Jax,
    "flex": Flex,
    "flex-FLASH": Flex,
    "flex-autotune": Flex,
    "fa4": Fa4,
    "fa4-varlen": Fa4Packed,
    "fa3": Fa3,
    "fa3-varlen": Fa3Packed,
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
    if unknown := [name for name in names if name not in RUNNERS]:
        raise ValueError(f"no runner is called {unknown[0]!r}: expected one of {', '.join(RUNNERS)}")
    return [RUNNERS[name](name) for name in dict.fromkeys(names)]
