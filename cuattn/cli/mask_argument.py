"""``--mask NAME ARG...``: a mask constructor by name, its arguments as Python literals."""

import ast
import inspect

from cuattn import masks
from cuattn.errors import ArgumentError, CuattnError

__all__ = ["build_mask"]

_LENGTHS = ("n", "n_queries", "n_keys")


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
    constructors = _constructors()
    if name not in constructors:
        raise ArgumentError(f"--mask {name}: expected one of {', '.join(constructors)}")
    parameters = list(inspect.signature(constructors[name]).parameters)
    given = [n_queries if parameter != "n_keys" else n_keys for parameter in parameters if parameter in _LENGTHS]
    rest = parameters[len(given) :]
    values = [_literal(name, word) for word in words]
    if values and parameters == rest and len(rest) == 1 and not isinstance(values[0], list):
        values = [values]
    try:
        return constructors[name](*given, *values)
    except CuattnError as error:
        raise ArgumentError(f"--mask {name}: {error}") from error
    except TypeError as error:
        usage = " ".join([name, *(parameter.upper() for parameter in rest)])
        taken = f"; {' and '.join(parameters[: len(given)])} come from the data" if given else ""
        raise ArgumentError(f"--mask {name} got {values}; expected --mask {usage}{taken} ({error})") from error


def _constructors():
    """Return the public functions of :mod:`cuattn.masks` by name."""
    return {name: getattr(masks, name) for name in masks.__all__ if inspect.isfunction(getattr(masks, name))}


def _literal(name, word):
    """Return the value of a word: a literal of numbers and lists, or the word itself."""
    if word.isidentifier():
        return {"None": None, "True": True, "False": False}.get(word, word)
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ArgumentError(f"--mask {name}: {word!r} is not a number or a list of numbers") from error
    if not _plain(value):
        raise ArgumentError(f"--mask {name}: {word!r} is not a number or a list of numbers")
    return value


def _plain(value):
    """Return whether `value` is a number or a nested list of numbers."""
    if isinstance(value, (list, tuple)):
        return all(map(_plain, value))
    return value is None or isinstance(value, (int, float))
