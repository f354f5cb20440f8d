"""What a function captures: recognised by identity, and replaced by stand-ins on a copy of the function.

A function is known by its code and the identity of every value that it captures: closure cells, globals, defaults,
arguments of partials, the object of a method.  Plain numbers and strings are compared by value.  What lies in a list,
a dict or an attribute may change unseen, so such functions have no identity (`None`) and are traced in each call.

NumPy arrays refuse proxies as indices.  The function that is traced is therefore a copy, in which captured arrays are
:class:`~cuattn.tracing.proxy.ArrayProxy`, in helpers that it calls too.
"""

import copy
import dis
import functools
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuattn.errors import shown
from cuattn.tracing.build import complaint
from cuattn.tracing.graph import Node, parameter
from cuattn.tracing.proxy import ArrayProxy

_ATOMS = (int, float, bool, complex, str, bytes, type(None), type(Ellipsis))
_FIXED = (type, types.BuiltinFunctionType, np.ufunc, type(np.where), np.dtype)
_MODULES = frozenset({"builtins", "numpy", "math", "operator"})  # whose attributes stay what they are
_DEEP = 6  # containers within containers, and functions within functions, that are looked into
_UNIONS = (tuple, list, dict)


class Tracer:
    """Collects the arrays and the numbers that a function uses, in the order of their use.

    Parameters
    ----------
    adopt : callable
        Copies a captured array.
    """

    def __init__(self, adopt: Callable[[Any], Any]) -> None:
        self.arrays: list[Any] = []
        self.numbers: list[Any] = []
        self._adopt = adopt
        self._slots: dict[Any, int] = {}
        self._parameters: dict[str, Node] = {}
        self._standins: dict[int, tuple[Any, Any]] = {}

    def slot(self, source: Any) -> int:
        """Return the slot of an array: the number of an argument, or a captured array."""
        key = source if isinstance(source, Argument) else id(source)
        if key not in self._slots:
            self._slots[key] = len(self.arrays)
            self.arrays.append(source)
        return self._slots[key]

    def number(self, value: float) -> Node:
        """Return the parameter for a number of the function's own; equal ones share it."""
        key = value.hex()
        if key not in self._parameters:
            self._parameters[key] = self.argument(value, "f")
        return self._parameters[key]

    def argument(self, source: Any, kind: str) -> Node:
        """Return a new parameter for a number, or for that of an argument."""
        self.numbers.append(source)
        return parameter(len(self.numbers) - 1, kind)

    def captured(self, array: Any) -> ArrayProxy:
        """Return the stand-in of a captured array, of which a copy is made if it is used."""

        @functools.lru_cache(maxsize=1)
        def kept() -> Any:
            if getattr(array, "requires_grad", False):
                raise complaint(
                    "the function captures a tensor that requires grad, whose gradient would be lost: pass it in "
                    "score_args, or detach it"
                )
            return self._adopt(array)

        return ArrayProxy(kept)

    def standin(self, value: Any, depth: int = 0) -> Any:
        """Return a captured value with every array in it replaced by its stand-in; itself if there is none."""
        if isinstance(value, (*_ATOMS, *_FIXED, types.ModuleType, np.generic)):
            return value
        found = self._standins.get(id(value))
        if found is None:
            made = self._made(value, depth)
            found = self._standins.setdefault(id(value), (value, made))  # the value is held: its id stays its own
        return found[1]

    def _made(self, value: Any, depth: int) -> Any:
        if is_array(value):
            return self.captured(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.standin(value.__func__, depth), self.standin(value.__self__, depth))
        if isinstance(value, functools.partial):
            options = {name: self.standin(x, depth) for name, x in value.keywords.items()}
            return functools.partial(self.standin(value.func), *map(self.standin, value.args), **options)
        if depth >= _DEEP or not (isinstance(value, _UNIONS) or hasattr(value, "__dict__")):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value, depth + 1)
        return (self._container if isinstance(value, _UNIONS) else self._object)(value, depth + 1)

    def _container(self, value: Any, depth: int) -> Any:
        items = value.values() if isinstance(value, dict) else value
        made = [self.standin(x, depth) for x in items]
        if all(x is y for x, y in zip(items, made, strict=True)):
            return value
        if isinstance(value, dict):
            return dict(zip(value, made, strict=True))
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)

    def _object(self, value: Any, depth: int) -> Any:
        """Return a copy of an object whose attributes are replaced when they are read."""
        kind: Any = type(value)
        standin = self.standin

        def get(self: Any, name: str) -> Any:
            found = kind.__getattribute__(self, name)
            return found if name.startswith("__") else standin(found, depth)

        members: dict[str, Any] = {"__getattribute__": get, "__slots__": ()}
        if hasattr(kind, "__getattr__"):
            members["__getattr__"] = lambda self, name: standin(kind.__getattr__(self, name), depth)
        try:
            twin = copy.copy(value)
        except Exception:  # of an object that cannot be copied
            return value
        if twin is value:  # an enumeration's member, for example
            return value
        self._standins[id(twin)] = (twin, twin)
        try:
            object.__setattr__(
                twin, "__class__", types.new_class(kind.__name__, (kind,), {}, lambda scope: scope.update(members))
            )
        except TypeError:  # of a type that forbids it, as a namespace
            vars(twin).update({name: standin(item, depth) for name, item in vars(value).items()})
        return twin

    def called(self, function: Callable) -> Callable:
        """Return the stand-in of the function that is traced; of an object that can be called, its method's."""
        method = type(function).__call__
        return self.standin(types.MethodType(method, function) if isinstance(method, types.FunctionType) else function)

    def _function(self, function: types.FunctionType, depth: int) -> types.FunctionType:
        """Return a copy of a function whose captured arrays are stand-ins."""
        if function.__module__ and function.__module__.partition(".")[0] in _MODULES:
            return function
        stand, outer = functools.partial(self.standin, depth=depth), function.__globals__
        cells = tuple([types.CellType() for _ in function.__closure__ or ()])
        scope = {name: value for name, value in outer.items() if name.startswith("__")}
        twin = types.FunctionType(function.__code__, scope, function.__name__, None, cells or None)
        self._standins[id(function)] = (function, twin)  # before what it captures, which may be the function itself
        scope.update({name: stand(outer[name]) for name in global_names(function.__code__) if name in outer})
        for cell, old in zip(cells, function.__closure__ or (), strict=True):
            if not _is_empty(old):
                cell.cell_contents = stand(old.cell_contents)
        twin.__defaults__ = function.__defaults__ and tuple(map(stand, function.__defaults__))
        defaults = function.__kwdefaults__
        twin.__kwdefaults__ = defaults and {name: stand(value) for name, value in defaults.items()}
        twin.__dict__.update({name: stand(value) for name, value in function.__dict__.items()})
        return twin


