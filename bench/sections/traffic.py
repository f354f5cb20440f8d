"""Bytes against the papers' theorems."""

from __future__ import annotations

import statistics
from typing import Any

from bench.sections.common import by_case, colour, name, panels, table

TITLE = "Bytes against the theorems (FlashAttention, theorems 2 and 5, proposition 4)"
COMMAND = "python -m bench.traffic"
STUDIES = {
    "theorem-2": "forward",
    "theorem-5": "backward",
    "proposition-4": "block-sparse",
    "beyond-l2": "one long head",
}


def _rows(rows: list[dict[str, Any]], study: str, **wanted: Any) -> list[dict[str, Any]]:
    found = [row for x in by_case(rows, study).values() for row in x.values()]
    return [row for row in found if all(row["problem"][key] == value for key, value in wanted.items())]


def hbm(row: dict[str, Any]) -> float:
    """Return the gigabytes to and from device memory."""
    return (row["counters"]["hbm_read"] + row["counters"]["hbm_write"]) / 1e9


def entered(row: dict[str, Any]) -> float:
    """Return the gigabytes that entered the multiprocessors."""
    return row["counters"]["l2_to_sm"] / 1e9


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for study, label in STUDIES.items():
        for row in _rows(rows, study):
            p = row["problem"]
            if p["kernel"] == "standard" and p["n"] not in (1024, 4096):
                continue
            shape = f"{label}, N {p['n']}, d {p['d']}" + (f", s {p['density']:g}" if study == "proposition-4" else "")
            tile = p.get("block_n" if study == "theorem-5" else "block_m")
            expected = row["expected_l2_to_sm"] / 1e9 if "expected_l2_to_sm" in row else None
            who = name(p["kernel"] if p["kernel"] == "standard" else f"cuattn-{p['kernel']}")
            lines.append((f"{shape}: {who}", str(tile) if tile else None, entered(row), expected, hbm(row)))
    about = (
        "64 heads (one in the last lines), float16.  What enters the multiprocessors is what the algorithm reads, "
        "tile by tile: T passes over the operand outside the chip, with M = the tile that is kept.  Device memory "
        "sees less of it while the L2 cache holds the keys of the heads at work."
    )
    head = ("", "block", "GB into the multiprocessors", "GB by the algorithm", "GB of device memory")
    return f"{about}\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return how far the counts are from the algorithms."""
    found = [
        row for study in STUDIES if study != "theorem-5" for row in _rows(rows, study) if "expected_l2_to_sm" in row
    ]
    off = max((abs(row["counters"]["l2_to_sm"] / row["expected_l2_to_sm"] - 1) for row in found), default=0.0)
    read = f"What enters the multiprocessors is what the algorithms read, counted within {off:.1%} over"
    if any(_rows(rows, study) for study in ("theorem-2", "proposition-4")):
        return (
            f"{read} all lengths, head dimensions, block sizes and densities of the forward: quadratic in N, in "
            f"inverse proportion to the rows kept on the chip (M), in proportion to the density.  {_backward(rows)}"
            f"Device memory sees less, as long as the L2 cache holds the keys of the heads at work.{_standard(rows)}"
        )
    lengths = sorted({row["problem"]["n"] for row in found})
    share = max((hbm(row) / entered(row) for row in found), default=0.0)
    back = _backward(rows)
    return (
        f"{read} the forwards of one head of {' to '.join(f'{n:,}' for n in (lengths[0], lengths[-1]))} tokens: "
        f"quadratic in N.  Device memory sees at most {share:.1%} of it, since blocks side by side share their keys in "
        f"the L2 cache.  {back}The forward's sweeps over d, block sizes and densities"
        f"{'' if back else ', and the backward,'} are not measured yet."
    )


def _backward(rows: list[dict[str, Any]]) -> str:
    """Return how the backward's counts stand to algorithm 4."""
    shares = {}
    for kernel in ("sm90", "sm80"):
        found = [row for row in _rows(rows, "theorem-5", kernel=kernel) if "expected_l2_to_sm" in row]
        shares[kernel] = [row["counters"]["l2_to_sm"] / row["expected_l2_to_sm"] for row in found]
    if not all(shares.values()):
        return ""
    return (
        f"The backward on the Hopper kernel reads what algorithm 4 reads within "
        f"{max(abs(share - 1) for share in shares['sm90']):.1%}, the portable kernel {min(shares['sm80']):.2f} to "
        f"{max(shares['sm80']):.2f} times that: it adds to dQ from registers, and {_answers(rows):.1f} bytes come back "
        f"for every four that it adds.  "
    )


