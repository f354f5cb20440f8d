"""What ranks agree on before data moves: that all of them call the same, and that none has refused its arguments."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cuattn.distributed.comm import Comm, DistributedError
from cuattn.errors import CuattnError, shown
from cuattn.masks.base import Mask

T = TypeVar("T")


def agreed(comm: Comm, check: Callable[[], T]) -> T:
    """Return what a check returns; if it fails on any rank all raise.

    If it fails on all of them with errors of one class, each raises its own, else a `DistributedError`; a rank that was
    interrupted raises its interruption.
    """
    found, error = _tried(check)
    _raise_all(comm, comm.allgather(_told(error)), error)
    return found  # type: ignore[return-value]


class Stated(NamedTuple):
    """What a rank says of a call.

    Attributes
    ----------
    digest : bytes
        Of what has to be equal everywhere.
    brought : object
        What only this rank knows.
    random : str
        Where random numbers come from, which has to be equal everywhere, too.
    seed : object
        The random state that this rank would use.
    expected : bytes
        Digest of what all ranks bring when the call is one that this rank has found in order; empty if it has not.
    """

    digest: bytes
    brought: Any
    random: str = ""
    seed: Any = None
    expected: bytes = b""


class Message:
    """What a rank says of a call as it is sent, and what came of it when all ranks last said the same.

    Parameters
    ----------
    stated : Stated
    """

    def __init__(self, stated: Stated) -> None:
        self.stated, self.content = stated, pickle.dumps((None, stated))
        self.came_of: tuple[list[bytes], Agreed | None] = [], None


class Agreed(NamedTuple):
    """What ranks agree on.

    Attributes
    ----------
    everyone : list
        What each rank brings.
    digest : bytes
        Of that.
    seed : object
        The first rank's.
    known : bool
        Whether all ranks have found this very call in order before.
    """

    everyone: list[Any]
    digest: bytes
    seed: Any
    known: bool


def same(comm: Comm, state: Callable[[], Message], facts: Callable[[], Mapping[str, Any]]) -> Agreed:
    """Return what ranks agree on, after a check that they call the same: in one message if it is a call as before.

    Parameters
    ----------
    comm : Comm
    state : callable
        Returns what this rank says.
    facts : callable
        Returns what has to be equal everywhere, by name.

    Raises
    ------
    DistributedError
        Something differs; it has each rank's value.
    """
    message, error = _tried(state)
    answers = comm.allgather(pickle.dumps((_told(error), None)) if message is None else message.content)
    before, found = ([], None) if message is None else message.came_of
    if found is not None and answers == before:
        return found
    everywhere = [pickle.loads(answer) for answer in answers]
    _raise_all(comm, [told for told, _ in everywhere], error)
    stated = [one for _, one in everywhere]
    if len({(one.digest, one.random) for one in stated}) > 1:
        given = comm.allgather({name: described(value) for name, value in facts().items()})
        name = next(name for name in given[0] if len({texts.get(name) for texts in given}) > 1)
        values = {rank: texts.get(name, "-") for rank, texts in enumerate(given)}
        raise DistributedError(f"{name} differs between ranks; expected one value", values)
    everyone = [one.brought for one in stated]
    digest = digest_of(everyone)
    found = Agreed(everyone, digest, stated[0].seed, all(one.expected == digest for one in stated))
    if message is not None and found.known:
        message.came_of = answers, found
    return found


def digest_of(value: Any) -> bytes:
    """Return a digest of what has the same repr on all ranks."""
    return hashlib.blake2b(repr(value).encode(), digest_size=16).digest()


def _tried(function: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:  # also KeyboardInterrupt: whatever it is, the other ranks must learn of it
        return None, error


def _told(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, str(error))


def _raise_all(comm: Comm, told: list[tuple[str, str] | None], error: BaseException | None) -> None:
    failed = {rank: f"{one[0]}: {one[1]}" for rank, one in enumerate(told) if one is not None}
    if not failed:
        return
    alike = len(failed) == comm.size and len({one[0] for one in told if one}) == 1
    if error is not None and (alike or not isinstance(error, Exception)):
        raise error
    message = "the arguments were refused" if isinstance(error, CuattnError) else "the call failed"
    raise DistributedError(f"{message} on {len(failed)} of {comm.size} ranks", failed) from error


def described(value: Any) -> str:
    """Return a text that is the same on all ranks for what means the same: of arrays on a GPU no more than the shape.

    >>> described(0.5), described((None, 3))
    ('0.5', '(None, 3)')
    """
    if value is None or type(value) in (bool, float):
        return repr(value)
    if isinstance(value, Mask):
        return _of_mask(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(described, value))})"
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        given = described((*cells, *(value.__defaults__ or ())))
        return f"{value.__qualname__} {_hash(*_of_code(value.__code__), given.encode())}"
    if isinstance(value, type):
        return value.__name__
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        content = _hash(value.tobytes()) if isinstance(value, np.ndarray) else ""
        return f"{value.dtype} {tuple(value.shape)} {content}".rstrip()
    return type(value).__name__ if callable(value) else shown(value, 200)


def _of_code(code: CodeType) -> list[bytes]:
    found = [code.co_code, repr(code.co_names).encode()]
    for constant in code.co_consts:
        text = repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant).encode()
        found += _of_code(constant) if isinstance(constant, CodeType) else [text]
    return found


@lru_cache(maxsize=64)
def _of_mask(mask: Mask) -> str:
    if len(mask.parts) > 1:
        return " & ".join(map(_of_mask, mask.parts))
    content = [described(x).encode() for x in mask._parameters if isinstance(x, int | tuple)]
    if mask.kind == "function":
        bound = mask._parameters[0]
        content += [repr(bound.root).encode(), *(described(x).encode() for x in (*bound.arrays, *bound.numbers))]
    content.append(described(mask._array).encode())
    return f"{mask!r} {_hash(*content)}"


def _hash(*content: bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in content:
        digest.update(part)
    return digest.hexdigest()
