"""Real text that every Python ships: the sources of the standard library, as bytes, packed into sequences."""

import itertools
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

VOCABULARY = 256  # one token a byte
NONE = -100  # what PyTorch takes for no target
SHORTEST = 64  # bytes that a module must have


class Sequence(NamedTuple):
    """Documents back to back.

    Attributes
    ----------
    tokens : array, (n,), int64
        Bytes.
    targets : array, (n,), int64
        The byte after each one of the same document, `NONE` where there is none.
    lengths : list of int
        Of the documents; they fill the sequence.
    """

    tokens: np.ndarray
    targets: np.ndarray
    lengths: list[int]


def documents():
    """Yield the standard library's modules, by name, over and over."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
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
        tokens = np.frombuffer(content, np.uint8).astype(np.int64)
        targets = np.roll(tokens, -1)
        targets[np.cumsum(lengths) - 1] = NONE
        yield Sequence(tokens, targets, lengths)