def _answers(rows: list[dict[str, Any]]) -> float:
    """Return the bytes that entered beside what algorithm 4 reads, per element added to dQ (median)."""
    found = []
    for row in _rows(rows, "theorem-5", kernel="sm80"):
        p = row["problem"]
        added = p["heads"] * p["n"] * p["d"] * -(-p["n"] // p["block_n"])
        found.append((row["counters"]["l2_to_sm"] - row["expected_l2_to_sm"]) / added)
    return statistics.median(found)


def _standard(rows: list[dict[str, Any]]) -> str:
    """Return how many times cuattn's bytes standard attention moves to and from device memory, forward and backward."""
    shares = {}
    for study in ("theorem-2", "theorem-5"):
        plain, ours = (_rows(rows, study, kernel=kernel, n=4096, d=64) for kernel in ("standard", "sm90"))
        if plain and ours:
            shares[STUDIES[study]] = hbm(plain[0]) / hbm(ours[0])
    said = ", ".join(f"{direction} {share:.0f} times" for direction, share in shares.items())
    return f"  At 4,096 tokens standard attention moves more to and from it: {said} as much." if said else ""


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw a panel for each study that has rows: forward and backward against N, block sizes, densities, one head."""
    rows_kept, keys_kept = (
        [row for row in _rows(rows, study, kernel="sm80", d=64) if _varied(row)] for study in ("theorem-2", "theorem-5")
    )
    densities, heads = _rows(rows, "proposition-4"), _rows(rows, "beyond-l2")
    lengths = [study for study in ("theorem-2", "theorem-5") if _rows(rows, study)]
    others = sum(map(bool, (rows_kept, keys_kept, densities, heads)))
    drawn, axes = panels(max(len(lengths) + others, 1), 4.0, 3.5, rows=2 if len(lengths) + others > 3 else 1)
    left = iter(axes)
    for study in lengths:
        _against_length(next(left), _rows(rows, study, d=64, heads=64), f"{STUDIES[study]}, d 64")
    for found, key, label in ((rows_kept, "block_m", "query rows"), (keys_kept, "block_n", "keys")):
        if found:
            _against(axis := next(left), found, key, f"{label} in a block, N 4096")
            axis.set_xscale("log", base=2)
    if densities:
        _against(next(left), densities, "density", "density s, N 4096")
    if heads:
        _against_length(next(left), heads, "one head, d 128")
    for axis in left:
        axis.set_axis_off()
    axes[0].legend(frameon=False, fontsize=7)
    drawn.suptitle("circles: into the multiprocessors; dashed: by the algorithm;\nsquares: device memory", fontsize=9)
    return drawn


def _against_length(axis: Any, rows: list[dict[str, Any]], title: str) -> None:
    for kernel in ("sm80", "sm90", "standard"):
        found = [row for row in rows if row["problem"]["kernel"] == kernel and not _varied(row)]
        found.sort(key=lambda row: row["problem"]["n"])
        if not found:
            continue
        runner = kernel if kernel == "standard" else f"cuattn-{kernel}"
        shade, lengths = colour(runner), [row["problem"]["n"] for row in found]
        axis.loglog(lengths, [hbm(row) for row in found], "s-", color=shade, alpha=0.5, markersize=4)
        if kernel != "standard":
            axis.loglog(lengths, [entered(row) for row in found], "o", color=shade)
            axis.loglog(lengths, [row["expected_l2_to_sm"] / 1e9 for row in found], "--", color=shade)
        axis.plot([], [], "s-", color=shade, label=name(runner))
    axis.set_xscale("log", base=2)
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens")
    axis.set_ylabel("GB")


def _varied(row: dict[str, Any]) -> bool:
    """Whether the row belongs to the sweep over block sizes."""
    return "-B" in row["case"]


def _against(axis: Any, found: list[dict[str, Any]], key: str, label: str) -> None:
    found = sorted(found, key=lambda row: row["problem"][key])
    x, shade = [row["problem"][key] for row in found], colour("cuattn-sm80")
    axis.plot(x, [entered(row) for row in found], "o", color=shade)
    axis.plot(x, [row["expected_l2_to_sm"] / 1e9 for row in found], "--", color=shade)
    axis.plot(x, [hbm(row) for row in found], "s-", color=shade, alpha=0.5, markersize=4)
    axis.set_xlabel(label)
    axis.set_ylabel("GB")
    axis.set_ylim(bottom=0)
