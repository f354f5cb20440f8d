"""What else is measured: training, denoising, the kernels' profiles, the CPU backend."""

import numpy as np
import pandas as pd

from bench.report import Section
from bench.style import bars, chart, curves, name

FIRST = "cuattn-column"
LABELS = {
    FIRST: "column mask, deterministic",
    "cuattn-dense": "the same mask dense, same kernel",
    "cuattn-documents": "one call per document",
    "cuattn-column-free": "column mask, the plan's choice",
}
WHERE = {"cuattn-cupy": "GPU", "cuattn-numpy": "CPU", "keops": "KeOps, GPU"}
SHARES = {f"{unit}_pct": f"{unit} %" for unit in ("tensor", "issue")}
SHARES |= {"l2_pct": "L2 %", "dram_pct": "DRAM %", "occupancy_pct": "occupancy %"}
RIVALS = {"sdpa-dense": "PyTorch", "sdpa-documents": "PyTorch by document", "numpy": "NumPy formula"}
EXTRA_MS = 0.1  # what a call on the CPU may cost beyond the formula


class Training(Section):
    """A small Llama trained on packed documents, three ways to mask."""

    title = "End to end: a small Llama on packed documents (FlashMask, sections 5.1 and 5.2)"
    command = "python -m bench.training"

    def found(self):
        """Return a row per variant, with its losses and how far they are from the first one's at each step."""
        found = self.of("training").drop_duplicates("runner", keep="last").set_index("runner")
        found = found.filter(LABELS, axis=0)
        apart = [np.abs(np.subtract(losses, found["losses"][FIRST])) for losses in found["losses"]]
        return found.assign(apart=apart, GB=found.get("peak_bytes", np.nan) / 1e9)

    @property
    def about(self):
        p = self.found().loc[FIRST].rename(lambda column: column.removeprefix("problem."))
        return (
            f"{p['layers']} layers, {p['heads']} heads of {p['head_dim']}, {p['parameters'] / 1e6:.1f} M parameters, "
            f"sequences of {p['n']:,} bytes of the standard library's sources, {p['documents']:g} documents in each, "
            f"{p['steps']} steps; everything but attention in {p.get('framework', 'CuPy')}."
        )

    def lines(self):
        found = self.found()
        same = ["the same bits" if not x.any() else f"{x.max():.1e} apart" for x in found["apart"]]
        return {
            "attention": found.index.map(LABELS),
            "tokens/s": found["tokens_per_s"].array,
            "peak GB beyond the weights": found["GB"].array,
            "last loss": [f"{losses[-1]:.4f}" for losses in found["losses"]],
            "losses against the first row's": ["–", *same[1:]],
        }

    def figure(self):
        """Draw how far the losses are from the first variant's, and the speeds."""
        found = self.found().rename(index=LABELS)
        losses = dict(style="-", xlabel="step", ylabel="loss: distance from the column mask's")
        apart = pd.DataFrame(dict(found["apart"].iloc[1:]))
        speeds = found[["tokens_per_s"]].rename(columns={"tokens_per_s": "tokens/s"})
        return chart((curves, apart, losses), (bars, speeds, dict(numbers=".0f", xlabel="tokens/s")), columns=2)


class Denoise(Section):
    """Denoising a photograph."""

    title = "Not only transformers: non-local means as attention"
    command = "python -m bench.denoise` and `python -m bench.denoise --device cpu"

    @property
    def about(self):
        rows = self.of("denoise")
        height, width = rows["problem.height"].max(), rows["problem.width"].max()
        n = height * width
        about = (
            f"A photograph of {height} x {width} = {n:,} pixels in float32: each pixel attends to those with "
            f"similar surroundings (`bench/denoise.py`).  A dense N x N matrix would take {4 * n * n / 1e9:.0f} GB."
        )
        missing = "  KeOps is measured beside it where it runs; pykeops 2.3 does not under CUDA 13."
        return about if "keops" in set(rows["runner"]) else about + missing

    def lines(self):
        rows = self.of("denoise").rename(columns=lambda column: column.removeprefix("problem."))
        near = rows.get("rows", rows["ms"] * np.nan).map("{:.0f} rows up and down".format, na_action="ignore")
        size = rows["height"].astype(str) + " x " + rows["width"].astype(str)
        return {
            "search": rows["runner"].map(WHERE) + ", " + near.fillna("all of " + size + " pixels"),
            "billion pairs": rows["pairs"] / 1e9,
            "seconds": rows["ms"] / 1e3,
            "PSNR before, dB": rows["psnr_before"],
            "after, dB": rows["psnr_after"],
        }


class KernelProfiles(Section):
    """Profiles of the kernels."""

    title = "Profiles (Nsight Compute)"
    command = "python -m bench.kernel_profiles"

    about = (
        "The longest kernel of each call, in percent of the unit's peak; bank conflicts per shared-memory wavefront."
    )

    def lines(self):
        """Return the longest kernel of every call."""
        rows = self.of("profile")
        found = pd.DataFrame([max(kernels, key=lambda kernel: kernel["milliseconds"]) for kernels in rows["kernels"]])
        stalls = [", ".join(f"{name} {x:.0%}" for name, x in list(of.items())[:3]) for of in found["stalls"]]
        return {
            "call": rows["label"].array,
            "ms": found["milliseconds"],
            **{label: found[key] for key, label in SHARES.items()},
            "bank conflicts": found["bank_conflicts"].map("{:.2f}".format),
            "warps' time": stalls,
        }


