"""Graphs as CUDA source: one header with the functions of a score or a mask.

The text is made of the graph alone and names everything by numbers, so that equal graphs give equal texts, which
compile once, and nothing that a user wrote reaches the compiler.  It is a namespace ``traced``::

    struct alignas(8) Arguments { ... };         // numbers, arrays and their strides: a kernel parameter
    struct Head { ... };                         // what depends on b and h alone,
    struct Row { ... };                          // on i too,
    struct Key { ... };                          // or on j too, and is worth computing once
    Head head(const Arguments&, int b, int h);
    Row row(const Arguments&, const Head&, int b, int h, int i);
    Key key(const Arguments&, const Head&, int b, int h, int j);
    void NAME(const Arguments&, const Head&, const Row&, const Key&, acc s, int b, int h, int i, int j,
              acc& result0, ...);                // for each NAME of the functions that were asked for

``traced::Use`` says what the stages depend on: ``head_of_row``, ``head_of_key``: whether `Row`, `Key` hold what depends
on b or h, for tiles whose rows belong to several heads.  Indices must exist: kernels clamp those of padded rows and
keys.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cuattn.tracing.bound import Bound, Facts
from cuattn.tracing.build import apply, is_uniform, remade
from cuattn.tracing.graph import B, H, I, J, Node, S, constant, order, rewrite
from cuattn.tracing.operations import COMPARISONS, ROUNDED, TABLE
from cuattn.tracing.ranges import Interval
from cuattn.tracing.values import fit, fits_int32, host_value, known

_ELEMENTS = {
    "bool": "bool",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
}
_INDICES = "int b, int h, int i, int j"
_STAGES = {
    "Head": "int b, int h",
    "Row": "const Head& head, int b, int h, int i",
    "Key": "const Head& head, int b, int h, int j",
}
_WIDE = {"long long": np.int64, "int": np.int32, "float": np.float32, "double": np.float64, "bool": np.bool_}


class Source(NamedTuple):
    """The text of some functions, and what its ``Arguments`` are made of.

    Attributes
    ----------
    text : str
        A header, to be put in front of a kernel.
    arguments : numpy.dtype
        The structure ``traced::Arguments``, C's layout.
    numbers : tuple of Node
        Values that the host computes, the fields ``number0, ...``.
    counts : tuple of int
        Of :func:`tile_source`: how many values rows and keys have.
    """

    text: str
    arguments: np.dtype
    numbers: tuple[Node, ...]
    counts: tuple[int, int] = (0, 0)

    def pack(self, bound: Bound, pointers: Sequence[int]) -> np.ndarray:
        """Return the arguments of a call.

        Parameters
        ----------
        bound : Bound
            Of the facts for which the text is.
        pointers : sequence of int
            Addresses of the arrays, by slot.

        Returns
        -------
        array, ()
            Of dtype `arguments`.
        """
        values = {f"number{index}": host_value(node, bound.numbers) for index, node in enumerate(self.numbers)}
        for slot, (array, pointer) in enumerate(zip(bound.arrays, pointers, strict=True)):
            values[f"array{slot}"] = pointer
            for axis, (length, stride) in enumerate(zip(array.shape, array.strides, strict=True)):
                place = f"{slot}_{axis}"
                values |= {f"length{place}": length, f"stride{place}": stride // array.itemsize}
                values[f"pitch{place}"] = math.prod(array.shape[axis + 1 :])
            dense = not array.ndim or array.shape[-1] <= 1 or array.strides[-1] == array.itemsize
            names = self.arguments.names or ()
            if f"array{slot}" in names and not dense and f"stride{slot}_{array.ndim - 1}" not in names:
                raise ValueError(f"array {slot} has strides {array.strides}: expected those of the facts")
        return np.array(tuple([values.get(name, 0) for name in self.arguments.names or ()]), self.arguments)


def source(
    functions: Mapping[str, Sequence[Node]],
    facts: Facts,
    dtype: Any = np.float32,
    *,
    short: bool = False,
    namespace: str = "traced",
) -> Source:
    """Return the CUDA text of some functions.

    Parameters
    ----------
    functions : mapping of str to sequence of Node
        The graphs that each function computes together.
    facts : Facts
        Of the calls for which the text is; equal texts may serve several.
    dtype : dtype_like, default float32
        The accumulator's: float32 or float64.
    short : bool, default False
        Whether the problem is of 16 bits, for which coarser quotients, exponentials, logarithms and tanh do.
    namespace : str, default "traced"
        Of the text; or one within.

    Returns
    -------
    Source

    Examples
    --------
    >>> from cuattn.tracing.bound import facts
    >>> from cuattn.tracing.functions import trace
    >>> bound = trace(lambda s, b, h, i, j: s + 0.5 * (j - i)).bind()
    >>> made = source({"score": [bound.root]}, facts(bound))
    >>> print(made.text[made.text.index("struct alignas"):])  # doctest: +ELLIPSIS
    struct alignas(8) Arguments {
        float number0;
    };
    ...
        const int v0 = j - i;
        const float v1 = (float)v0;
        const float v2 = product_of(args.number0, v1);
        const float v3 = fma_of(args.number0, v1, s);
        result0 = v3;
    }
    }  // namespace traced
    <BLANKLINE>
    >>> float(made.pack(bound, [])["number0"])
    0.5
    """
    return Writer(functions, facts, np.dtype(dtype), short, namespace).written()


class Writer:
    """Writes one text; parameters as of :func:`source`."""

    def __init__(
        self, functions: Mapping[str, Sequence[Node]], facts: Facts, dtype: np.dtype, short: bool, namespace: str
    ) -> None:
        self._namespace = namespace
        self._functions = {name: [_by_difference(root, facts) for root in roots] for name, roots in functions.items()}
        self._facts, self._short = facts, short
        self._acc = "double" if dtype == np.float64 else "float"
        self._roots = tuple(dict.fromkeys(root for roots in self._functions.values() for root in roots))
        self._known: dict[Node, Interval] = known(self._roots, facts)
        self._nodes = order(*self._roots)
        self._fields: dict[str, str] = {}  # of Arguments: C++ types by name
        self._number_of = {node: number for number, node in enumerate(self._host_nodes())}
        self._fields.update({f"number{number}": self._type(node) for node, number in self._number_of.items()})
        self._stages = self._staged()

    def written(self) -> Source:
        """Return the text and what belongs to it."""
        functions = [self._function(name, roots) for name, roots in self._functions.items()]
        bodies = [self._stage(name) for name in _STAGES] + functions
        structs = [
            _struct(name, [_declared(self._type(x), field) for x, field in self._of_stage(name)]) for name in _STAGES
        ]
        return self.assembled("attn/traced.cuh", [*structs, self._uses(), *bodies])

    def assembled(self, header: str, parts: Sequence[str]) -> Source:
        """Return the text of some parts, behind the structure of what they use."""
        self._fields = self._fields or {"nothing": "int"}
        members = [_declared(kind, name) for name, kind in self._fields.items()]
        arguments = _struct("alignas(8) Arguments", members)  # so that what a kernel takes behind them lies alike
        begin = [f'#include "{header}"', f"namespace {self._namespace} {{", f"using acc = {self._acc};", arguments]
        text = "\n".join([*begin, *parts])
        layout = [(name, np.uint64 if kind.endswith("*") else _WIDE[kind]) for name, kind in self._fields.items()]
        return Source(
            f"{text}\n}}  // namespace {self._namespace}\n", np.dtype(layout, align=True), tuple(self._number_of)
        )

    # What is computed where.

    def _host_nodes(self) -> list[Node]:
        """Return the largest values that the host computes."""
        host = {node for node in self._nodes if is_uniform(node) and node.op != "constant"}
        used = {arg for node in self._nodes if node not in host for arg in node.args}
        return [node for node in self._nodes if node in host and (node in used or node in self._roots)]

    def _staged(self) -> dict[Node, tuple[str, str]]:
        """Return the stage and the field of each value that is computed once for many elements."""
        heavy: dict[Node, bool] = {}
        for node in self._nodes:
            own = node.op == "load" or (node.op in TABLE and TABLE[node.op].heavy)
            heavy[node] = own or any(heavy[x] for x in node.args if not is_uniform(x))
        found: dict[Node, tuple[str, str]] = {}
        used: dict[Node, set[str]] = {root: {"Element"} for root in self._roots}
        for node in self._nodes:
            for arg in node.args:
                used.setdefault(arg, set()).add(_stage_of(node))
        for node in self._nodes:
            stage = _stage_of(node)
            if stage in _STAGES and not is_uniform(node) and heavy[node] and used[node] - {stage}:
                found[node] = stage, f"value{len(found)}"
        return found

    def _of_stage(self, name: str) -> list[tuple[Node, str]]:
        return [(node, field) for node, (stage, field) in self._stages.items() if stage == name]

    def _uses(self) -> str:
        """Write down what the stages depend on."""
        lines = []
        for name in ("Row", "Key"):
            of_head = any(node.depends & (B | H) for node, _ in self._of_stage(name))
            lines.append(f"static constexpr bool head_of_{name.lower()} = {str(of_head).lower()};")
        return _struct("Use", lines)

    # Functions.

    def _stage(self, name: str) -> str:
        wanted = self._of_stage(name)
        body, names = self.body([node for node, _ in wanted], name)
        values = ", ".join(names[node] for node, _ in wanted)
        head = f"__device__ __forceinline__ {name} {name.lower()}(const Arguments& args, {_STAGES[name]}) {{"
        return "\n".join([head, *body, f"    return {{{values}}};", "}"])

    def _function(self, name: str, roots: Sequence[Node]) -> str:
        if not re.fullmatch("[a-z_]+", name):
            raise ValueError(f"{name!r} as the name of a function: expected lower case letters")
        kinds = ["long long" if root.kind == "i" else self._type(root) for root in roots]
        results = "".join(f", {kind}& result{number}" for number, kind in enumerate(kinds))
        body, names = self.body(roots, "Element")
        ends = [f"    result{number} = {names[root]};" for number, root in enumerate(roots)]
        parameters = (
            f"const Arguments& args, const Head& head, const Row& row, const Key& key, acc s, {_INDICES}{results}"
        )
        return "\n".join([f"__device__ __forceinline__ void {name}({parameters}) {{", *body, *ends, "}"])

    def body(self, roots: Sequence[Node], stage: str) -> tuple[list[str], dict[Node, str]]:
        """Return the statements that compute some values, and the names of these."""
        names: dict[Node, str] = {}
        lines: list[str] = []
        for node in order(*roots, inner=lambda x: not self._given(x, stage)):
            names[node] = self._given(node, stage) or f"v{len(lines)}"
            if names[node] == f"v{len(lines)}":
                expression = self._rounded(node, names, stage) or self._expression(node, [names[x] for x in node.args])
                lines.append(f"    const {self._type(node)} {names[node]} = {expression};")
        return lines, names

    def _given(self, node: Node, stage: str) -> str | None:
        """Return the text of a value that is there: a variable, a literal, an argument, or made in another stage."""
        if node.op == "constant":
            return _literal(node.value, self._type(node))
        if node in self._number_of:
            return f"args.number{self._number_of[node]}"
        if node.op == "variable":
            return node.value
        made = self._stages.get(node)
        return f"{made[0].lower()}.{made[1]}" if made and made[0] != stage else None

    # Expressions.

    def _type(self, node: Node) -> str:
        if node.kind != "i":
            return "bool" if node.kind == "b" else self._acc
        if node.op == "offset":
            return "int" if math.prod(self._facts.arrays[node.value].shape) < 2**31 else "long long"
        return "int" if fits_int32(self._known[node]) else "long long"

    def _expression(self, node: Node, operands: list[str]) -> str:
        if node.op == "offset":
            return self._place(node, operands, "pitch", self._type(node))
        if node.op == "load":
            return self._load(node, operands)
        row, kind = TABLE[node.op], self._type(node)
        work = kind  # integers are computed in the widest type among operands and result
        if node.kind == "i" and node.op not in ("to_integer", "select"):
            types = [kind, *map(self._type, node.args)]
            work = "long long" if "long long" in types else kind
            operands = [x if have == work else f"({work}){x}" for x, have in zip(operands, types[1:], strict=True)]
        modular = row.wraps and node.kind == "i" and not math.isfinite(self._known[node].lo)
        if modular:
            operands = [f"(unsigned long long){x}" for x in operands]
        unsigned = "unsigned long long" if work == "long long" else "unsigned"
        text = self._template(node).format(*operands, T=work, U=unsigned, f="f" if self._acc == "float" else "")
        return f"({kind})({text})" if modular or work != kind else text

    def _rounded(self, node: Node, names: Mapping[Node, str], stage: str) -> str | None:
        """Write a product of numbers, or a sum with one, which is rounded once whatever else uses the product.

        Equal graphs so give equal results in all kernels, which the compiler may fuse each in its own way.
        """
        if node.kind != "f" or node.op not in ("add", "subtract", "multiply"):
            return None
        if node.op == "multiply":
            return f"product_of({', '.join([names[x] for x in node.args])})"
        for place in (1, 0):
            product, other = node.args[place], names[node.args[1 - place]]
            if product.op == "multiply" and not self._given(product, stage):
                a, b = [names[x] for x in product.args]
                if node.op == "subtract":
                    a, other = (f"-{a}", other) if place else (a, f"-{other}")
                return f"fma_of({a}, {b}, {other})"
        return None

    def _template(self, node: Node) -> str:
        row = TABLE[node.op]
        if self._short and row.short and (node.depends & S or node.op not in ROUNDED):
            return row.short
        if row.unsigned and row.positive and node.kind == "i":
            x, y = (self._known[arg] for arg in node.args)
            if y.lo > 0:
                return row.unsigned if x.lo >= 0 else row.positive
        return row.cuda

    def _load(self, node: Node, indices: list[str]) -> str:
        slot = node.value
        layout = self._facts.arrays[slot]
        element = _ELEMENTS[np.dtype(layout.dtype).name]
        self._fields[f"array{slot}"] = f"const {element}*"
        place = self._place(node, indices, "stride", "int" if layout.near else "long long")
        text = f"fetched(args.array{slot} + ({place}))"
        if node.kind != "f":
            return f"({self._type(node)}){text}"
        return f"to_acc({text})" if element != "double" or self._acc == "double" else f"(float){text}"

    def _place(self, node: Node, indices: list[str], factor: str, kind: str) -> str:
        """Write the sum of the indices of an element times their factors, "stride" or "pitch"."""
        layout, terms = self._facts.arrays[node.value], []
        for axis, (arg, index, length) in enumerate(zip(node.args, indices, layout.shape, strict=True)):
            axis_of = f"{node.value}_{axis}"
            wraps, clamps = fit(self._known[arg], length)
            if wraps or clamps:
                self._fields[f"length{axis_of}"] = "int" if length < 2**31 else "long long"
                index = f"wrapped({index}, args.length{axis_of})" if wraps else index
                index = f"clamped({index}, args.length{axis_of})" if clamps else index
            terms.append(f"({kind}){index}")
            if axis < len(layout.shape) - 1 or (factor == "stride" and not layout.dense):
                self._fields[f"{factor}{axis_of}"] = kind
                terms[-1] += f" * args.{factor}{axis_of}"
        return " + ".join(terms) or "0"


@functools.lru_cache(maxsize=256)
def _by_difference(root: Node, facts: Facts) -> Node:
    """Return a graph whose comparisons of integers look at their difference, if that is computed anyway.

    What depends on i - j alone is then seen to, and computed once for the elements of a diagonal.
    """
    found = known((root,), facts)

    def change(node: Node, args: tuple[Node, ...]) -> Node:
        if node.op in COMPARISONS and args == node.args and args[0].kind == "i":
            for x, y, swapped in ((*args, False), (*args[::-1], True)):
                difference = apply("subtract", x, y)
                if difference in found and fits_int32(found[difference]):
                    sides = difference, constant(0)
                    return apply(node.op, *(sides[::-1] if swapped else sides))
        return remade(node, args)

    return rewrite(root, change)


def _stage_of(node: Node) -> str:
    """Return for how many elements a value is the same."""
    by = {0: "Head", I: "Row", J: "Key"}
    return "Element" if node.depends & S else by.get(node.depends & (I | J), "Element")


def _declared(kind: str, name: str) -> str:
    return f"{kind} __restrict__ {name};" if kind.endswith("*") else f"{kind} {name};"


def _struct(name: str, lines: Sequence[str]) -> str:
    return "\n".join([f"struct {name} {{", *(f"    {line}" for line in lines), "};"])


def _literal(value: Any, kind: str) -> str:
    """Write a number in C++."""
    if kind == "bool":
        return str(value).lower()
    if kind in ("int", "long long"):
        suffix, least = ("ll", -(2**63)) if kind == "long long" else ("", -(2**31))
        return (
            f"({value + 1}{suffix} - 1)"
            if value == least
            else f"({value}{suffix})"
            if value < 0
            else f"{value}{suffix}"
        )
    rounded = float(np.float32(value)) if kind == "float" else float(value)
    if math.isnan(rounded):
        return f"(infinity<{kind}>() - infinity<{kind}>())"
    if math.isinf(rounded):
        return f"infinity<{kind}>()" if rounded > 0 else f"(-infinity<{kind}>())"
    text = f"{rounded.hex()}{'f' if kind == 'float' else ''}"
    return f"({text})" if text.startswith("-") else text
