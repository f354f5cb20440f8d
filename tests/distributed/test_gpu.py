"""Ranks with CuPy arrays: several on one GPU, and where there are more, one on each."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import cuattn
from cuattn import distributed, masks
from cuattn.distributed import Layout, spawn
from tests.conftest import Device
from tests.distributed.layouts import layouts, run
from tests.strategies import BFLOAT16, cases, normal
from tests.test_api import check
from tests.tolerances import assert_same

pytestmark = pytest.mark.gpu


def gpus(ranks):
    """Return a device for each rank."""
    import cupy

    return [rank % cupy.cuda.runtime.getDeviceCount() for rank in range(ranks)]


@settings(max_examples=8, phases=(Phase.explicit, Phase.generate))
@given(data=st.data(), case=cases(dtypes=(BFLOAT16,), head_dims=(64,)), size=st.integers(2, 3))
def test_any_split_matches_the_oracle(data, case, size):
    unit, device = 16 if case.options.get("dropout_p") else 1, Device()
    rows, keys = (data.draw(layouts(x.shape[-2], size, unit)) for x in (case.q, case.k))
    algorithm = data.draw(st.sampled_from((None, "ring", "gather", "combine")))

    def work(comm):
        return run(comm, case, rows, keys, algorithm, device.put, device.get)

    fwd, grads = spawn(work, devices=gpus(size))[0]
    check(case, fwd[:3])
    check(case, grads, ("dq", "dk", "dv", "dbias"))


@pytest.mark.parametrize("algorithm", ["ring", "combine"])
def test_long_shards_on_streams_of_their_own(algorithm):
    """What is sent is not changed before it was read, nor read before it was written."""
    import cupy

    n, mask = 8192, masks.causal_document([3000, 1192, 4000])
    rng, layout = np.random.default_rng(0), Layout.zigzag(n, 4, unit=128)
    q, k, v, do = (cupy.asarray(normal(rng, (4, n, 128), BFLOAT16)) for _ in range(4))
    fwd = cuattn.forward(q, k, v, mask=mask)
    grads = cuattn.backward(do, q, k, v, fwd, mask=mask)

    def work(comm):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            mine = [layout.shard(cupy.asarray(x.get()), comm.rank) for x in (q, k, v, do)]
            options = dict(comm=comm, layout=layout, mask=mask, algorithm=algorithm)
            for _ in range(3):
                own = distributed.forward(*mine[:3], **options)
                made = distributed.backward(mine[3], *mine[:3], own, deterministic=True, **options)
            found = [layout.unshard(x, comm).get() for x in (own.o, *made[:3])]
            stream.synchronize()
        return found

    cupy.cuda.Device().synchronize()
    results = spawn(work, devices=gpus(4))
    for found in results[1:]:
        assert_same(found, results[0])
    for one, other in zip(results[0], (fwd.o, *grads[:3]), strict=True):
        other = other.get().astype(np.float32)
        assert np.abs(one.astype(np.float32) - other).max() <= 2**-6 * np.abs(other).max()


def test_tensors_of_torch_come_back_as_tensors():
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 256, 64, device="cuda", dtype=torch.bfloat16)
    layout = Layout.contiguous(256, 2)

    def work(comm):
        mine = layout.shard(x, comm.rank)
        o = distributed.attention(mine, mine, mine, comm=comm, layout=layout, is_causal=True)
        out = torch.empty_like(mine)
        assert distributed.attention(mine, mine, mine, comm=comm, layout=layout, is_causal=True, out=out) is out
        assert torch.equal(out, o)
        whole = layout.unshard(o, comm)
        torch.cuda.current_stream().synchronize()
        return whole

    whole = spawn(work, devices=[0, 0])[0]
    assert torch.allclose(whole.float(), cuattn.attention(x, x, x, is_causal=True).float(), atol=2e-2)


def test_ranks_that_first_need_a_kernel_at_once():
    """Each thread loads it, and none may lose what it has loaded: on one GPU they share all but that."""
    import gc

    import cupy

    from cuattn import dispatch
    from cuattn.cuda import compile

    x = cupy.asarray(normal(np.random.default_rng(0), (2, 256, 64), BFLOAT16))
    right = cuattn.attention(x, x, x).get()
    for _ in range(5):
        compile.function.cache_clear()
        dispatch.forget()

        def work(comm):
            comm.barrier()
            cuattn.attention(x, x, x)
            comm.barrier()
            gc.collect()
            return cuattn.attention(x, x, x).get()

        for found in spawn(work, devices=[0] * 4):
            np.testing.assert_array_equal(found, right)