class Cpu(Section):
    """The CPU backend: beside PyTorch and the NumPy formula, its time under a mask, its memory."""

    title = "On the CPU"
    command = "python -m bench.cpu"

    def pairs(self):
        """Return, per case and runner of ours, its milliseconds and each rival's time over its own, turn by turn."""
        lines = []
        for _, rows in self.of("cpu", "cpu-statistics", "cpu-torch", "cpu-small").groupby("case", sort=False):
            samples = dict(zip(rows["runner"], rows["samples_us"], strict=True))
            about = rows.iloc[0][["case", "table", "label", "direction"]]
            for ours in [runner for runner in samples if runner.startswith("cuattn")]:
                times = {
                    label: np.median(np.divide(samples[runner], samples[ours]))
                    for runner, label in RIVALS.items()
                    if len(samples.get(runner, ())) == len(samples[ours])
                }
                lines.append({**about, "runner": ours, "ms": np.median(samples[ours]) / 1e3, **times})
        return pd.DataFrame(lines)

    about = (
        "float32; batch x heads first in each name.  Results are checked before they are timed, rivals run in turn; "
        "a ratio is the median over the turns, and above 1 where cuattn is faster."
    )

    def lines(self):
        """Return a line per case and function of ours."""
        found = self.pairs()
        label = found["label"] + ", " + found["direction"] + ", " + found["runner"].map(name)
        rivals = {f"{rival}, times that": found[rival] for rival in RIVALS.values() if rival in found}
        return {"": label, "ms": found["ms"], **rivals}

    def summary(self):
        """Return the paragraph of the README."""
        found = self.pairs()
        return "  ".join(filter(None, [*_beside(found), _small(found), self.visible(), self.memory()]))

    def visible(self):
        """Say what share of its unmasked time cuattn takes under a mask, beside the share of visible tiles."""
        rows = self.of("cpu-visible")
        said = []
        for n, of_n in rows[rows["direction"] == "forward"].groupby("problem.n") if len(rows) else ():
            plain = of_n.loc[of_n["problem.mask"] == "none", "samples_us"].iloc[0]
            shares = [
                f"{np.median(np.divide(row['samples_us'], plain)):.3f} for {1 - row['rho']:.3f} ({row['problem.mask']})"
                for row in of_n.to_dict("records")
                if row["problem.mask"] != "none"
            ]
            said.append(f"at N = {n:.0f} {', '.join(shares)}")
        about = "Its time under a mask over that without, forward, for the share of 128 x 128 tiles that is visible"
        return f"{about}: {'; '.join(said)}." if said else ""

    def memory(self):
        """Say what a thread needs beside arguments and results."""
        most = self.of("cpu-memory").get("bytes_per_thread", pd.Series(dtype=float)).max()
        return f"Extra memory at N = 16384 is {most / 1e6:.0f} MB a thread." if most > 0 else ""

    def figure(self):
        """Draw the milliseconds of all under every mask."""
        rows = self.of("cpu")
        rows = rows[rows["problem.n_keys"] == rows["problem.n_keys"].max()]
        rows = rows.assign(mask=rows["problem.mask"].fillna("no mask") if "problem.mask" in rows else "no mask")
        about = dict(numbers=".0f", xlabel="ms (less is better)")
        wide = {way: of.pivot_table("ms", "mask", "runner", sort=False) for way, of in rows.groupby("direction")}
        return chart(*((bars, x, {**about, "title": way.replace("+", " and ")}) for way, x in wide.items()))


def _beside(found):
    """Say how many times PyTorch's speed cuattn has, without and with masks."""
    masked = ~found["label"].str.contains("full")
    said = []
    for which, about, rows in (
        ("cpu", "without a mask", ~masked),
        ("cpu", "with one, which PyTorch takes as a dense matrix", masked),
        ("cpu-torch", "for the shapes and biases that PyTorch users call", masked | ~masked),
    ):
        for rival in RIVALS.values():
            times = found[rows & found["table"].isin([which, f"{which}-statistics"])].get(rival, pd.Series(dtype=float))
            if times.notna().any():
                said.append(f"{rival}'s time over cuattn's {about}: {times.min():.2f} to {times.max():.2f}.")
    return said


def _small(found):
    """Say how far small problems are above the formula and its allowance."""
    small = found[(found["table"] == "cpu-small") & (found["runner"] != "cuattn-cpu")]
    if not len(small) or "NumPy formula" not in small:
        return ""
    share = (small["ms"] - EXTRA_MS) / (small["NumPy formula"] * small["ms"])
    worst = small.loc[share.idxmax()]
    return (
        f"Problems of a few rows take at most {max(share.max(), 0):.2f} times the three lines of NumPy and "
        f"{EXTRA_MS} ms ({worst['label']}, {worst['direction']})."
    )
