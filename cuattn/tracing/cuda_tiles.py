"""Tile states of a mask function as CUDA source, for arrays that only the device can read.

What depends on rows or on keys alone is computed for each of them, and its least and greatest value in each tile are
found; the rest of the function is bounded tile by tile with the rules of ``attn/bounds.cuh``.  The text is a namespace
``traced``, as that of :mod:`cuattn.tracing.cuda`::

    struct alignas(8) Arguments { ... };
    constexpr int row_count, key_count;          // how many values rows and keys have
    void row_values(const Arguments&, int b, int h, int i, double* values);
    void key_values(const Arguments&, int b, int h, int j, double* values);
    bounds::Truth visible_in(const Arguments&, int b, int h, const bounds::Interval* rows,
                             const bounds::Interval* keys);

A tile's interval of a value joins ``bounds::point(value)`` over its rows (``bounds::joined``); the state of a tile is
lo + hi of what `visible_in` returns.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cuattn.tracing.bound import Facts
from cuattn.tracing.cuda import Source, Writer
from cuattn.tracing.graph import I, J, Node, order
from cuattn.tracing.operations import DIVISIONS, TABLE

_RULES = {
    "add",
    "subtract",
    "negative",
    "multiply",
    "absolute",
    "maximum",
    "minimum",
    "select",
    "floor_divide",
    "remainder",
    "floor",
    "ceil",
    "trunc",
    "rint",
    "sqrt",
    "to_float",
    "to_integer",
    "less",
    "less_equal",
    "equal",
    "logical_not",
    "logical_and",
    "logical_or",
    "logical_xor",
}
"""Operations that ``attn/bounds.cuh`` bounds; of others nothing is known."""


def tile_source(root: Node, facts: Facts, dtype: Any = np.float32, namespace: str = "traced") -> Source:
    """Return the CUDA text that bounds a mask function over tiles.

    Parameters
    ----------
    root : Node
        Of kind boolean.
    facts : Facts
        Of the calls for which the text is.
    dtype : dtype_like, default float32
        The accumulator's.
    namespace : str, default "traced"
        Of the text; or one within.

    Examples
    --------
    >>> from cuattn.tracing.bound import facts
    >>> from cuattn.tracing.functions import MASK, trace
    >>> bound = trace(lambda b, h, i, j: i - j < 4, MASK).bind()
    >>> text = tile_source(bound.root, facts(bound)).text
    >>> print(text[text.index("    const auto") :])
        const auto v0 = bounds::whole(rows[0]);
        const auto v1 = bounds::whole(keys[0]);
        const auto v2 = bounds::whole(bounds::point((double)4));
        const auto v3 = bounds::whole(bounds::subtract(v0, v1));
        const auto v4 = bounds::less(v3, v2);
        return v4;
    }
    }  // namespace traced
    <BLANKLINE>
    """
    return _TileWriter(root, facts, np.dtype(dtype), namespace).written()


class _TileWriter(Writer):
    """Writes the text of one mask."""

    def __init__(self, root: Node, facts: Facts, dtype: np.dtype, namespace: str) -> None:
        super().__init__({"visible": [root]}, facts, dtype, False, namespace)
        (root,) = self._functions["visible"]
        self._root, self._stages = root, {}
        both = I | J
        reached = order(root, inner=lambda node: node.depends & both == both and not self._is_opaque(node))
        self._inner = [node for node in reached if node.depends & both == both]  # what rows and keys decide together
        # The largest parts that one of them decides, or neither.
        self._outer = {bits: [node for node in reached if node.depends & both == bits] for bits in (0, I, J)}

    def _is_opaque(self, node: Node) -> bool:
        """Return whether nothing is known of an element, wherever it lies."""
        return node.op == "load" and self._facts.arrays[node.value].dtype.itemsize == 2 and node.kind == "f"

    def written(self) -> Source:
        """Return the text and what belongs to it."""
        counts = [f"constexpr int {name}_count = {len(self._outer[bit])};" for name, bit in (("row", I), ("key", J))]
        values = [self._values("row", "i", self._outer[I]), self._values("key", "j", self._outer[J])]
        made = self.assembled("attn/bounds.cuh", [*counts, *values, self._visible()])
        return made._replace(counts=(len(self._outer[I]), len(self._outer[J])))

    def _values(self, name: str, index: str, wanted: Sequence[Node]) -> str:
        """Write the function that computes all that a row or a key decides."""
        body, names = self.body(wanted, "Element")
        ends = [f"    values[{number}] = (double){names[node]};" for number, node in enumerate(wanted)]
        parameters = f"const Arguments& args, int b, int h, int {index}, double* values"
        head = f"__device__ __forceinline__ void {name}_values({parameters}) {{"
        return "\n".join([head, *body, *ends, "}"])

    def _visible(self) -> str:
        exact, names = self.body(self._outer[0], "Element")
        lines: list[str] = []
        bounded: dict[Node, str] = {}
        made = len(exact)
        for bit, array in ((I, "rows"), (J, "keys"), (0, "")):
            for number, node in enumerate(self._outer[bit]):
                text = f"{array}[{number}]" if array else f"bounds::point((double){names[node]})"
                bounded[node] = f"v{made + len(lines)}"
                lines.append(f"    const auto {bounded[node]} = {_as_kind(node, text)};")
        for node in self._inner:
            bounded[node] = f"v{made + len(lines)}"
            rule = self._rule(node, [bounded.get(x, "") for x in node.args])
            lines.append(f"    const auto {bounded[node]} = {rule};")
        intervals = "const bounds::Interval* rows, const bounds::Interval* keys"
        parameters = f"const Arguments& args, int b, int h, {intervals}"
        head = f"__device__ __forceinline__ bounds::Truth visible_in({parameters}) {{"
        return "\n".join([head, *exact, *lines, f"    return {bounded[self._root]};", "}"])

    def _rule(self, node: Node, operands: Sequence[str]) -> str:
        """Write the bounds of an operation."""
        if node.op == "load" and not self._is_opaque(node):
            return _as_kind(node, self._box(node, operands))
        known = node.op in _RULES and (node.op not in DIVISIONS or node.kind == "i")
        if not known:
            return "bounds::either()" if node.kind == "b" else _as_kind(node, "bounds::anything()")
        if node.op == "multiply" and operands[0] == operands[1]:
            text = f"bounds::squared({operands[0]})"
        else:
            text = f"bounds::{node.op}({', '.join(operands)})"
        if node.kind == "b" or (node.kind == "f" and TABLE[node.op].exact):
            return text
        return f"bounds::{'whole' if node.kind == 'i' else 'widened'}({text})"

    def _box(self, node: Node, indices: Sequence[str]) -> str:
        """Write the bounds of an array's elements whose indices lie in intervals."""
        self._load(node, indices)  # so the arguments hold the array
        text = f"bounds::Box(args.array{node.value})"
        for axis, index in enumerate(indices):
            for name in ("length", "stride"):
                self._fields.setdefault(f"{name}{node.value}_{axis}", "long long")
            text += f".along({index}, args.length{node.value}_{axis}, args.stride{node.value}_{axis})"
        return f"{text}.values()"


def _as_kind(node: Node, text: str) -> str:
    """Write an interval of values as that of a boolean, an integer or a number."""
    rule = {"b": "truth_of", "i": "whole", "f": "widened"}[node.kind]
    return f"bounds::{rule}({text})"
