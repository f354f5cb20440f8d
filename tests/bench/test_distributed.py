"""The measurement over ranks at toy size, and its simulation."""

from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

import cuattn
from bench import distributed
from bench.distributed import Case
from bench.peers import ranks
from cuattn.distributed import DistributedError, connect, spawn
from cuattn.distributed.model import least, rates_of


def test_points_of_toy_size():
    arguments = Namespace(device="cpu", tiny=True, seconds=0.0)
    points = distributed.points(arguments, distributed.Ranks(connect(), "cpu"))
    names = [point.case for point in points]
    assert len(set(names)) == len(names) and all(name.count("/") == 2 for name in names)
    for point in points[::7]:
        rows = point.measure()
        assert set(rows) == set(point.runners) == {"cuattn-1", "cuattn-2"}
        assert rows["cuattn-2"]["efficiency"] > 0 and rows["cuattn-2"]["predicted_us"] > 0


def test_the_simulation_prints_what_it_assumes(capsys):
    distributed.simulate([2, 64], (1 << 14,))
    text = capsys.readouterr().out
    assert "GB/s within islands of 8" in text and text.count("\n") == 4 + 2 * 2 * len(distributed.MASKS)


def test_the_guide_says_what_is_simulated():
    case, rates = Case("causal", 1 << 20, distributed.HEADS, distributed.KV_HEADS, "forward"), rates_of("cuda", 2, 8)

    def seconds(ranks):
        options = distributed._options(case, ranks, rates)
        return options[least(options)][0].seconds

    two, eight, many = (f"{seconds(1) / seconds(ranks) / ranks:.3f}" for ranks in (2, 8, 64))
    guide = Path(distributed.distributed.__file__).with_name("README.md").read_text()
    assert f"an efficiency of {two} on 2, {eight} on 8 and {many} on 64 GPUs, forward" in " ".join(guide.split())


def test_what_one_rank_fails_at_the_others_leave():
    """Also errors of other libraries; what comes next finds all ranks in step."""

    def fails(comm):
        def call():
            if comm.rank:
                raise MemoryError("no room")

        distributed.samples(call, comm, "cpu", 0.0, 16)

    def work(comm):
        connect(timeout=20)
        leader = distributed.Ranks(comm, "cpu")
        if comm.rank:
            return leader.follow()
        with pytest.raises(DistributedError, match="no room"):
            leader.run(fails)
        found = leader.run(lambda comm: comm.allgather(comm.rank))
        leader.finish()
        return found

    assert spawn(work, ranks=3)[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("torch-cp-sdpa", {"mask": "document"}, "takes the masks full, causal"),
        ("torch-cp-sdpa", {}, "operators of GPUs only"),
        ("torch-cp-flex", {"direction": "backward"}, "no gradients on the CPU"),
        ("torch-cp-flex", {"dropout": 0.1}, "dropout depends on the number of ranks"),
        ("ulysses-sdpa", {"exact": True}, "no deterministic backward"),
        ("ulysses-sdpa", {"kv_heads": 1}, "2 ranks do not divide 512 rows and 1 key heads"),
        ("ulysses-fa3", {}, "flash_attn_3 is not installed"),
    ],
)
def test_what_a_peer_cannot_do_it_says(name, case, reason, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(ranks, "installed", lambda package: False)
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: None)
    given = Case("causal", 512, 4, 2, "forward")._replace(**case)
    with pytest.raises(ranks.Unsupported, match=reason):
        ranks.PEERS[name](given, distributed.documents(512), "cpu", 0, 2)


def on_ranks(rank, store):
    """Check on a rank of a process group the peers that know the CPU, and a case's memory."""
    import torch

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    n, generator = 512, torch.Generator().manual_seed(0)
    forwards = [("torch-cp-flex", mask, "forward") for mask in distributed.MASKS]
    both = [("ulysses-sdpa", mask, "backward") for mask in ("full", "causal")]
    for name, mask, direction in forwards + both:
        case = Case(mask, n, 4, 2, direction)
        q, k, v, do = (torch.randn(1, heads, n, 32, generator=generator) for heads in (4, 2, 2, 4))
        peer = ranks.PEERS[name](case, distributed.documents(n), "cpu", rank, 2)

        def local(x, peer=peer):
            return x[:, :, peer.rows].movedim((1, 2), (peer.heads_axis, peer.rows_axis)).contiguous()

        fwd = cuattn.forward(q, k, v, **case.options())
        o, kept = peer.forward(*map(local, (q, k, v)))
        np.testing.assert_allclose(o, local(fwd.o), atol=1e-5)
        if direction == "backward":
            grads = cuattn.backward(do, q, k, v, fwd, **case.options())
            for found, exact in zip(peer.backward(local(do), kept), grads[:3], strict=True):
                np.testing.assert_allclose(found, local(exact), atol=1e-5)
    comm = connect(torch.distributed.group.WORLD, timeout=20.0)
    for direction in ("forward", "backward"):
        found = distributed.together(comm, Case("causal", n, 4, 2, direction), "cpu", 0.0)
        assert 0 < found["extra_share"] < 6  # of a toy, whose tables of masks count
    torch.distributed.destroy_process_group()


def test_peers_on_ranks_of_the_cpu(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("without torch.distributed")
    import torch.multiprocessing as processes

    processes.spawn(on_ranks, (tmp_path / "store",), nprocs=2)
