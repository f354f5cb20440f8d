"""What kernels need to be told of a mask: its kind as a term of ``cfg::mask``, where its numbers lie, and its tables.

The tables that kernels read are made of all masks of a call together; what each kind adds to them, and which kernels
write it, the kind says here.  `cuattn.cuda.tables` allocates and launches, and knows no kind.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cuattn.io_model.sizes import cdiv

_ORDER_SHARED_BYTES = 40 * 1024  # more row tiles than fit here run unsorted
_KEYS_PER_BLOCK, _GROUPS_PER_BLOCK = 256, 512  # of mask_alive
_STATES_THREADS, _INTERVAL_BYTES = 128, 24  # of mask_states
_BITS_WARPS, _BITS_ROWS, _BITS_KEYS = 4, 64, 128  # of mask_bits.cuh: warps of a block, and what a warp looks at


class Source(NamedTuple):
    """Where a mask's numbers lie on a GPU, in elements from its address."""

    leading: tuple[int, ...]
    strides: tuple[int, ...]  # of the leading axes
    row: int  # from row to row, or from one vector to the next
    col: int  # from key to key
    block_m: int = 1  # rows and keys that share an element
    block_n: int = 1
    values: tuple[int, int] | None = None  # of a function: how many of rows and of keys its tiles are bounded by
    arrays: int = 0  # further arrays, which a function reads


class Generated(NamedTuple):
    """The text of a mask function for one purpose, and its arguments without addresses."""

    text: str
    arguments: Any  # structured array, ()


class Extent(NamedTuple):
    """What the sizes of tables, and the grids of the kernels that write them, follow from.

    Attributes
    ----------
    instances : int
        Distinct matrices, of all masks together.
    n_queries, n_keys : int
    block_m, block_n : int
        Rows and keys of a tile of the kernel that reads the tables.
    unit : int
        Rows that the tables count in, a divisor of `block_m`.
    packed : bool
        Whether elements of boolean masks are read as bits.
    sources : tuple of (str, Source)
        Each mask's kind, and where its numbers lie.
    """

    instances: int
    n_queries: int
    n_keys: int
    block_m: int
    block_n: int
    unit: int
    packed: bool
    sources: tuple[tuple[str, Source], ...]

    @property
    def row_tiles(self) -> int:
        """Units of rows."""
        return cdiv(self.n_queries, self.unit)

    @property
    def key_tiles(self) -> int:
        """Key tiles."""
        return cdiv(self.n_keys, self.block_n)

    @property
    def columns(self) -> int:
        """Column masks."""
        return sum(kind == "column" for kind, _ in self.sources)

    @property
    def alike(self) -> int:
        """Neighbouring rows that see the same, as far as sizes tell."""
        return min(self.n_queries if source.row == 0 else source.block_m for _, source in self.sources)

    @property
    def looks(self) -> int:
        """Blocks of a kernel that looks at single elements."""
        rows, keys = 2 * cdiv(self.n_queries, 2 * _BITS_ROWS), self.key_tiles * self.block_n
        return cdiv(self.instances * rows * cdiv(keys, _BITS_KEYS), _BITS_WARPS)

    @property
    def strides(self) -> dict[str, int]:
        """Fields that say how bits and states of tiles lie, in words (kernels/attn/params.cuh)."""
        step = {kind: (source.row != 0, source.col != 0) for kind, source in self.sources}
        by_row, by_key = step.get("boolean", (False, False))
        rows = 2 * cdiv(self.n_queries, 2 * _BITS_ROWS) if by_row else 1
        keys = self.block_n * (self.key_tiles if by_key else 1)
        return {
            "bits_tile": self.block_n * by_key,
            "bits_row": keys * by_row,
            "bits_instance": rows * keys,
            "states_instance": cdiv(self.row_tiles, 4) * cdiv(self.key_tiles, 4),
        }


class TableKernel(NamedTuple):
    """A launch that writes tables."""

    file: str
    name: str
    blocks: int
    threads: int
    shared_bytes: int = 0
    generated: str = ""  # what the mask function in it is for
    last: bool = False  # it reads what others write


class CudaHalf(NamedTuple):
    """How kernels take a kind of mask."""

    code: int  # what one such mask adds to cfg::mask, see kernels/attn/mask_format.cuh
    most: int  # masks of this kind that a launch takes
    source: str  # the field of MaskParams that describes the mask, or an array of `most` of them
    operand: str | None  # the field of Params that does, where kernels read the mask itself
    tables: Callable[[Extent], Mapping[str, int]]  # the bytes of the tables that it needs, by name
    kernels: Callable[[Extent], Sequence[TableKernel]]  # that write them, in order; equal ones run once
    by_tile: bool = True  # whether the tables depend on the sizes of tiles


def order_tables(extent: Extent) -> dict[str, int]:
    """Return the size of the order of row tiles."""
    return {"order": 16 * _ordered(extent)}


def order_kernels(extent: Extent) -> list[TableKernel]:
    """Return the kernel that sorts row tiles."""
    shared = _order_bytes(extent)
    blocks = extent.instances if shared else 0
    return [TableKernel("util/mask_order.cu", "mask_order", blocks, 1024, shared, last=True)]