class Argument(int):
    """The number of an element of `score_args`."""


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def is_array(value: Any) -> bool:
    """Return whether a value is an array of some library."""
    return isinstance(value, np.ndarray) or (
        hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "__dlpack__")
    )


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of the globals that code reads, in functions defined in it too."""
    names = [x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            names.extend(global_names(value))
    return tuple(dict.fromkeys(names))


class Identity:
    """A key under which a function is known, and what has to live for it to hold."""

    __slots__ = ("held", "nested", "parts")

    def __init__(self) -> None:
        self.parts: list[Hashable] = []
        self.held: list[Any] = []
        self.nested = False  # whether a function captures another one


def identity(function: Any) -> Identity | None:
    """Return what a function is known by; None where it captures what may change unseen.

    Examples
    --------
    >>> def make(window):
    ...     return lambda b, h, i, j: i - j < window
    >>> identity(make(3)).parts == identity(make(3)).parts, identity(make(3)).parts == identity(make(4)).parts
    (True, False)
    """
    found = Identity()
    return found if _identify(function, found) else None


def _identify(value: Any, found: Identity) -> bool:
    """Add a captured value to an identity; return whether it has one."""
    kind = type(value)
    rule = _RULES.get(kind)
    if rule is None:
        rule = _RULES[kind] = _rule_of(kind, value)
    return rule(value, found)


def _by_value(value: Any, found: Identity) -> bool:
    found.parts.append((type(value), value, str(value) if value == 0 else None))
    return True


def _by_object(value: Any, found: Identity) -> bool:
    found.parts.append(id(value))
    found.held.append(value)
    return True


def _by_name(value: Any, found: Identity) -> bool:
    """Modules and classes, whose attributes may change, but those of well-known ones."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name.partition(".")[0] in _MODULES and _by_object(value, found)


def _by_items(values: Iterable[Any], found: Identity) -> bool:
    found.parts.append("(")
    known = True
    for value in values:
        known = known and _identify(value, found)
    found.parts.append(")")
    return known


