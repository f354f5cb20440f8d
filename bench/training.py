"""Train a small Llama-shaped decoder on packed documents: a column mask, the same mask dense, one call per document.

    python -m bench.training                       # on a GPU
    python -m bench.training --device cpu --tiny   # a toy

The text is the standard library's own sources, byte by byte.  Everything but attention is PyTorch (on a GPU under
autocast to float16); attention is cuattn.  With deterministic gradients and one kernel, the column mask and the dense
one give the same loss, bit for bit, at every step.  A row holds all losses.
"""

import itertools
import time

import numpy as np

from bench import harness
from bench.harness import one, peak
from bench.llama.text import documents, pack

SIZES = dict(n=16384, layers=4, heads=8, head_dim=64, inner=1536, longest=2048)
TINY = dict(n=256, layers=1, heads=2, head_dim=16, inner=48, longest=96)
LOSS_SCALE = 1024.0  # float16 gradients of 16K tokens
WARM = 5  # steps that compile and fill the pool, not timed
PROFILED = 2  # steps in which memory is observed, not timed either

VARIANTS = {  # name: way, on the kernel that takes all ways, deterministic
    "cuattn-column": ("column", True, True),
    "cuattn-dense": ("dense", True, True),
    "cuattn-documents": ("documents", True, True),
    "cuattn-column-free": ("column", False, False),
}


def train(variant, sizes, device, steps):
    """Train from the same start on the same text.

    Parameters
    ----------
    variant : str
        Key of `VARIANTS`.
    sizes : dict
        Of a `bench.llama.model.Config`.
    device : {"cuda", "cpu"}
        Where.
    steps : int
        Sequences to learn from.

    Returns
    -------
    dict
        ``losses`` by step, ``tokens_per_s``, ``peak_bytes`` beyond weights and moments, ``documents`` per sequence.
    """
    way, same_kernel, deterministic = VARIANTS[variant]
    kernel = ("sm80" if device == "cuda" else "cpu") if same_kernel else None
    model, attention, step, losses = _trainer(sizes, device, way, kernel=kernel, deterministic=deterministic)
    sequences = list(itertools.islice(pack(documents(), sizes["n"], sizes["longest"]), steps))
    warm = min(WARM, max(steps - PROFILED - 1, 0))
    for sequence in sequences[:warm]:
        step(sequence)
    attention.prepare([], device)  # the next masks count like its own
    with peak(device) as memory:
        for sequence in sequences[warm : warm + PROFILED]:
            step(sequence)
    timed = sequences[warm + PROFILED :]
    xp = harness.namespace(device)
    harness.synchronize(xp)
    begin = time.perf_counter()
    for sequence in timed:
        step(sequence)
    harness.synchronize(xp)
    seconds = time.perf_counter() - begin
    about = {"steps": steps, "way": way, "kernel": kernel, "deterministic": deterministic, "framework": "PyTorch"}
    return {
        "losses": [float(loss) for loss in losses],
        "tokens_per_s": round(len(timed) * sizes["n"] / seconds),
        "step_ms": round(seconds / len(timed) * 1e3, 3),
        "peak_bytes": memory.bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "documents": round(float(np.mean([len(sequence.lengths) for sequence in sequences])), 2),
        "problem": {**sizes, **about},
    }


def _trainer(sizes, device, way, **options):
    """Return a decoder, its attention, a function that learns from one sequence, and the losses that it will append."""
    import torch

    from bench.llama.model import Attention, Config, Decoder

    model, attention, losses = Decoder(Config(**sizes)).to(device), Attention(way, **options), []
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scale = LOSS_SCALE if device == "cuda" else 1.0

    def step(sequence):
        with torch.autocast("cuda", torch.float16, enabled=device == "cuda"):
            loss = model(sequence, attention)
        optimiser.zero_grad()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        optimiser.step()
        losses.append(loss.detach())

    return model, attention, step, losses


def points(arguments):
    """Return one point per variant."""
    sizes, steps = TINY if arguments.tiny else SIZES, arguments.steps
    label = f"N{sizes['n']}-layers{sizes['layers']}-steps{steps}"
    return [
        one(f"training/{label}/{variant}", variant, train, variant, sizes, arguments.device, steps)
        for variant in VARIANTS
    ]


if __name__ == "__main__":
    steps = {"--steps": {"type": int, "default": 200}}
    harness.main(__doc__, "training", points, steps)