def _order_bytes(extent: Extent) -> int:
    """Return the shared memory in which row tiles are sorted; 0: they are not."""
    size = 4 * (extent.row_tiles + 1)
    return size if size <= _ORDER_SHARED_BYTES else 0


def _ordered(extent: Extent) -> int:
    """Return how many row tiles are sorted, of all instances."""
    return extent.instances * cdiv(extent.n_queries, extent.block_m) if _order_bytes(extent) else 0


def column_tables(extent: Extent) -> dict[str, int]:
    """Return the sizes of intervals by key, of bounds by tile, and of the order of row tiles."""
    keys, tiles = extent.key_tiles * extent.block_n, extent.key_tiles
    matrices = extent.columns * extent.instances
    return {"cols": 16 * matrices * keys, "bounds": 32 * matrices * tiles, **order_tables(extent)}


def column_kernels(extent: Extent) -> list[TableKernel]:
    """Return the kernels that bound tiles and sort row tiles."""
    blocks, threads = extent.instances * extent.key_tiles, cdiv(extent.block_n, 32) * 32
    spans = TableKernel("util/mask_order.cu", "mask_spans", cdiv(_ordered(extent), 32), 1024, last=True)
    return [TableKernel("util/mask_bounds.cu", "mask_bounds", blocks, threads), *order_kernels(extent), spans]


def alive_tables(extent: Extent) -> dict[str, int]:
    """Return the size of the bits by key that say whether some row sees it."""
    return {"alive": 4 * extent.instances * cdiv(extent.n_keys, 32)}


def alive_kernels(extent: Extent) -> list[TableKernel]:
    """Return the kernel that looks for a row that sees a key."""
    chunks = cdiv(cdiv(extent.n_queries, extent.alike), _GROUPS_PER_BLOCK)
    blocks = extent.instances * chunks * cdiv(extent.n_keys, _KEYS_PER_BLOCK)
    return [TableKernel("util/mask_alive.cu", "mask_alive", blocks, _KEYS_PER_BLOCK, 0, "visible", True)]


def stated_tables(extent: Extent) -> dict[str, int]:
    """Return the sizes of states of tiles, of the order of row tiles, and of the bits by key."""
    states = 4 * extent.instances * extent.strides["states_instance"]
    return {"states": states, **order_tables(extent), **alive_tables(extent)}


def boolean_tables(extent: Extent) -> dict[str, int]:
    """Return the sizes of elements as bits, and of what follows from states of tiles."""
    bits = 8 * extent.instances * extent.strides["bits_instance"] if extent.packed else 0
    return {"bits": bits, **stated_tables(extent)}


def boolean_kernels(extent: Extent) -> list[TableKernel]:
    """Return the kernel that reads the mask."""
    return [TableKernel("util/mask_bits.cu", "mask_bits", extent.looks, 32 * _BITS_WARPS), *order_kernels(extent)]


def function_tables(extent: Extent) -> dict[str, int]:
    """Return the sizes of what bounds tiles, and of what follows from their states."""
    rows, keys = next(source.values for _, source in extent.sources if source.values is not None)
    values = _INTERVAL_BYTES * extent.instances * (extent.row_tiles * rows + extent.key_tiles * keys)
    found = stated_tables(extent)
    return {"values": values, "rough": 0 if _is_beside(extent) else found["states"], **found}


def function_kernels(extent: Extent) -> list[TableKernel]:
    """Return the kernels that bound values in tiles, then the tiles, and look at the elements of those left open.

    Beside boolean and block masks bounds are all that the states tell.
    """
    file, threads = "util/mask_states.cu", _STATES_THREADS
    warps = extent.instances * (extent.row_tiles + extent.key_tiles)
    words = extent.instances * extent.strides["states_instance"]
    looks = TableKernel("util/mask_elements.cu", "mask_elements", extent.looks, 32 * _BITS_WARPS, 0, "visible")
    return [
        TableKernel(file, "mask_values", cdiv(32 * warps, threads), threads, 0, "tiles"),
        TableKernel(file, "mask_states", cdiv(words, threads), threads, 0, "tiles"),
        *(alive_kernels(extent) if _is_beside(extent) else [looks]),
        *order_kernels(extent),
    ]


def _is_beside(extent: Extent) -> bool:
    """Return whether a function stands beside a mask of elements or blocks."""
    return sum(kind != "column" for kind, _ in extent.sources) > 1


def element_tables(extent: Extent) -> dict[str, int]:
    """Return the sizes of a function's elements as bits, and of what else it needs."""
    return {**boolean_tables(extent), **function_tables(extent)}


def source_of(array: Any, block_m: int = 1, block_n: int = 1) -> Source:
    """Describe an array (..., rows or vectors, keys); one on the host is contiguous, as its copy on a GPU will be."""
    steps = zip(array.shape, array.strides, strict=True)
    *strides, row, col = (0 if n == 1 else stride // array.dtype.itemsize for n, stride in steps)
    return Source(array.shape[:-2], tuple(strides), row, col, block_m, block_n)
