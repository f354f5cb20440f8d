"""Real text that every Python ships: the sources of the standard library, as bytes, packed into sequences."""

import itertools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 256  # one token a byte
SHORTEST = 64  # bytes that a module must have


class Sequence(NamedTuple):
    """Documents back to back.

    Attributes
    ----------
    tokens : array, (n,), int32
        Bytes.
    targets : array, (n,), int32
        The byte after each one of the same document.
    weights : array, (n,), float32
        0 where there is no next byte, the same value elsewhere; they sum to 1.
    lengths : list of int
        Of the documents; they fill the sequence.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    lengths: list[int]


def documents(folder=None):
    """Yield the standard library's modules, by name, over and over."""
    files = sorted(Path(folder or sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return itertools.cycle([text for path in files if len(text := path.read_bytes()) >= SHORTEST])


def pack(texts, n, longest):
    """Pack documents into sequences of `n` tokens; documents longer than `longest` are cut into pieces.

    Parameters
    ----------
    texts : iterator of bytes
        Endless.
    n : int
        Tokens of a sequence.
    longest : int
        Tokens of a document at most.
    """
    pieces = (text[at : at + longest] for text in texts for at in range(0, len(text), longest))
    while True:
        content, lengths = b"", []
        while len(content) < n:
            piece = next(pieces)[: n - len(content)]
            lengths.append(len(piece))
            content += piece
        tokens = np.frombuffer(content, np.uint8).astype(np.int32)
        weights = np.ones(n, np.float32)
        weights[np.cumsum(lengths) - 1] = 0
        yield Sequence(tokens, np.roll(tokens, -1), weights / weights.sum(), lengths)
