"""The masks of the FlashMask paper for sequences packed one after the other.

As in `cuattn.masks.constructors`: closed forms, O(N), i is the query row, j the key column.
"""

from typing import Any

import numpy as np

from cuattn.errors import MaskError, shown
from cuattn.masks import checks
from cuattn.masks.column import ColumnMask
from cuattn.masks.constructors import eviction


def causal_document(lengths: Any) -> ColumnMask:
    """See the keys up to one's own within the same document.

    Visible when j <= i and both lie in the same document.

    Parameters
    ----------
    lengths : sequence of int
        Lengths of the documents, in order.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    document : Without causality.
    share_question : Documents of a question and its answers.

    Examples
    --------
    >>> causal_document([2, 2]).dense().astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 0, 1, 0],
           [0, 0, 1, 1]])
    """
    _, end = _segments("lengths", lengths)
    return eviction(end)


def document(lengths: Any) -> ColumnMask:
    """See all of the same document.

    Parameters
    ----------
    lengths : sequence of int
        Lengths of the documents, in order.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    causal_document : With causality.
    hash_sparse : Buckets in place of documents.

    Examples
    --------
    >>> document([1, 2]).dense().astype(int)
    array([[1, 0, 0],
           [0, 1, 1],
           [0, 1, 1]])
    """
    start, end = _segments("lengths", lengths)
    return ColumnMask._of(end.size, end, ute=start)


def share_question(documents: Any) -> ColumnMask:
    """Let several answers share one question without seeing each other.

    Visible when j <= i, both lie in the same document, and j lies in the question or in i's own segment (the
    question or one answer).

    Parameters
    ----------
    documents : sequence of (question_length, [answer_length, ...])
        Each document is a question followed by its answers.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    causal_document : Documents without answers of their own.

    Examples
    --------
    >>> share_question([(2, [1, 2])]).dense().astype(int)
    array([[1, 0, 0, 0, 0],
           [1, 1, 0, 0, 0],
           [1, 1, 1, 0, 0],
           [1, 1, 0, 1, 0],
           [1, 1, 0, 1, 1]])
    """
    segments, first, last = [], [], []  # all lengths; of each document the first and the last of them
    for k, entry in enumerate(checks.sequence("documents", documents)):
        if len(checks.sequence(f"documents[{k}]", entry)) != 2:
            raise MaskError(f"documents[{k}] = {shown(entry)}: expected (question_length, [answer_length, ...])")
        first.append(len(segments))
        segments.append(checks.integer(f"documents[{k}][0]", entry[0]))
        segments.extend(checks.lengths(f"documents[{k}][1]", entry[1]))
        last.append(len(segments) - 1)
    lengths = checks.lengths("documents", segments)
    seen_until = lengths.cumsum()
    seen_until[first] = seen_until[last]  # a question is seen to the end of its document
    return eviction(np.repeat(seen_until, lengths))


def causal_blockwise(lengths: Any) -> ColumnMask:
    """See the keys up to one's own within the same block; the last block sees all blocks.

    Visible when j <= i, and both lie in the same block or i lies in the last one.

    Parameters
    ----------
    lengths : sequence of int
        Lengths of the blocks, in order.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    causal_document : Blocks that never see each other.

    Examples
    --------
    >>> causal_blockwise([1, 2, 1]).dense().astype(int)
    array([[1, 0, 0, 0],
           [0, 1, 0, 0],
           [0, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    lengths = checks.lengths("lengths", lengths)
    _, end = _segments("lengths", lengths)
    last_block = end.size - lengths[-1:].sum()
    return ColumnMask._of(end.size, end, np.maximum(end, last_block), ute=np.arange(end.size))


def prefix_lm_document(documents: Any) -> ColumnMask:
    """See the prefix of the same document, and its keys up to one's own.

    Visible when both lie in the same document, and j <= i or j lies in its prefix.

    Parameters
    ----------
    documents : sequence of (prefix, length)
        Length of each document and, <= length, of its prefix.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    prefix_lm_causal : One prefix in one sequence.
    causal_document : Without prefixes.

    Examples
    --------
    >>> prefix_lm_document([(2, 3), (0, 1)]).dense().astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [0, 0, 0, 1]])
    """
    prefix, length = checks.numbers("documents", documents, 2).T
    for first in np.flatnonzero(prefix > length)[:1]:
        raise MaskError(f"documents[{first}] = ({prefix[first]}, {length[first]}): expected prefix <= length")
    start, end = _segments("documents[:, 1]", length)
    j = np.arange(end.size)
    upper_end = np.where(j < start + np.repeat(prefix, length), start, j)
    return ColumnMask._of(end.size, end, ute=upper_end)


def hash_sparse(bucket_lengths: Any) -> ColumnMask:
    """See the keys up to one's own within the same bucket.

    Visible when j <= i and both lie in the same bucket; the tokens are sorted by bucket.

    Parameters
    ----------
    bucket_lengths : sequence of int
        Tokens of each bucket, in order.

    Returns
    -------
    ColumnMask
        On the host, with as many rows and keys as there are tokens.

    See Also
    --------
    causal_document : The same mask of documents.

    Examples
    --------
    >>> hash_sparse([1, 2]).dense().astype(int)
    array([[1, 0, 0],
           [0, 1, 0],
           [0, 1, 1]])
    """
    _, end = _segments("bucket_lengths", bucket_lengths)
    return eviction(end)


def _segments(name: str, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return, per token, where its segment starts and ends."""
    lengths = checks.lengths(name, lengths)
    end = np.cumsum(lengths)
    return np.repeat(end - lengths, lengths), np.repeat(end, lengths)
