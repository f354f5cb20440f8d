"""``--mask NAME ARG...``: a mask constructor by name, its arguments as Python literals."""

import ast
import inspect

from cuattn import masks
from cuattn.errors import ArgumentError, CuattnError

_WORDS = {"none": None, "true": True, "false": False}


def build_mask(words, n_queries, n_keys):
    """Return the mask that the command line names.

    Parameters
    ----------
    words : list of str
        The constructor's name and its arguments: numbers, nested lists and tuples, or plain words.  The lengths
        with which its signature begins are left out: they are `n_queries` and `n_keys`.  Where it takes one list
        and no length, the items may be given one by one.
    n_queries, n_keys : int
        The lengths of the data.

    Returns
    -------
    ColumnMask

    Raises
    ------
    ArgumentError
        When there is no such constructor, or it does not take these arguments.

    Examples
    --------
    >>> build_mask(["causal_document", "3", "5"], 8, 8) == build_mask(["causal_document", "[3, 5]"], 8, 8)
    True
    """
    name, *words = words
    option = f"--mask {name}"
    constructors = masks.CONSTRUCTORS
    if name not in constructors:
        raise ArgumentError(f"{option}: expected one of {', '.join(constructors)}")
    parameters = list(inspect.signature(constructors[name]).parameters)
    lengths = {"n": n_queries, "n_queries": n_queries, "n_keys": n_keys}
    given = [lengths[parameter] for parameter in parameters if parameter in lengths]
    values = [literal(option, word) for word in words]
    if len(parameters) == 1 and not given and values and not isinstance(values[0], list):
        values = [values]
    try:
        return constructors[name](*given, *values)
    except (CuattnError, TypeError) as error:
        usage = " ".join([option, *(parameter.upper() for parameter in parameters[len(given) :])])
        taken = " (lengths come from the data)" if given else ""
        raise ArgumentError(f"{option}: {error}; expected {usage}{taken}") from error


def literal(option, word):
    """Return the value of a word: a literal of numbers and lists, or the word itself."""
    if word.isidentifier():
        return _WORDS.get(word.lower(), word)
    try:
        value = ast.literal_eval(word)
        if _plain(value):
            return value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        pass
    raise ArgumentError(f"{option}: {word!r} is not a number or a list of numbers")


def _plain(value):
    """Return whether `value` is a number or a nested list of numbers."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (int, float))
