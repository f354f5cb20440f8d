"""Runtime and memory against the length of the sequence."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, name, panels, runners, table, times

TITLE = "Runtime and memory from 128 to 64K tokens (FlashAttention, figure 3)"
COMMAND = "python -m bench.lengths"


def _found(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    cases = by_case(rows, "lengths")
    return dict(sorted((next(iter(x.values()))["problem"]["n_keys"], x) for x in cases.values()))


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    found = _found(rows)
    who = runners({str(n): x for n, x in found.items()})
    head = ["tokens", *(f"{name(r)}, ms" for r in who), *(f"{name(r)}, MB" for r in who)]
    lines = []
    for n, by_runner in found.items():
        spent = [times(by_runner[r]) if r in by_runner else None for r in who]
        memory = [by_runner[r]["peak_bytes"] / 1e6 if r in by_runner else None for r in who]
        lines.append((f"{n:,}", *spent, *memory))
    about = "Batch 8, 8 heads, head dimension 64, float16, forward and backward; memory beyond the inputs, at its peak."
    return f"{about}\n\n{table(head, lines)}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Return the longest length at which standard attention runs, and the longest of all."""
    found = _found(rows)
    both = max((n for n, x in found.items() if "standard" in x and "cuattn" in x), default=None)
    longest = max(n for n, x in found.items() if "cuattn" in x)
    parts = []
    if both is not None:
        plain, ours = found[both]["standard"], found[both]["cuattn"]
        parts.append(
            f"At {both:,} tokens, the longest that standard attention can do here, cuattn takes "
            f"{times(ours):.3g} ms for {times(plain):.3g} and {ours['peak_bytes'] / 1e6:,.0f} MB for "
            f"{plain['peak_bytes'] / 1e6:,.0f}."
        )
    ours = found[longest]["cuattn"]
    rivals = {name(r): times(x) for r, x in found[longest].items() if not r.startswith("cuattn")}
    beside = ", ".join(f"{who} {spent:.0f}" for who, spent in rivals.items())
    parts.append(f"At {longest:,} tokens it takes {times(ours):.0f} ms ({beside}).")
    behind = _behind(found)
    if behind:
        said = ", ".join(f"{who} at {n:,} ({share:.2f} times the speed)" for n, (who, share) in behind.items())
        parts.append(f"A rival is faster at {len(behind)} of {len(found)} lengths: {said}.")
    return "  ".join(parts)


def _behind(found: dict[int, dict[str, Any]]) -> dict[int, tuple[str, float]]:
    """Return, where cuattn is not the fastest, who is, and cuattn's speed over theirs."""
    behind = {}
    for n, x in found.items():
        best = min((r for r in x if not r.startswith("cuattn")), key=lambda r: times(x[r]), default=None)
        if "cuattn" in x and best is not None and times(x[best]) < times(x["cuattn"]):
            behind[n] = (name(best), times(x[best]) / times(x["cuattn"]))
    return behind


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw both against the length."""
    found = _found(rows)
    drawn, axes = panels(2)
    for runner in runners({str(n): x for n, x in found.items()}):
        lengths = [n for n, x in found.items() if runner in x]
        style = dict(color=colour(runner), label=name(runner), marker="o", markersize=4)
        axes[0].loglog(lengths, [times(found[n][runner]) for n in lengths], **style)
        axes[1].loglog(lengths, [found[n][runner]["peak_bytes"] / 1e6 for n in lengths], **style)
    for axis, label in zip(axes, ("ms, forward and backward", "MB at the peak, beyond the inputs"), strict=True):
        axis.set_xlabel("tokens")
        axis.set_ylabel(label)
        axis.set_xscale("log", base=2)
    axes[0].legend(frameon=False, fontsize=8)
    return drawn
