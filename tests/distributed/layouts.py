"""Layouts for tests, and problems dealt out by them."""

import numpy as np
from hypothesis import strategies as st

import cuattn
from cuattn import distributed
from cuattn.distributed import Layout


@st.composite
def layouts(draw, n, size, unit=1):
    """Draw any layout: runs between random cuts, each at a random rank."""
    edges = list(range(unit, n, unit))
    cuts = sorted(draw(st.sets(st.sampled_from(edges), max_size=6))) if edges else []
    owned = [[] for _ in range(size)]
    for run in zip([0, *cuts], [*cuts, n], strict=True):
        owned[draw(st.integers(0, size - 1))].append(run)
    return Layout.from_runs(owned)


def shared(layout, x, rank, axis=-2):
    """Return a rank's part of an array, of which an axis of 1 may stand for any length."""
    return x if x is None or x.shape[axis] == 1 != layout.n else layout.shard(x, rank, axis)


def run(comm, case, rows, keys, algorithm=None, put=lambda x: x, get=lambda x: x, **more):
    """Compute a case of :mod:`tests.strategies` over ranks; return the whole forward and gradients."""
    comm.timeout = 20
    options = {**case.options, **more}
    options = {name: put(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    bias = shared(rows, case.bias, comm.rank)
    bias = None if bias is None else put(bias)
    placing = dict(comm=comm, layout=rows, key_layout=keys, algorithm=algorithm, bias=bias)
    q, do = (put(rows.shard(x, comm.rank)) for x in (case.q, case.do))
    k, v = (put(keys.shard(x, comm.rank)) for x in (case.k, case.v))
    fwd = distributed.forward(q, k, v, **placing, **options)
    options.pop("rng", None)
    grads = distributed.backward(do, q, k, v, fwd, **placing, **options)
    axes = dict(o=(rows, -2), l=(rows, -1), m=(rows, -1))
    found = [get(layout.unshard(getattr(fwd, name), comm, axis)) for name, (layout, axis) in axes.items()]
    made = [get(layout.unshard(x, comm)) for layout, x in zip((rows, keys, keys), grads[:3], strict=True)]
    dbias = grads.dbias
    if dbias is not None:
        dbias = get(dbias if case.bias.shape[-2] == 1 != rows.n else rows.unshard(dbias, comm))
    return cuattn.Forward(*found, fwd.rng_state), cuattn.Gradients(*made, dbias)
