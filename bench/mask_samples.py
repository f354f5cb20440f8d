"""The twelve masks of the FlashMask paper's tables, as data: one sample per sequence, the same at every run.

A sample says what is visible in plain numbers (document lengths, prefixes, spans, ...).  `column_mask` turns samples
into cuattn's mask with the library's own constructors; peers read the same numbers.

References
----------
G. Wang et al., "FlashMask: Efficient and Rich Mask Extension of FlashAttention", appendix A.5.2: 3-7 documents per
sequence of 8K, 10-14 of 32K, 11-15 of 128K; a shared question has 2-6 answers.
"""

from typing import Any, NamedTuple

import numpy as np

from cuattn import masks

SEED = 20240924
KINDS = (
    "full",
    "causal",
    "sliding_window",
    "global_sliding_window",
    "causal_document",
    "document",
    "share_question",
    "causal_blockwise",
    "prefix_lm_document",
    "prefix_lm_causal",
    "qk_sparse",
    "random_eviction",
)
GLOBAL_TOKENS = 16
SPANS = ((1 / 8, 0.0657), (0.2878, 0.2075))  # QK-sparse: start and length of each span, as shares of the sequence
SHORTEST = 0.25  # a document's length is drawn from [SHORTEST, 1), then all are scaled to fill the sequence


class Sample(NamedTuple):
    """What one sequence may see.

    Attributes
    ----------
    kind : str
        One of `KINDS`.
    n : int
        Tokens.
    arguments : tuple
        Of cuattn's constructor of that name.
    lengths : tuple of int
        Documents or blocks, where the kind has them; they fill the sequence.
    """

    kind: str
    n: int
    arguments: tuple[Any, ...]
    lengths: tuple[int, ...] = ()

    @property
    def number(self):
        """Window, prefix, or first row that evicts, where the kind has one."""
        return self.arguments[1] if len(self.arguments) > 1 else None

    def column_mask(self, masks=masks):
        """Return the sample as a mask for one sequence, made by cuattn's `masks` or another version of them."""
        return getattr(masks, self.kind)(*self.arguments)


def documents_per_sequence(n):
    """Return the fewest and the most documents in a sequence of `n` tokens, as the paper draws them."""
    if n <= 8192:
        return 3, 7
    return (10, 14) if n <= 32768 else (11, 15)


def samples(kind, n, count):
    """Draw the masks of a batch.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    n : int
        Tokens per sequence.
    count : int
        Sequences; each gets its own draw where the kind has anything to draw.

    Returns
    -------
    tuple of Sample
        The same for the same arguments; the first sequences do not depend on `count`.
    """
    if kind not in KINDS:
        raise ValueError(f"kind = {kind!r}: expected one of {', '.join(KINDS)}")
    return tuple(_draw(kind, n, (SEED, KINDS.index(kind), n, row)) for row in range(count))


def column_mask(drawn, masks=masks):
    """Return one mask for the whole batch, of leading shape (batch, 1), or () when all sequences share it."""
    if all(sample == drawn[0] for sample in drawn):
        return drawn[0].column_mask(masks)
    return masks.ColumnMask.stack([[sample.column_mask(masks)] for sample in drawn])


def _draw(kind, n, seed):
    rng = np.random.default_rng(seed)
    plain = {
        "full": (n,),
        "causal": (n,),
        "sliding_window": (n, max(n // 16, 1)),
        "global_sliding_window": (n, max(n // 16, 1), GLOBAL_TOKENS),
        "prefix_lm_causal": (n, n // 2),
        "qk_sparse": (n, tuple((int(start * n), int(length * n)) for start, length in SPANS)),
        "random_eviction": (n, n // 2, seed),
    }
    if kind in plain:
        return Sample(kind, n, plain[kind])
    fewest, most = documents_per_sequence(n)
    lengths = parts = split(n, rng.uniform(SHORTEST, 1.0, size=int(rng.integers(fewest, most + 1))))
    if kind == "share_question":
        parts = tuple(question_and_answers(rng, length) for length in lengths)
    elif kind == "prefix_lm_document":
        parts = tuple((int(length * rng.uniform(0.25, 0.75)), length) for length in lengths)
    return Sample(kind, n, (parts,), lengths)


def split(n, weights):
    """Split `n` tokens in proportion to `weights`."""
    cuts = np.rint(np.cumsum(weights) / weights.sum() * n).astype(int)
    return tuple(int(length) for length in np.diff(cuts, prepend=0))


def question_and_answers(rng, length):
    """Split a document into 2 to 6 answers of 10-20 % each, at most 90 % in all, and the question before them."""
    count = int(rng.integers(2, 7))
    answers = tuple(int(share * length) for share in rng.uniform(0.10, min(0.20, 0.90 / count), size=count))
    return length - sum(answers), answers
