"""GPT-2 medium's attention: runtime, operations, bytes."""

from __future__ import annotations

from typing import Any

from bench.sections.common import by_case, colour, name, panels, runners, table, times

TITLE = "GPT-2 medium's attention, forward and backward (FlashAttention, figure 2 left)"
COMMAND = "python -m bench.gpt2"
PRODUCTS = {"standard": 6}  # matrix products; the others compute the scores again in the backward
STATISTICS = (
    ": 16.8 MB more for the statistics of the rows, of which cuDNN keeps one and cuattn two (l and m), which its "
    "backward joins into one first."
)
PAPER = "The paper's A100: standard 41.7 ms and 40.3 GB, FlashAttention 7.3 ms and 4.4 GB."


def _found(rows: list[dict[str, Any]]) -> tuple[dict[float, dict[str, Any]], dict[float, dict[str, Any]]]:
    """Return times and counters by dropout and runner."""
    timed = {next(iter(x.values()))["problem"]["dropout"]: x for x in by_case(rows, "gpt2").values()}
    counted = {next(iter(x.values()))["problem"]["dropout"]: x for x in by_case(rows, "gpt2-bytes").values()}
    return timed, counted


def gigabytes(row: dict[str, Any] | None) -> float | None:
    """Return what a call moved to and from device memory."""
    return None if row is None else (row["counters"]["hbm_read"] + row["counters"]["hbm_write"]) / 1e9


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table."""
    timed, counted = _found(rows)
    who = runners({str(key): value for key, value in timed.items()})
    lines = []
    for runner in who:
        line: list[Any] = [name(runner)]
        problem = next(x[runner]["problem"] for x in timed.values() if runner in x)
        work = 2 * problem["batch"] * problem["heads"] * problem["n_queries"] ** 2 * problem["head_dim"]
        line.append(work * PRODUCTS.get(runner, 7) / 1e9)
        for dropout in (0.0, 0.1):
            row = timed.get(dropout, {}).get(runner)
            line += [times(row) if row else None, gigabytes(counted.get(dropout, {}).get(runner))]
        lines.append(line)
    head = ("", "GFLOP", "ms", "GB of device memory traffic", "ms, dropout 0.1", "GB, dropout 0.1")
    about = f"Batch 64, 16 heads, 1024 tokens, head dimension 64, float16.  {PAPER}"
    standing = "  ".join(filter(None, (_standing(timed), _bytes(counted))))
    return f"{about}\n\n{table(head, lines)}\n\n{standing}".rstrip()


def _standing(timed: dict[float, dict[str, Any]]) -> str:
    """Say how cuattn's time compares with its fastest rival's, and which kernel its backward had."""
    parts = []
    for dropout, x in sorted(timed.items()):
        rivals = {runner: times(row) for runner, row in x.items() if not runner.startswith("cuattn")}
        if "cuattn" not in x or not rivals:
            continue
        best = min(rivals, key=rivals.__getitem__)
        lines = x["cuattn"].get("plan", "").splitlines()
        kernel = next((line.split()[1] for line in lines if line.startswith("kernel")), "")
        where = f"with dropout {dropout:g}" if dropout else "without dropout"
        share = times(x["cuattn"]) / rivals[best]
        parts.append(f"{where} {share:.2f} times that of {name(best)} (backward on the {kernel} kernel)")
    return f"cuattn's time is {', '.join(parts)}." if parts else ""


def _bytes(counted: dict[float, dict[str, Any]]) -> str:
    """Say how cuattn's bytes compare with those of the rival that moves the fewest."""
    parts, more = [], False
    for dropout, x in sorted(counted.items()):
        rivals = {runner: gigabytes(row) for runner, row in x.items() if not runner.startswith("cuattn")}
        if "cuattn" in x and rivals:
            best = min(rivals, key=rivals.__getitem__)
            share = gigabytes(x["cuattn"]) / rivals[best]
            more |= share > 1 and best == "cudnn"
            parts.append(
                f"{share:.3f} times the bytes of {name(best)}" + (f" with dropout {dropout:g}" if dropout else "")
            )
    return f"It moves {', '.join(parts)}{STATISTICS if more else '.'}" if parts else ""


def figure(rows: list[dict[str, Any]]) -> Any:
    """Draw bars of time and bytes, without and with dropout."""
    timed, counted = _found(rows)
    drawn, axes = panels(2, 4.8, 3.2)
    who = runners({str(key): value for key, value in timed.items()})[::-1]
    for axis, label, value in (
        (axes[0], "ms, forward and backward", lambda d, r: times(timed[d][r]) if r in timed.get(d, {}) else None),
        (axes[1], "GB to and from device memory", lambda d, r: gigabytes(counted.get(d, {}).get(r))),
    ):
        for place, runner in enumerate(who):
            for dropout, shift, alpha in ((0.0, 0.2, 1.0), (0.1, -0.2, 0.55)):
                amount = value(dropout, runner)
                if amount is not None:
                    axis.barh(place + shift, amount, 0.38, color=colour(runner), alpha=alpha)
                    axis.text(amount, place + shift, f" {amount:.3g}", va="center", fontsize=8)
        axis.set_yticks(range(len(who)), [name(runner) for runner in who])
        axis.set_xlabel(label)
        axis.margins(x=0.15)
    axes[1].set_yticklabels([])
    drawn.suptitle("GPT-2 medium's attention; paler: with dropout 0.1", fontsize=11)
    return drawn
