"""The plan of a call, and the memory that it takes (cuattn.cpu's plan and call)."""

import tracemalloc

import numpy as np
import pytest

import cuattn
from cuattn.cpu import threads
from cuattn.cpu.tiles import MASK_BYTES


def test_the_plan_names_tiles_threads_and_memory():
    x = np.zeros((2, 1300, 64), np.float32)
    plan = cuattn.plan(x, x, x)
    assert (plan.kernel, plan.direction) == ("cpu", "forward")
    assert plan.block_m % 16 == plan.block_n % 16 == 0
    assert plan.workers >= 1
    assert 0 < plan.workspace_bytes < 64e6 * plan.workers
    assert "host memory" in str(plan)
    assert cuattn.plan(x, x, x, direction="backward").workspace_bytes > plan.workspace_bytes
    small = cuattn.plan(x[:, :100], x[:, :100], x[:, :100])
    assert (small.block_m, small.block_n) == (100, 100) and "whole" in str(small)


CASES = {
    "tiles": ((1, 4096, 64), {}),
    "long": ((1, 16384, 64), {"window": (128, 0)}),
    "float16": ((2, 2000, 64), {}),
    "small": ((64, 128, 64), {}),
    "softcap": ((2, 1500, 64), {"softcap": 5.0}),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", CASES)
def test_a_call_takes_the_memory_that_its_plan_tells(name, direction, workers, monkeypatch):
    shape, options = CASES[name]
    rng = np.random.default_rng(0)
    dtype = np.float16 if name == "float16" else np.float32
    q, k, v = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    monkeypatch.setattr(threads, "useful", lambda items, nanoseconds: workers)
    fwd = cuattn.forward(q, k, v, **options)
    cuattn.backward(q, q, k, v, fwd, **options)
    tracemalloc.start()
    try:
        if direction == "forward":
            results = cuattn.forward(q, k, v, **options)[:3]
        else:
            results = cuattn.backward(q, q, k, v, fwd, **options)[:3]
        peak = tracemalloc.get_traced_memory()[1] - sum(x.nbytes for x in results)
    finally:
        tracemalloc.stop()
    planned = cuattn.plan(q, k, v, direction=direction, **options).workspace_bytes
    assert peak <= 1.1 * planned
    assert planned <= 1.1 * peak + (MASK_BYTES if "window" in options else 0)
    assert planned < 64e6 * workers
