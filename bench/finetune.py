"""One training step of a Llama of Transformers: its attention by cuattn, by PyTorch, by FlexAttention.

    python -m bench.finetune                       # on a GPU
    python -m bench.finetune --device cpu --tiny   # a toy

All train copies of one model in bfloat16 on the same random tokens: whole sequences, and such as are packed of
documents, which ``position_ids`` tell.  A step is forward, loss, gradients and AdamW.  The first steps, which compile,
and the loss of the first one are in the rows, too.
"""

import copy
import time

import numpy as np

from bench import harness
from bench.harness import Point, peak

SIZES = dict(batch=2, length=4096, layers=2, heads=16, kv_heads=4, head_dim=64, vocabulary=32000)
TINY = dict(batch=1, length=64, layers=1, heads=2, kv_heads=1, head_dim=16, vocabulary=100)
CASES = {"whole": 1, "packed": 8}  # documents in a sequence
ATTENTION = {"cuattn": "cuattn", "sdpa": "sdpa", "flex": "flex_attention"}  # runner: what Transformers calls it
WARM = 3  # steps that compile and fill the pools


def model_of(sizes, device):
    """Return a Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    width = sizes["heads"] * sizes["head_dim"]
    config = LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=width, intermediate_size=4 * width, use_cache=False,
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"], max_position_embeddings=sizes["length"],
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, torch.bfloat16).train()


def batch_of(sizes, documents, device):
    """Return what a model is called with: random tokens, which it predicts, and where they stand in their documents."""
    import torch

    shape, generator = (sizes["batch"], sizes["length"]), np.random.default_rng(0)
    tokens = torch.from_numpy(generator.integers(1, sizes["vocabulary"], shape)).to(device)
    given = {"input_ids": tokens, "labels": tokens}
    if documents > 1:
        starts = np.sort(generator.choice(np.arange(1, shape[1]), documents - 1, replace=False))
        lengths = np.diff([0, *starts, shape[1]])
        places = np.concatenate([np.arange(length) for length in lengths])
        given["position_ids"] = torch.from_numpy(places).to(device).expand(shape)
    return given


def stepper(model, given):
    """Return a function that trains a model by one step and returns the loss."""
    import torch

    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step():
        loss = model(**given).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        return loss.detach()

    return step


def compare(documents, sizes, device, seconds):
    """Time the steps in turn.

    Parameters
    ----------
    documents : int
        In each sequence.
    sizes : dict
        Of the model and its batch.
    device : {"cuda", "cpu"}
        Where.
    seconds : float
        Device time to sample.

    Returns
    -------
    dict
        By runner: times, ``loss`` of the first step, ``first_s`` of the steps that compile, ``peak_bytes``.
    """
    import cuattn.transformers

    cuattn.transformers.register()
    first, given = model_of(sizes, device), batch_of(sizes, documents, device)
    steps, rows = {}, {}
    for runner, attention in ATTENTION.items():
        model = copy.deepcopy(first)
        model.set_attn_implementation(attention)
        step = stepper(model, given)
        try:
            rows[runner] = _begun(step, device)
            steps[runner] = step
        except Exception as error:  # the others go on
            rows[runner] = {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:400]}
    for runner, times in harness.timed(steps, device, seconds).items():
        rows[runner] |= times
    problem = {**sizes, "documents": documents}
    return {runner: {**row, "problem": problem} for runner, row in rows.items()}


def _begun(step, device):
    """Return what is seen of the first steps."""
    begin = time.perf_counter()
    losses = [float(step()) for _ in range(WARM)]
    spent = time.perf_counter() - begin
    with peak(device) as memory:
        step()
    return {"loss": losses[0], "first_s": round(spent, 3), "peak_bytes": memory.bytes}


def points(arguments):
    """Return one point per case."""
    sizes = TINY if arguments.tiny else SIZES
    label = f"N{sizes['length']}-d{sizes['head_dim']}"

    def point(case, documents):
        measure = lambda: compare(documents, sizes, arguments.device, arguments.seconds)  # noqa: E731
        return Point(f"finetune/{label}-{case}/step", tuple(ATTENTION), measure)

    return [point(*of) for of in CASES.items()]


if __name__ == "__main__":
    harness.main(__doc__, "finetune", points)
