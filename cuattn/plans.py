"""The plan of a call: which kernel runs, with which tiles and how much memory, and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """How one attention call will run.  Made by :func:`cuattn.plan`; prints as a readable table.

    Attributes
    ----------
    kernel : {"cpu", "sm80", "sm90"}
        The kernel family.
    direction : {"forward", "backward", "jvp", "backward_jvp", "double_backward"}
        What it computes.
    block_m, block_n : int
        Query rows and key columns of a tile.
    workers : int
        Threads on the CPU; warps of one thread block on a GPU.
    smem_bytes : int
        Shared memory of one thread block, in bytes (0 on the CPU).
    workspace_bytes : int
        Memory beyond the arguments and results, in bytes, over all workers.
    reason : str
        Why this kernel was chosen.
    notes : tuple of str
        What else is worth knowing, a line each.
    constants : tuple of (str, object)
        The constants that the kernel is specialised by, in order.

    See Also
    --------
    cuattn.plan : Makes one.

    Examples
    --------
    >>> import numpy as np
    >>> import cuattn
    >>> plan = cuattn.plan(*np.ones((3, 4, 2)))
    >>> plan.kernel, plan.direction
    ('cpu', 'forward')
    """

    kernel: str
    direction: str
    block_m: int
    block_n: int
    workers: int
    smem_bytes: int
    workspace_bytes: int
    reason: str
    notes: tuple[str, ...] = ()
    constants: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        rows = [
            ("kernel", f"{self.kernel} ({self.reason})"),
            ("direction", self.direction),
            ("tile", f"{self.block_m} query rows x {self.block_n} keys"),
            ("threads" if self.kernel == "cpu" else "warps", str(self.workers)),
            *([] if self.kernel == "cpu" else [("shared memory", readable_bytes(self.smem_bytes))]),
            ("workspace", readable_bytes(self.workspace_bytes)),
            *(("note", note) for note in self.notes),
            *((name, str(value)) for name, value in self.constants),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def readable_bytes(count: int) -> str:
    """Write a byte count with a binary unit.

    >>> readable_bytes(48 * 1024)
    '48.0 KiB'
    """
    power = min(max(count.bit_length() - 1, 0) // 10, 3)
    return f"{count / 1024**power:.1f} {'KMG'[power - 1]}iB" if power else f"{count} B"
