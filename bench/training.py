"""Train a small Llama-shaped decoder on packed documents: a column mask, the same mask dense, one call per document.

    python -m bench.training                       # on a GPU
    python -m bench.training --device cpu --tiny   # NumPy, a toy

The text is the standard library's own sources, byte by byte.  Everything but attention is CuPy (products by cuBLAS);
attention is cuattn.  With deterministic gradients and one kernel, the column mask and the dense one give the same loss,
bit for bit, at every step.  A row holds all losses.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from bench import study
from bench.llama.adamw import AdamW
from bench.llama.heads import Attention
from bench.llama.model import Config, Decoder
from bench.llama.text import documents, pack
from bench.memory import peak
from bench.study import Point

__all__ = ["VARIANTS", "points", "train"]

NAME = "training"
CONFIG = Config(n=16384, layers=4, heads=8, head_dim=64, inner=1536, longest=2048)
TINY = Config(n=256, layers=1, heads=2, head_dim=16, inner=48, longest=96)
LOSS_SCALE = 1024.0  # float16 gradients of 16K tokens
WARM = 5  # steps that compile and fill the pool, not timed
PROFILED = 2  # steps in which memory is observed, not timed either

VARIANTS: dict[str, tuple[str, bool, bool]] = {  # name: way, on the kernel that takes all ways, deterministic
    "cuattn-column": ("column", True, True),
    "cuattn-dense": ("dense", True, True),
    "cuattn-documents": ("documents", True, True),
    "cuattn-column-free": ("column", False, False),
}


def train(variant: str, config: Config, device: str, steps: int) -> dict[str, Any]:
    """Train from the same start on the same text.

    Parameters
    ----------
    variant : str
        Key of `VARIANTS`.
    config : Config
        Sizes.
    device : {"cuda", "cpu"}
        Where.
    steps : int
        Sequences to learn from.

    Returns
    -------
    dict
        ``losses`` by step, ``tokens_per_s``, ``peak_bytes`` beyond weights and moments, ``documents`` per sequence.
    """
    xp = study.namespace(device)
    way, same_kernel, deterministic = VARIANTS[variant]
    kernel = ("sm80" if device == "cuda" else "cpu") if same_kernel else None
    model = Decoder(xp, config, scale=LOSS_SCALE if device == "cuda" else 1.0)
    optimiser = AdamW(xp, model.parameters)
    attention = Attention(xp, way, kernel, deterministic)
    sequences = pack(documents(), config.n, config.longest)
    losses, counts = [], []

    def step() -> None:
        sequence = next(sequences)
        loss, gradients = model.step(sequence, attention)
        optimiser.update(gradients)
        losses.append(loss)
        counts.append(len(sequence.lengths))

    warm = min(WARM, max(steps - PROFILED - 1, 0))
    for _ in range(warm):
        step()
    attention.forget()  # its masks count like the next ones
    with peak(device) as memory:
        for _ in range(PROFILED):
            step()
    study.synchronize(xp)
    begin = time.perf_counter()
    for _ in range(steps - warm - PROFILED):
        step()
    study.synchronize(xp)
    seconds = time.perf_counter() - begin
    return {
        "losses": [float(loss) for loss in losses],
        "tokens_per_s": round((steps - warm - PROFILED) * config.n / seconds),
        "step_ms": round(seconds / (steps - warm - PROFILED) * 1e3, 3),
        "peak_bytes": int(memory.bytes),
        "parameters": int(sum(p.size for p in model.parameters.values())),
        "documents": round(float(np.mean(counts)), 2),
        "problem": {**vars(config), "steps": steps, "way": way, "kernel": kernel, "deterministic": deterministic},
    }


def points(device: str, tiny: bool, steps: int) -> list[Point]:
    """Return one point per variant."""
    config = TINY if tiny else CONFIG
    label = f"N{config.n}-layers{config.layers}-steps{steps}"
    return [
        Point(f"{NAME}/{label}/{variant}", (variant,), lambda v=variant: {v: train(v, config, device, steps)})
        for variant in VARIANTS
    ]


def main() -> int:
    """Run the command."""
    parser = study.parser(__doc__.splitlines()[0], NAME)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    study.run(arguments, points(arguments.device, arguments.tiny, arguments.steps))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