def _by_code(function: types.FunctionType, found: Identity) -> bool:
    code = function.__code__
    if id(code) in found.parts:  # a function that captures itself
        return _by_object(function, found)
    found.nested |= bool(found.parts)
    found.parts.append(id(code))
    found.held.append(code)
    if function.__module__ and function.__module__.partition(".")[0] in _MODULES:
        return True
    scope, known = function.__globals__, not function.__dict__  # attributes may change unseen
    for name in global_names(code):
        if name in scope:
            known = known and _identify(scope[name], found)
    for cell in function.__closure__ or ():
        known = known and not _is_empty(cell) and _identify(cell.cell_contents, found)
    if function.__defaults__:
        known = known and _by_items(function.__defaults__, found)
    if function.__kwdefaults__:
        known = known and _by_items(function.__kwdefaults__.values(), found)
    return known


def _by_partial(value: functools.partial, found: Identity) -> bool:
    found.parts.append(tuple(value.keywords))
    return _by_items((value.func, *value.args, *value.keywords.values()), found)


def _by_method(value: types.MethodType, found: Identity) -> bool:
    return _by_code(value.__func__, found) and _identify(value.__self__, found)


def _unknown(value: Any, found: Identity) -> bool:
    return False


_RULES: dict[type, Callable[[Any, Identity], bool]] = {
    types.FunctionType: _by_code,
    types.MethodType: _by_method,
    functools.partial: _by_partial,
    types.ModuleType: _by_name,
    type: _by_name,
    tuple: _by_items,
    **dict.fromkeys(_ATOMS, _by_value),
    list: _unknown,
    dict: _unknown,
}


def _rule_of(kind: type, value: Any) -> Callable[[Any, Identity], bool]:
    if issubclass(kind, np.generic):
        return _by_value
    if issubclass(kind, type):
        return _by_name
    return _by_object if issubclass(kind, _FIXED) or is_array(value) else _unknown


@dataclass(slots=True, eq=False)
class Snapshot:
    """What a function object captured when it was traced: as long as it is the same, nothing else need be looked at.

    Attributes
    ----------
    function : weak reference
        Of the only function that has its id: what is known by that is forgotten when the function ends.
    code : code
    defaults : tuple or None
    cells : list of (cell, value)
    scope : dict
        The function's globals; `names` are those that it reads, with their values.
    """

    function: Any
    code: types.CodeType
    defaults: tuple | None
    cells: list[tuple[types.CellType, Any]]
    scope: dict[str, Any]
    names: list[tuple[str, Any]]

    @classmethod
    def of(cls, function: Any, who: Identity, forget: Callable[[Any], Any]) -> "Snapshot | None":
        """Return the snapshot of a function of an identity; None where it captures functions, which capture more."""
        if not isinstance(function, types.FunctionType) or function.__kwdefaults__ or who.nested:
            return None
        code, scope = function.__code__, function.__globals__
        names = [(name, scope.get(name)) for name in global_names(code)]  # builtins may be hidden later
        cells = [(cell, cell.cell_contents) for cell in function.__closure__ or ()]
        return cls(weakref.ref(function, forget), code, function.__defaults__, cells, scope, names)

    def holds(self, function: types.FunctionType) -> bool:
        """Return whether the function, which was found by its id, captures the same objects as then."""
        if function.__code__ is not self.code or function.__defaults__ is not self.defaults or function.__kwdefaults__:
            return False
        if self.cells:
            try:
                for cell, value in self.cells:
                    if cell.cell_contents is not value:
                        return False
            except ValueError:  # the variable was deleted
                return False
        if self.names:
            get = self.scope.get
            for name, value in self.names:
                if get(name) is not value:
                    return False
        return True


def watch(held: list[Any], forget: Callable[[Any], Any]) -> list[Any]:
    """Return references to objects: weak where possible, with `forget` called when one dies, else strong."""
    references = []
    for value in held:
        try:
            references.append(weakref.ref(value, forget))
        except TypeError:
            references.append(value)
    return references


def copied(array: Any) -> Any:
    """Return a copy of a captured array: NumPy's on the host, CuPy's of one of CuPy."""
    if isinstance(array, np.ma.MaskedArray):
        raise complaint("the function captures a masked array: expected a plain one")
    if isinstance(array, np.ndarray):
        kept = np.array(array, order="C")
        kept.flags.writeable = False
        return kept
    if "cupy" in sys.modules and isinstance(array, sys.modules["cupy"].ndarray):
        return array.copy()
    try:
        kept = np.array(np.from_dlpack(array), order="C")
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise complaint(
            f"{shown(array)}, which the function captures, cannot be read ({error}): expected an array"
        ) from error
    kept.flags.writeable = False
    return kept
