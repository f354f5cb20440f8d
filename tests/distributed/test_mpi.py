"""Ranks that mpiexec has started, and what becomes of them when one fails."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from cuattn.distributed import DistributedError, connect, mpi
from cuattn.distributed.gpu import load_nccl

ROOT = Path(__file__).resolve().parents[2]
MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def launch(ranks, what):
    """Run a function of `tests.distributed.program` on some ranks; return exit status, output and seconds."""
    pytest.importorskip("mpi4py")
    if MPIEXEC is None:
        pytest.skip("needs mpiexec")
    command = [MPIEXEC, "-n", str(ranks), sys.executable, "-m", "tests.distributed.program", what]
    begin, env = time.monotonic(), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=60)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - begin


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls(ranks):
    status, output, _ = launch(ranks, "calls")
    assert status == 0, output
    assert output.count("done") == ranks


def needs_gpus(count, nccl=True):
    """Skip where there are fewer GPUs, or no NCCL."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < count or (nccl and not load_nccl().available):
        pytest.skip(f"needs {count} GPUs" + " and NCCL" * nccl)


@pytest.mark.gpu
@pytest.mark.parametrize("what", ["calls_on_gpus", "calls_over_nccl"])
def test_calls_on_gpus(what):
    needs_gpus(2, what == "calls_over_nccl")
    status, output, _ = launch(2, what)
    assert status == 0, output
    assert output.count("done") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:nccl", "nccl"])
def test_a_process_group_of_nccl(backend):
    needs_gpus(2)
    of_torch("calls_on_gpus", backend=backend)


def test_disagreement():
    status, output, _ = launch(3, "disagree")
    assert status == 0, output


def test_a_message_of_another_size():
    status, output, _ = launch(2, "short")
    assert status == 0, output


@pytest.mark.parametrize("what", ["killed", "raises", "late", "late_message", "interrupted", "connecting"])
def test_a_rank_that_fails_ends_the_job(what):
    status, output, seconds = launch(2, what)
    assert status != 0 and "done" not in output and "AssertionError" not in output, output
    assert seconds < 30


def test_a_launcher_of_another_mpi_is_told(monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    if mpi.launched() != 4:
        pytest.skip("under a launcher")
    code = "from cuattn.distributed import connect; connect()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=os.environ)
    assert "the launcher has started 4 ranks, and mpi4py's MPI knows 1" in done.stderr


def test_a_launcher_without_mpi4py_is_told(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DistributedError, match=r'pip install "cuattn\[mpi\]"'):
        connect()


def test_alone_mpi_is_not_imported():
    code = "import sys, cuattn.distributed as d; assert d.connect().size == 1; assert 'mpi4py' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def of_torch(what, statuses=(0, 0), backend="gloo"):
    """Run a program on two ranks of a process group of PyTorch; return their output."""
    torch = pytest.importorskip("torch")
    if not torch.distributed.is_available():
        pytest.skip("without torch.distributed")
    code = f"""
import os, sys, time, torch, numpy as np
from cuattn import distributed
from tests.distributed import program
rank, gpus = int(sys.argv[2]), {"nccl" in backend}
if gpus:
    torch.cuda.set_device(rank)
torch.distributed.init_process_group("{backend}", init_method=f"file://{{sys.argv[1]}}", rank=rank, world_size=2)
timeout = {30.0 if what.startswith("calls") else 1.0}
comm = distributed.connect(torch.distributed.group.WORLD, device=rank if gpus else None, timeout=timeout)
program.{what}(comm)
torch.distributed.destroy_process_group()
"""
    with tempfile.TemporaryDirectory() as folder:
        command, pipes = [sys.executable, "-c", code, f"{folder}/store"], dict(stderr=subprocess.PIPE, text=True)
        ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT, **pipes) for rank in (0, 1)]
        told = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == list(statuses), told


def test_a_process_group_of_torch():
    of_torch("calls")


def test_a_process_group_of_torch_has_deadlines():
    """As of `connect`, not its own of half an hour; and it is told who is late, or dead."""
    of_torch("late_of_torch")
    of_torch("dies_of_torch", (0, 3))


def test_objects_of_any_size_are_gathered():
    status, output, _ = launch(3, "objects")
    assert status == 0, output
