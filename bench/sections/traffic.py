"""Bytes against the papers' theorems."""

from __future__ import annotations

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
    return (
        f"What enters the multiprocessors is what the algorithms read, counted within {off:.1%} over all lengths, head "
        f"dimensions, block sizes and densities of the forward: quadratic in N, in inverse proportion to the rows kept "
        f"on the chip (M), in proportion to the density.  Device memory sees less, as long as the L2 cache holds the "
        f"keys of the heads at work."
    )


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw forward and backward against N, block sizes, densities, and one long head."""
    drawn, axes = panels(5, 4.0, 3.5)
    for axis, study in zip(axes, ("theorem-2", "theorem-5"), strict=False):
        for kernel in ("sm80", "sm90", "standard"):
            found = sorted(_rows(rows, study, kernel=kernel, d=64), key=lambda row: row["problem"]["n"])
            found = [row for row in found if row["problem"]["heads"] == 64 and not _varied(row)]
            runner = kernel if kernel == "standard" else f"cuattn-{kernel}"
            lengths = [row["problem"]["n"] for row in found]
            axis.loglog(lengths, [hbm(row) for row in found], "s-", color=colour(runner), alpha=0.5, markersize=4)
            if kernel != "standard":
                axis.loglog(lengths, [entered(row) for row in found], "o", color=colour(runner), label=name(runner))
                axis.loglog(lengths, [row["expected_l2_to_sm"] / 1e9 for row in found], "--", color=colour(runner))
            else:
                axis.loglog([], [], "s-", color=colour(runner), label=name(runner))
        axis.set_xscale("log", base=2)
        axis.set_title(f"{STUDIES[study]}, d 64", fontsize=10)
        axis.set_xlabel("tokens")
        axis.set_ylabel("GB")
    axes[0].legend(frameon=False, fontsize=7)
    _against(
        axes[2],
        [row for row in _rows(rows, "theorem-2", kernel="sm80", d=64) if _varied(row)],
        "block_m",
        "query rows in a block",
    )
    axes[2].set_xscale("log", base=2)
    _against(axes[3], _rows(rows, "proposition-4"), "density", "density s, N 4096")
    for kernel in ("sm80", "sm90"):
        found = sorted(_rows(rows, "beyond-l2", kernel=kernel), key=lambda row: row["problem"]["n"])
        lengths = [row["problem"]["n"] for row in found]
        runner = f"cuattn-{kernel}"
        axes[4].loglog(lengths, [entered(row) for row in found], "o", color=colour(runner))
        axes[4].loglog(lengths, [row["expected_l2_to_sm"] / 1e9 for row in found], "--", color=colour(runner))
        axes[4].loglog(lengths, [hbm(row) for row in found], "s-", color=colour(runner), alpha=0.5, markersize=4)
    axes[4].set_xscale("log", base=2)
    axes[4].set_title("one head, d 128", fontsize=10)
    axes[4].set_xlabel("tokens")
    drawn.suptitle("circles: into the multiprocessors; dashed: by the algorithm; squares: device memory", fontsize=10)
    return drawn


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
    axis.set_ylim(bottom=0)
